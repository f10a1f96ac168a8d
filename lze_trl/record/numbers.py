"""Numbers as short text, for labels and tables."""

import math


_UNITS = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def number(value: float | None, space: str = "") -> str:
    """A number short enough for a label: `1234567` becomes `1.23M`."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == int(value) and abs(value) < 1e4:
        return str(int(value))
    rounded = float(f"{value:.3g}")  # 999,950 is 1M
    for size, unit in _UNITS:
        if abs(rounded) >= max(size, 1e4):
            return f"{rounded / size:.3g}{space}{unit}"
    return f"{value:.0f}" if abs(rounded) >= 1e3 else f"{value:.3g}"


def count(value: float) -> str:
    """A count as the console shows it: `1234` → `1,234`, `12345` → `12.3 k`."""
    return f"{value:,.0f}" if value < 1e4 else number(value, space=" ")


def duration(seconds: float) -> str:
    """A time as `45 s`, `12 min` or `3 h 20 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def percent(value: float | None) -> str:
    """A share as a percentage."""
    return "–" if value is None or not math.isfinite(value) else f"{100 * value:.1f} %"
