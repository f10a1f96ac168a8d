"""
Charts as HTML: an SVG plot that stretches, and text that does not, so that they are readable on a phone as well.

Colours are CSS variables, so that the page decides on light and dark. The series colours are those of Okabe and Ito,
which the colour-blind can tell apart; lines differ in their dashes too.
"""

import base64
import io
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from markupsafe import Markup
from PIL import Image, ImageOps

from ..record.numbers import number, percent
from .markup import HTML


_TICKS = 6
"""Intervals of an axis, at most."""

_DARK, _MIDDLE, _BRIGHT = "#00224e", "#7b7b78", "#fee838"
"""Of the colour map cividis."""


@dataclass
class Series:
    """One line of a chart: increasing positions and their values, NaN where there is none, each of shape `(n,)`."""

    name: str
    x: np.ndarray
    y: np.ndarray
    band: tuple[np.ndarray, np.ndarray] | None = None
    """Lower and upper end of the band around it."""
    points: bool = False
    """Whether to mark every value."""

    def __post_init__(self):
        self.x, self.y = np.asarray(self.x, dtype=float), np.asarray(self.y, dtype=float)


@dataclass(frozen=True)
class Look:
    """How the reader wants to see lines."""

    smoothing: float = 0.0  # weight of what came before in a moving average
    logarithmic: bool = False  # vertical axis
    span: tuple[float, float] | None = None  # part of the horizontal axis
    compared: bool = False  # whether the pointer shows the distance of each line from the first

    def bins(self, length: float, bins: int = 200) -> int:
        """How many rows to reduce a run of this length to, so that what is seen of it has `bins` of them."""
        return (
            bins if self.span is None else int(min(bins * max(1.0, length / (self.span[1] - self.span[0])), 100_000))
        )

    def of(self, line: Series) -> Series:
        """What is seen of a line."""
        low, high = self.span or (-np.inf, np.inf)
        seen = (line.x >= low) & (line.x <= high)
        y, *ends = (self._values(values)[seen] for values in (line.y, *(line.band or ())))
        return replace(line, x=line.x[seen], y=y, band=(ends[0], ends[1]) if ends else None)

    def _values(self, values: np.ndarray) -> np.ndarray:
        values = self._smooth(values) if self.smoothing else values
        return np.where(values > 0, values, np.nan) if self.logarithmic else values

    def _smooth(self, values: np.ndarray) -> np.ndarray:
        averages = pd.Series(values).ewm(alpha=1 - self.smoothing, ignore_na=True).mean()
        return averages.where(np.isfinite(values)).to_numpy()


PLAIN_LOOK = Look()


def line_chart(
    title: str,
    series: list[Series],
    x_label: str = "step",
    y_range: tuple[float, float] | None = None,
    as_percent: bool = False,
    height: int = 220,
    look: Look = PLAIN_LOOK,
) -> Markup:
    """Chart of this height in pixels with one line per series. By default, the vertical axis is that of the values."""
    raw = replace(look, smoothing=0.0)
    shadows = [raw.of(line) for line in series if look.smoothing]
    series = [look.of(line) for line in series]
    drawn = [line for line in series if np.isfinite(line.y).any()]
    if not drawn:
        return HTML.empty_chart(title, height)
    show = (lambda value: f"{number(round(100 * value, 3))} %") if as_percent else number
    x_low, x_high = x_span = look.span or _span(np.concatenate([line.x for line in drawn]))
    bounds = np.concatenate([values for line in (*drawn, *shadows) for values in (line.y, *(line.band or ()))])
    if as_percent and np.nanmin(bounds) == np.nanmax(bounds):
        y_range = y_range or (0.0, 1.0)  # what surrounds a constant would not be shares
    scale: Callable[[np.ndarray], np.ndarray] = np.log10 if look.logarithmic else np.asarray
    if look.logarithmic:
        (y_low, y_high), y_ticks = _logarithmic_axis(np.nanmin(bounds), np.nanmax(bounds), show)
    else:
        y_low, y_high = y_range or _rounded(*_span(bounds))
        y_ticks = _ticks((y_low, y_high), show)

    def place(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Positions in per mille of the plot, shape `(n, 2)`."""
        left = (x - x_low) / (x_high - x_low) * 1000
        top = (y_high - np.clip(scale(y), y_low, y_high)) / (y_high - y_low) * 1000
        return np.stack([left, top], axis=1)

    def shapes(line: Series) -> dict:
        places = place(line.x, line.y)
        low, high = (place(line.x, end) for end in line.band) if line.band else (places[:0], places[:0])
        return {
            "name": line.name,
            "path": _path(places),
            "band": " ".join(f"{left:.1f},{top:.1f}" for left, top in _finite(np.concatenate([high, low[::-1]]))),
            "marks": (_finite(places) / 10).tolist() if line.points else [],
        }

    latest = "; ".join(f"{line.name} {show(float(line.y[np.isfinite(line.y)][-1]))}" for line in drawn)
    return HTML.line_chart(
        title,
        f"{title}. Latest: {latest}.",
        height,
        lines=[shapes(line) for line in series],
        shadows=[_path(place(line.x, line.y)) for line in shadows],
        hover=_hover_data(series, x_span, as_percent, look.compared),
        x_label=x_label,
        x_ticks=_ticks(x_span, number, whole=all((line.x % 1 == 0).all() for line in drawn)),
        y_ticks=y_ticks,
    )


def heat_map(title: str, x: np.ndarray, shares: np.ndarray, y_max: float, x_label: str, height: int = 240) -> Markup:
    """
    Distribution of the energy, up to `y_max`, at the positions `x` of shape `(T,)`. The shares of the groups have the
    shape `(T, 1 + bins)`: first those of dead ones, which have a row of their own at the bottom.
    """
    if not len(x):
        return HTML.empty_chart(title, height)
    live = shares[:, 1:]
    top = math.ceil(100 * brightest(live) - 1e-9) / 100
    dead_now, live_now = percent(shares[-1, 0]), percent(live[-1].sum())
    return HTML.heat_map(
        title,
        f"{title}: {dead_now} of the latest groups are dead, {live_now} have energy.",
        height,
        live=_image(np.sqrt(live / top)),  # the root, because a few groups at high energy are what one looks for
        dead=_image(shares[:, :1]),
        top=f"{100 * top:.0f} %",
        x_label=x_label,
        x_ticks=_ticks(_span(x), number, whole=True),
        y_ticks=_ticks((0.0, y_max), number),
    )


def brightest(shares: np.ndarray) -> float:
    """The share that has the brightest colour. A few extreme cells at the start of a run would make all others dark."""
    return float(np.quantile(shares[shares > 0], 0.99)) if (shares > 0).any() else 1.0


def _image(shares: np.ndarray) -> str:
    """PNG of shape `(bins, T)` as a data address."""
    grey = 255 * np.clip(shares.T[::-1], 0.0, 1.0)  # (bins, T), largest energy on top
    coloured = ImageOps.colorize(Image.fromarray(grey.astype(np.uint8)), _DARK, _BRIGHT, mid=_MIDDLE)
    buffer = io.BytesIO()
    coloured.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _finite(places: np.ndarray) -> np.ndarray:
    return places[np.isfinite(places).all(axis=1)]


def _path(places: np.ndarray) -> str:
    """Commands of an SVG path through the places, with gaps where there is no value."""
    drawn = np.isfinite(places[:, 1])
    begins = drawn & ~np.concatenate([[False], drawn[:-1]])
    points = zip(begins[drawn], places[drawn], strict=True)
    return "".join(f"{'M' if begin else 'L'}{left:.1f} {top:.1f}" for begin, (left, top) in points)


def _hover_data(series: list[Series], x_span: tuple[float, float], as_percent: bool, compared: bool) -> str:
    """What the page's script shows under the pointer, and writes as CSV."""
    lines = [
        {
            "name": line.name,
            "x": [float(f"{x:.6g}") for x in line.x.tolist()],
            "y": [float(f"{y:.4g}") if math.isfinite(y) else None for y in line.y.tolist()],
        }
        for line in series
    ]
    data = {"low": x_span[0], "high": x_span[1], "percent": as_percent, "compared": compared, "lines": lines}
    return json.dumps(data, separators=(",", ":"))


def _ticks(span: tuple[float, float], show: Callable[[float], str], whole: bool = False) -> list[tuple[float, str]]:
    """Round numbers, or whole ones, within the span: their places in percent of it, and what is shown there."""
    low, high = span
    step = max(_round_step(high - low), 1.0) if whole else _round_step(high - low)
    numbers = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    return [(100 * (number * step - low) / (high - low), show(number * step)) for number in numbers]


def _logarithmic_axis(
    low: float, high: float, show: Callable[[float], str]
) -> tuple[tuple[float, float], list[tuple[float, str]]]:
    """Logarithms of the ends of an axis that holds these values, and its ticks as of [`_ticks`]."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 2)
    factors = (1, 2, 5) if high < 100 * low else (1,)
    numbers = [factor * 10.0**decade for decade in decades for factor in factors]
    bottom = max(number for number in numbers if number <= low * (1 + 1e-9))
    top = min(number for number in numbers if number >= high * (1 - 1e-9) and number > bottom)
    kept = [number for number in numbers if bottom <= number <= top]
    ends = math.log10(bottom), math.log10(top)
    shown = kept[:: math.ceil(len(kept) / (_TICKS + 1))]
    return ends, [(100 * (math.log10(n) - ends[0]) / (ends[1] - ends[0]), show(n)) for n in shown]


def _round_step(length: float) -> float:
    """Distance of the ticks of an axis of this length, a round number."""
    least = length / _TICKS * (1 - 1e-9)
    magnitude = 10.0 ** math.floor(math.log10(least))
    return next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= least)


def _span(values: np.ndarray) -> tuple[float, float]:
    values = values[np.isfinite(values)]
    low, high = float(values.min()), float(values.max())
    if high - low > 1e-9 * max(abs(low), abs(high)):
        return low, high
    size = abs(low)  # of a constant, up to rounding
    margin = max(min(0.5, 0.5 * size) or 0.5, 1e-6 * size)  # which a large number does not swallow
    return low - margin, high + margin


def _rounded(low: float, high: float) -> tuple[float, float]:
    """The span with its ends moved out to the next ticks."""
    step = _round_step(high - low)
    return math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
