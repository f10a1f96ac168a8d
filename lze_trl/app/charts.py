"""Charts as HTML: an SVG plot that stretches, and text that does not, so that they are readable on a phone as well.

Colours are CSS variables, so that the page decides on light and dark. The series colours are those of Okabe and Ito,
which the colour-blind can tell apart; lines differ in their dashes too.
"""

import base64
import io
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from html import escape

import numpy as np
from PIL import Image


_DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 4", "12 4")
_NUM_COLOURS = 6
_TICKS = 5

# Anchors of the cividis colour map, dark to bright
_CIVIDIS = np.array(
    [
        [0, 34, 78],
        [24, 55, 109],
        [61, 79, 109],
        [90, 101, 112],
        [123, 123, 120],
        [156, 148, 119],
        [191, 174, 107],
        [228, 203, 82],
        [254, 232, 56],
    ]
)


@dataclass
class Series:
    """
    One line of a chart.

    Attributes:
        name (`str`): Shown in the legend, as text.
        x (`np.ndarray` of shape `(n,)`): Increasing positions.
        y (`np.ndarray` of shape `(n,)`): Values, NaN where there is none.
        low (`np.ndarray`, *optional*): Lower end of the band around it.
        high (`np.ndarray`, *optional*): Upper end of the band around it.
        points (`bool`): Whether to mark every value.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    points: bool = False


def number(value: float | None) -> str:
    """A number short enough for a label: `1234567` becomes `1.23M`."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == int(value) and abs(value) < 1e4:
        return str(int(value))
    rounded = float(f"{value:.3g}")  # 999,950 is 1M
    for limit, suffix in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(rounded) >= limit:
            return f"{rounded / (1e3 if suffix == 'k' else limit):.3g}{suffix}"
    return f"{value:.0f}" if abs(rounded) >= 1e3 else f"{value:.3g}"


def percent(value: float | None) -> str:
    """A share as a percentage."""
    return "–" if value is None or not math.isfinite(value) else f"{100 * value:.1f} %"


def _tick_percent(value: float) -> str:
    return f"{number(round(100 * value, 1))} %"


def line_chart(
    title: str,
    series: list[Series],
    x_label: str,
    y_range: tuple[float, float] | None = None,
    as_percent: bool = False,
    height: int = 220,
) -> str:
    """
    Chart with one line per series.

    Args:
        title (`str`): Heading.
        series (`list[Series]`): What to draw.
        x_label (`str`): Name of the horizontal axis.
        y_range (`tuple[float, float]`, *optional*): Ends of the vertical axis. By default those of the data.
        as_percent (`bool`, *optional*, defaults to `False`): Whether values are shares.
        height (`int`, *optional*, defaults to `220`): Height of the plot in pixels.
    """
    drawn = [s for s in series if np.isfinite(s.y).any()]
    if not drawn:
        return _figure(title, "", _empty("No values yet."), height)
    show = _tick_percent if as_percent else number
    x_low, x_high = _span(np.concatenate([s.x for s in drawn]))
    bounds = [values for s in drawn for values in (s.y, s.low, s.high) if values is not None]
    y_low, y_high = y_range or _rounded(*_span(np.concatenate(bounds)))

    def place(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Positions in per mille of the plot, shape `(n, 2)`."""
        left = (x - x_low) / (x_high - x_low) * 1000
        top = (y_high - np.clip(y, y_low, y_high)) / (y_high - y_low) * 1000
        return np.stack([left, top], axis=1)

    shapes = [_grid_lines()]
    for index, line in enumerate(series):
        if line.low is not None and line.high is not None:
            shapes.append(_band(index, place(line.x, line.low), place(line.x, line.high)))
        shapes.append(_path(index, place(line.x, line.y)))
    marks = [_marks(index, place(line.x, line.y)) for index, line in enumerate(series) if line.points]
    plot = (
        f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" aria-hidden="true">{"".join(shapes)}</svg>'
        f"{''.join(marks)}"
    )
    hover = _hover_data(series, x_low, x_high, as_percent)
    body = _axes(plot, (x_low, x_high), (y_low, y_high), show, x_label, hover)
    return _figure(title, _legend([s.name for s in series]), body, height, _description(title, drawn, show))


def heat_map(title: str, x: np.ndarray, shares: np.ndarray, y_max: float, x_label: str, height: int = 240) -> str:
    """
    Distribution of the energy over time, the dead groups in a row of their own at the bottom.

    Args:
        title (`str`): Heading.
        x (`np.ndarray` of shape `(T,)`): Positions of the columns.
        shares (`np.ndarray` of shape `(T, 1 + bins)`): Shares of the groups, first those of dead ones.
        y_max (`float`): Upper end of the energy axis.
        x_label (`str`): Name of the horizontal axis.
        height (`int`, *optional*, defaults to `240`): Height of the plot in pixels.
    """
    if not len(x):
        return _figure(title, "", _empty("No values yet."), height)
    live = shares[:, 1:]
    # A few extreme cells at the start of a run would make all others dark
    top = float(np.quantile(live[live > 0], 0.99)) if (live > 0).any() else 1.0
    # Square root: a few groups at high energy are what one looks for
    picture = f'<img class="lze-heat" alt="" src="{_image(np.sqrt(live / top))}">'
    dead = f'<img class="lze-heat-dead" alt="" src="{_image(shares[:, :1])}">'
    plot = f'{picture}<div class="lze-dead">{dead}<span>dead (energy 0)</span></div>'
    body = _axes(plot, _span(x), (0.0, y_max), number, x_label, extra="lze-with-dead")
    scale = (
        f'<span class="lze-key"><i class="lze-ramp"></i>0 – {percent(top)}+ of the groups; bottom row 0 – 100 %</span>'
    )
    dead_now, energies = shares[-1, 0], live.sum(axis=1)
    label = f"{title}: {percent(dead_now)} of the latest groups are dead, {percent(energies[-1])} have energy."
    return _figure(title, scale, body, height, label)


def _image(shares: np.ndarray) -> str:
    """PNG of shape `(bins, T)` as a data address."""
    values = np.clip(shares.T[::-1], 0.0, 1.0)  # (bins, T), largest energy on top
    positions = np.linspace(0.0, 1.0, len(_CIVIDIS))
    colours = np.stack([np.interp(values, positions, channel) for channel in _CIVIDIS.T], axis=-1)
    buffer = io.BytesIO()
    Image.fromarray(colours.astype(np.uint8)).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _figure(title: str, legend: str, body: str, height: int, label: str | None = None) -> str:
    return (
        f'<figure class="lze-figure" role="group" aria-label="{escape(label or title, quote=True)}">'
        f'<figcaption><strong>{escape(title)}</strong><span class="lze-legend">{legend}</span></figcaption>'
        f'<div class="lze-body" style="--lze-height:{height}px">{body}</div></figure>'
    )


def _axes(
    plot: str,
    x_span: tuple[float, float],
    y_span: tuple[float, float],
    show_y: Callable[[float], str],
    x_label: str,
    hover: str = "",
    extra: str = "",
) -> str:
    shares = np.linspace(0.0, 1.0, _TICKS)
    rows = "".join(
        f'<span style="top:{100 * (1 - share):.0f}%">{show_y(y_span[0] + share * (y_span[1] - y_span[0]))}</span>'
        for share in shares
    )
    x_low, x_high = x_span
    ticks = [x_low + share * (x_high - x_low) for share in shares]
    if x_high - x_low >= 2 * _TICKS:
        ticks = [round(tick) for tick in ticks]
    columns = "".join(
        f'<span style="left:{100 * share:.0f}%">{number(tick)}</span>'
        for share, tick in zip(shares, ticks, strict=True)
    )
    return (
        f'<div class="lze-y {extra}">{rows}</div><div class="lze-plot {extra}"{hover}>{plot}</div>'
        f'<div class="lze-x">{columns}</div><div class="lze-x-label">{escape(x_label)}</div>'
    )


def _empty(text: str) -> str:
    return f'<p class="lze-empty">{escape(text)}</p>'


def _legend(names: list[str]) -> str:
    keys = (
        f'<span class="lze-key"><svg width="24" height="8" aria-hidden="true"><line x1="0" x2="24" y1="4" y2="4" '
        f'class="lze-line lze-c{i % _NUM_COLOURS}" stroke-dasharray="{_DASHES[i % len(_DASHES)]}"/></svg>'
        f"{escape(name)}</span>"
        for i, name in enumerate(names)
    )
    return "".join(keys)


def _grid_lines() -> str:
    return "".join(f'<line class="lze-grid" x1="0" x2="1000" y1="{y}" y2="{y}"/>' for y in (0, 250, 500, 750, 1000))


def _path(index: int, places: np.ndarray) -> str:
    commands, pen_down = [], False
    for left, top in places:
        if not math.isfinite(top):
            pen_down = False
            continue
        commands.append(f"{'L' if pen_down else 'M'}{left:.1f} {top:.1f}")
        pen_down = True
    dashes = _DASHES[index % len(_DASHES)]
    return f'<path class="lze-line lze-c{index % _NUM_COLOURS}" d="{"".join(commands)}" stroke-dasharray="{dashes}"/>'


def _marks(index: int, places: np.ndarray) -> str:
    return "".join(
        f'<i class="lze-mark lze-c{index % _NUM_COLOURS}" style="left:{left / 10:.2f}%;top:{top / 10:.2f}%"></i>'
        for left, top in places
        if math.isfinite(top)
    )


def _band(index: int, low: np.ndarray, high: np.ndarray) -> str:
    outline = np.concatenate([high, low[::-1]])
    outline = outline[np.isfinite(outline).all(axis=1)]
    points = " ".join(f"{left:.1f},{top:.1f}" for left, top in outline)
    return f'<polygon class="lze-band lze-c{index % _NUM_COLOURS}" points="{points}"/>'


def _hover_data(series: list[Series], x_low: float, x_high: float, as_percent: bool) -> str:
    """What the page's script shows under the pointer."""
    lines = [
        {
            "name": line.name,
            "x": [float(f"{x:.6g}") for x in line.x.tolist()],
            "y": [float(f"{y:.4g}") if math.isfinite(y) else None for y in line.y.tolist()],
        }
        for line in series
    ]
    data = {"low": float(x_low), "high": float(x_high), "percent": as_percent, "lines": lines}
    return f' data-lze="{escape(json.dumps(data, separators=(",", ":")), quote=True)}"'


def _description(title: str, series: list[Series], show: Callable[[float], str]) -> str:
    latest = "; ".join(f"{line.name} {show(float(line.y[np.isfinite(line.y)][-1]))}" for line in series)
    return f"{title}. Latest: {latest}."


def _span(values: np.ndarray) -> tuple[float, float]:
    values = values[np.isfinite(values)]
    low, high = float(values.min()), float(values.max())
    margin = max(0.5, 1e-6 * abs(low))  # which a large number does not swallow
    return (low, high) if high > low else (low - margin, high + margin)


def _rounded(low: float, high: float) -> tuple[float, float]:
    """Ends of an axis whose ticks are round numbers."""
    least = (high - low) / (_TICKS - 1)
    magnitude = 10.0 ** math.floor(math.log10(least))
    for factor in (1, 2, 2.5, 5, 10, 20):
        step = factor * magnitude
        start = math.floor(low / step + 1e-9) * step
        if start + (_TICKS - 1) * step >= high - 1e-9 * step:
            return start, start + (_TICKS - 1) * step
    return low, high
