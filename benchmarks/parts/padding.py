"""How much of what is computed is padding, by arithmetic: no model runs."""

import math
from typing import Any

import numpy as np

from lze_trl.pack.layout import Geometry, Layout, pack, padding_efficiency

from ..comparison import Spread
from ..tables import table
from .shared import LONGEST, Lengths, circumstances, measured_on, reasoning_batch, shown, verdict


TARGET = 0.9
GROUP_SIZE, MICRO_BATCH_ROWS = 8, 8
_PROCESSES, _BATCHES = (1, 2, 8), (128, 512, 2048)


def trl_tokens(batch: Lengths, processes: int) -> int:
    """Return the tokens that TRL computes: every row as wide as the longest prompt and completion of its process."""
    parts = zip(
        np.array_split(batch.prompt_tokens, processes), np.array_split(batch.completion_tokens, processes), strict=True
    )
    return sum(len(prompt) * int(prompt.max() + completion.max()) for prompt, completion in parts)


def chosen_rows(num_groups: int, share: float, rng: np.random.Generator) -> np.ndarray:
    """Return the rows of a share of the groups, chosen at random."""
    groups = np.sort(rng.permutation(num_groups)[: round(share * num_groups)])
    return (groups[:, None] * GROUP_SIZE + np.arange(GROUP_SIZE)).ravel()  # (K, G) → (K·G,)


def packed(batch: Lengths, rows: np.ndarray, geometry: Geometry) -> Layout:
    """Return the layout of some rows in one optimizer step, each process holding an equal part of the batch."""
    owner = rows * geometry.num_processes // len(batch.prompt_tokens)
    chunk = np.zeros(len(rows), dtype=np.int64)
    return pack(batch.prompt_tokens[rows], batch.completion_tokens[rows], chunk, geometry, owner)


def computed(batch: Lengths, rows: np.ndarray, layout: Layout, processes: int) -> tuple[int, int]:
    """Return the real and computed tokens of all processes."""
    prompts, completions = batch.prompt_tokens[rows], batch.completion_tokens[rows]
    each = [padding_efficiency(layout, prompts, completions, process) for process in range(processes)]
    return sum(real for real, _ in each), sum(total for _, total in each)


def _case(processes: int, size: int, share: float, draws: int) -> dict[str, Any]:
    steps = size // (processes * MICRO_BATCH_ROWS)
    geometry = Geometry(processes, steps, steps, MICRO_BATCH_ROWS)
    ours, theirs, tokens, used = [], [], [], []
    for draw in range(draws):
        rng = np.random.default_rng([draw, processes, size])
        batch = reasoning_batch(size // GROUP_SIZE, GROUP_SIZE, LONGEST, rng)
        rows = chosen_rows(size // GROUP_SIZE, share, rng)
        layout = packed(batch, rows, geometry)
        real, total = computed(batch, rows, layout, processes)
        full = trl_tokens(batch, processes)
        ours.append(real / total)
        theirs.append(int(batch.prompt_tokens.sum() + batch.completion_tokens.sum()) / full)
        tokens.append(total / full)
        used.append(sum(step is not None for step in layout.micro_steps))
    return {
        "processes": processes,
        "completions": size,
        "share": share,
        "micro_steps": steps,
        "used_micro_steps": float(np.median(used)),
        "efficiency": ours,
        "trl_efficiency": theirs,
        "computed_tokens": tokens,
    }


def measure(quick: bool) -> dict[str, Any]:
    """Measure padding efficiency for several batch sizes, numbers of processes and shares chosen."""
    draws = 3 if quick else 20
    return circumstances("padding") | {
        "draws": draws,
        "longest": LONGEST,
        "rows": [
            _case(processes, size, share, draws)
            for processes in _PROCESSES
            for size in _BATCHES
            for share in (1.0, 0.4)
        ],
    }


def markdown(result: dict[str, Any]) -> str:
    """Return the result as a Markdown table."""
    rows = []
    for case in result["rows"]:
        ours = Spread(tuple(case["efficiency"]))
        rows.append(
            [
                str(case["processes"]),
                f"{case['completions']:,}",
                f"{case['share']:g}",
                shown(Spread(tuple(case["trl_efficiency"]))),
                shown(ours),
                verdict(ours.median, TARGET, least=True),
                shown(Spread(tuple(case["computed_tokens"]))),
                f"{math.ceil(case['used_micro_steps'])} of {case['micro_steps']}",
            ]
        )
    header = ["processes", "completions", "ρ", "TRL", "packed", "target", "tokens computed × TRL's"]
    return "\n\n".join(
        [
            "## Padding efficiency",
            f"Real tokens / computed tokens on log-normal lengths up to {result['longest']:,}, groups of {GROUP_SIZE}, "
            f"{MICRO_BATCH_ROWS} rows a micro-batch in TRL, one optimizer step a batch: median and range of "
            f"{result['draws']} draws. TRL computes all rows; at ρ = 0.4 the packed ones are those of random groups.",
            table([*header, "micro-steps used"], rows),
            measured_on(result),
        ]
    )
