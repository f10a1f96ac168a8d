"""Numbers as short text, for labels and tables."""

import math
import time
from itertools import pairwise
from statistics import median

from tqdm import tqdm


PACED = 20
"""Latest steps whose pace tells how long the others will take."""


def number(value: float | None) -> str:
    """Write a number short enough for a label: `1234567` becomes `1.23M`."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:.3g}" if abs(value) < 999.5 else tqdm.format_sizeof(value)


def fixed(value: float | None) -> str:
    """Write a reward, or another number of about 1, with three decimals."""
    return "–" if value is None or not math.isfinite(value) else f"{value:z.3f}"


def percent(value: float | None) -> str:
    """Write a share as a percentage."""
    return "–" if value is None or not math.isfinite(value) else f"{100 * value:z.1f} %"


def ago(then: float) -> str:
    """Say how long ago a time in Unix seconds was: `8 s ago`."""
    seconds = max(0.0, time.time() - then)
    for name, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {name} ago"
    return f"{seconds:.0f} s ago"


def pace(steps: list[tuple[int, float]]) -> float | None:
    """Return the median seconds of a step, from steps in ascending order and the Unix seconds at which they were seen; `None` for fewer than two."""
    spent = [(now - then) / (step - last) for (last, then), (step, now) in pairwise(steps) if step > last]
    return median(spent) if spent else None
