"""The former names of what a batch holds."""

from typing import Any

from .batch import Batch, Prompts, Table, differ, extremes, section


Groups = Table


class Rollouts(Batch):
    """A batch by its former name."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Batch:  # type: ignore[misc]
        return Batch.of(*args, **kwargs)


__all__ = ["Groups", "Prompts", "Rollouts", "differ", "extremes", "section"]
