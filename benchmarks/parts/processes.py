"""What the gate draws on several processes, by arithmetic: no model runs."""

from typing import Any

import numpy as np
from scipy.stats import binom

from ..tables import table
from .shared import circumstances, measured_on


_PROCESSES = (1, 2, 4, 8)
_BATCHES = (
    (2, 4),
    (3, 4),
    (4, 8),
    (8, 8),
    (16, 8),
    (32, 8),
    (64, 16),
    (128, 8),
)  # prompts, and completions of a group
_GOES_ON = 0.3  # share of the groups that are completed


def completions(num_prompts: int, group_size: int, processes: int, goes_on: float = _GOES_ON) -> float:
    """
    Return the completions that the gate is expected to draw × plain GRPO's: one of each prompt, and the others of each group that goes on, each with the
    same probability. Every process draws as many in a round as the one with the most.
    """

    def drawn(rows: np.ndarray) -> np.ndarray:
        return -(-rows // processes) * processes

    groups = np.arange(num_prompts + 1)
    rows = drawn(np.array(num_prompts)) + drawn(groups * (group_size - 1))
    return float(binom.pmf(groups, num_prompts, goes_on) @ rows) / (num_prompts * group_size)


def measure(quick: bool) -> dict[str, Any]:
    """Measure completions × of small and usual batches, for each number of processes."""
    rows = [
        {"prompts": prompts, "group_size": size, "completions": [completions(prompts, size, n) for n in _PROCESSES]}
        for prompts, size in _BATCHES
    ]
    return circumstances("processes") | {"processes": list(_PROCESSES), "goes_on": _GOES_ON, "rows": rows}


def markdown(result: dict[str, Any]) -> str:
    """Return the result as a Markdown table."""
    rows = [
        [f"{row['prompts']} × {row['group_size']}", *(f"{times:.2f}" for times in row["completions"])]
        for row in result["rows"]
    ]
    counts = [f"{count} process{'es' * (count > 1)}" for count in result["processes"]]
    return "\n\n".join(
        [
            "## The gate on several processes",
            f"Completions × plain GRPO's where {result['goes_on']:.0%} of the groups go on after their first completion. Every process draws as many "
            "as the others in each round. Over HTTP (`vllm_mode: http`) nothing is drawn to even them out: the column of one process holds.",
            table(["prompts × completions", *counts], rows),
            measured_on(result),
        ]
    )
