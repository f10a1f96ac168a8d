"""Numbers as short text, for labels and tables."""

import math

from tqdm import tqdm


def number(value: float | None) -> str:
    """A number short enough for a label: `1234567` becomes `1.23M`."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:.3g}" if abs(value) < 999.5 else tqdm.format_sizeof(value)


def percent(value: float | None) -> str:
    """A share as a percentage."""
    return "–" if value is None or not math.isfinite(value) else f"{100 * value:.1f} %"
