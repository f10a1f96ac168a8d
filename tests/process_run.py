"""Training runs under a launcher, for the tests that compare numbers of processes and ways to shard.

    torchrun --nproc-per-node 2 tests/process_run.py CASES.json

The cases are those of `case_runs.py`. Completions are a function of prompt, place in the group and step, not of a process's
random numbers: what is left to differ is what the trainer decides.
"""

import os
import sys
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import DistributedType

import tiny
from case_runs import leave, run_all
from lze_trl import LZEGRPOTrainer


def mostly_reward(completions, **kwargs):
    """Passes four completions in five, so that some prompts are soon solved and pruned."""
    return [float(len(text) % 5 != 4) for text in completions]


class RecordingSelector:
    """Notes what the trainer's own selector chose."""

    def __init__(self, selector):
        self.selector, self.choices = selector, []

    def select(self, groups, k, rng):
        chosen = self.selector.select(groups, k, rng)
        self.choices.append([groups.prompt_ids.tolist(), groups.energies.tolist(), chosen.tolist()])
        return chosen


def run(directory: Path, name: str, settings: dict):
    world = int(os.environ.get("WORLD_SIZE", "1"))
    settings["per_device_train_batch_size"] //= world
    dataset = tiny.prompts(17)
    if settings.pop("stream", False):
        # Of batches of 3, the first holds a prompt three times, and the second one twice
        dataset = dataset.select([0, 0, 0, 1, 2, 1, 2, *range(3, 17)]).to_iterable_dataset()
    resume = settings.pop("resume", None)  # name of a run before this one, and its checkpoint
    args = tiny.config(directory / f"{name}-{world}", **settings)
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        on_cpu_like_gpu()
    own = {"rollout_func": tiny.fixed_rollouts, "selector": RecordingSelector(args.make_selector())}
    trainer = LZEGRPOTrainer(str(directory / "model"), mostly_reward, args, train_dataset=dataset, **own)
    trainer.train(resume_from_checkpoint=resume and str(directory / f"{resume[0]}-{world}" / resume[1]))
    (directory / f"{name}.way").write_text(type(trainer.model_wrapped).__name__)
    result = {name: getattr(trainer.ledger, name) for name in ("rows_trained", "visits_skipped", "empty_updates")}
    result |= {
        "choices": trainer.generation_step.selector.choices,
        "foresight": trainer.prompt_state.foresight.model.weights.tolist(),
        "alive": trainer.prompt_state.prompts(trainer.prompt_state["prompt_ids"]).alive.tolist(),
    }
    leave(directory, name, trainer, result)


def on_cpu_like_gpu():
    """
    Let accelerate shard with FSDP2 on a CPU. It reads its own setting for that on accelerators only, though what it calls
    then, `torch.distributed.fsdp.fully_shard`, works over gloo as well.
    """
    PartialState().distributed_type = DistributedType.MULTI_GPU


if __name__ == "__main__":
    run_all(run, Path(sys.argv[1]))
