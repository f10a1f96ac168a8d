"""A run whose completions come from a server: `python tests/nodes_run.py DIRECTORY URL STEPS`."""

import sys
from pathlib import Path

import torch

import tiny
from lze_trl import LZEGRPOTrainer
from lze_trl.checkpoint import last_complete_checkpoint


def main(directory: Path, url: str, steps: int, **settings):
    trainer = LZEGRPOTrainer(
        model=tiny.model(),
        reward_funcs=tiny.even_length_reward,
        args=tiny.config(
            directory / "run",
            strategy=settings.pop("strategy", "gate"),
            max_steps=steps,
            lr_scheduler_type="constant",
            save_strategy="steps",
            save_steps=settings.pop("save_steps", 1),
            telemetry=True,
            use_vllm=True,
            vllm_mode="http",
            vllm_server_urls=[url],
            vllm_server_kwargs={"sync_tolerance": 100.0, "sync_dir": str(directory / "sync")},
            **settings,
        ),
        train_dataset=tiny.prompts(12),
        processing_class=tiny.tokenizer(),
    )
    trainer.train(resume_from_checkpoint=last_complete_checkpoint(directory / "run"))
    directory.mkdir(parents=True, exist_ok=True)
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if trainer.is_world_process_zero():
        torch.save(weights, directory / "weights.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), per_device_train_batch_size=12)
