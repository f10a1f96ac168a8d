"""The job around the trainer: recipes, the command, training, the demo and the Hub."""

from pathlib import Path


CHECKOUT = Path(__file__).resolve().parents[2]
"""Root of the clone of the repository, where there is one."""


def is_worded(error: Exception) -> bool:
    """Whether the message of an error says what to do, as those of this package and of trackers do; others need a traceback."""
    return type(error).__module__.startswith(("lze_trl.", "wandb.errors"))
