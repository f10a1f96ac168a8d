"""What the measurements on the addition task share: its warm start, and a trainer that says nothing."""

from typing import Any

import datasets
from datasets import Dataset
from transformers import PrinterCallback
from transformers.utils import logging as transformers_logging

from lze_trl.config import LZEGRPOConfig
from lze_trl.job import demo
from lze_trl.rewards import exact_match_reward
from lze_trl.trainer import LZEGRPOTrainer

from .tasks import TASKS, TaskFiles, locate


TASK = TASKS["addition"]


def prepare() -> TaskFiles:
    """Files of the task, with the warm start made unless it exists; the libraries show no progress bars any more."""
    demo.setup_logging(is_main=True)
    datasets.disable_progress_bars()
    transformers_logging.disable_progress_bar()
    demo.warm_start(demo.WARM_START_DIR, demo.WarmStart())
    return locate("addition")


def build_trainer(
    files: TaskFiles, rows: list[dict[str, str]], directory: str, settings: dict[str, Any]
) -> LZEGRPOTrainer:
    """
    Trainer of the task, without telemetry, logs and checkpoints.

    Args:
        files ([`TaskFiles`]): Where the warm start lies.
        rows (`list[dict]`): Training prompts.
        directory (`str`): Output directory.
        settings (`dict`): Fields of [`LZEGRPOConfig`] that replace, or add to, those of the task.
    """
    trainer = LZEGRPOTrainer(
        model=str(files.model),
        reward_funcs=exact_match_reward,
        args=LZEGRPOConfig(
            output_dir=directory,
            learning_rate=TASK.learning_rate,
            **{"strategy": "lze"} | TASK.training | settings,
            telemetry=False,
            disable_tqdm=True,
            summary=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Dataset.from_list(rows),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer
