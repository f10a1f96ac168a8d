"""What it costs to compare written problems with all that is known: time and memory of 64 candidates against 10⁵ and 10⁶ problems."""

import time
from typing import Any

import numpy as np
import psutil

from lze_trl.selfplay.overlap import OverlapIndex

from ..comparison import Spread
from ..tables import table
from .shared import circumstances, measured_on, shown, verdict


CANDIDATES, SECONDS, MEGABYTES = 64, 10.0, 1_000.0
WORDS = 8_000


def problems(count: int, rng: np.random.Generator) -> list[str]:
    """
    Return the texts as long as the problems of MATH, of which half have 25 to 61 tokens: words by Zipf's law, and numbers, which differ from problem to
    problem.
    """
    words = np.array([f"{i:x}".translate(str.maketrans("0123456789", "ghijklmnop")) for i in range(WORDS)])
    lengths = np.clip(np.exp(rng.normal(3.65, 0.64, count)), 9, 250).astype(int)
    drawn = words[np.minimum(rng.zipf(1.3, lengths.sum()), WORDS) - 1].astype(object)
    numbers = rng.random(len(drawn)) < 0.1
    drawn[numbers] = rng.integers(0, 1_000, numbers.sum()).astype(str).astype(object)
    ends = np.cumsum(lengths)
    return [" ".join(drawn[end - length : end]) for end, length in zip(ends, lengths, strict=True)]


def _resident() -> float:
    """Return the memory of this process, in MB."""
    return psutil.Process().memory_info().rss / 1e6


def _size(count: int, repetitions: int) -> dict[str, Any]:
    rng = np.random.default_rng(count)
    index = OverlapIndex()
    before = _resident()
    for begin in range(0, count, 10_000):
        index.add(problems(min(10_000, count - begin), rng))
    megabytes = _resident() - before
    seconds: list[float] = []
    for _ in range(repetitions):
        candidates = problems(CANDIDATES, rng)
        begun = time.perf_counter()
        index.nearest(candidates)
        seconds.append(time.perf_counter() - begun)
    return {"problems": count, "seconds": seconds, "megabytes": megabytes}


def measure(quick: bool) -> dict[str, Any]:
    """Return 64 candidates against an index of 10⁵ and of 10⁶ problems."""
    sizes, repetitions = ((10**3, 10**4), 1) if quick else ((10**5, 10**6), 3)
    return circumstances("overlap") | {"rows": [_size(size, repetitions) for size in sizes]}


def markdown(result: dict[str, Any]) -> str:
    """Return the result as a Markdown table."""
    rows = []
    for case in result["rows"]:
        seconds = Spread(tuple(case["seconds"]))
        per_problem = 1e6 * case["megabytes"] / case["problems"]
        rows.append(
            [
                f"{case['problems']:,}",
                shown(seconds),
                f"{case['megabytes']:,.0f} ({per_problem:.0f} bytes a problem)",
                verdict(seconds.median, SECONDS) if case is result["rows"][0] else "–",
                verdict(case["megabytes"], MEGABYTES),
            ]
        )
    header = [
        "problems",
        f"s for {CANDIDATES} candidates",
        "memory, MB",
        "target: s",
        "target: MB",
    ]
    return "\n\n".join(
        [
            "## Overlap of written problems",
            "The similarity (ROUGE-L F1) of the nearest problem to each candidate. All cores. Median and range.",
            table(header, rows),
            measured_on(result),
        ]
    )
