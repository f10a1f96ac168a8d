"""The app's charts, as Plotly figures. Plotly interprets some HTML in labels, so text of a run is escaped."""

from html import escape
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from ..record import Run
from ..record.curves import (
    HELD_OUT,
    curve,
    energy_heat_map,
    evaluated,
    is_share,
    logged_curves,
    main_reward,
    outcome_name,
    reward_curves,
)
from ..record.reader import STATES
from .views import brightest, short_text


AXES = {"step": "steps", "tokens": "tokens rolled out", "flops": "FLOPs", "seconds": "time (s)"}
_COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#c99700", "#56b4e9"]  # of Okabe and Ito, for the colour-blind
_DASHES = ("solid", "dash", "dot")  # once the colours are used up
_STATES = dict(zip(STATES, ("#0072b2", "#009e73", "#7a8794", "#c99700", "#d55e00", "#cc79a7", "#56b4e9"), strict=True))

METRICS = {
    HELD_OUT: "held-out prompts",
    "pass_rate": "pass rate (mean outcome)",
    "reward_mean": "reward",
    "dead_share": "share of dead groups",
    "energy_mean": "mean energy",
}
"""What [`comparison`] can show besides the metrics that the trainers have logged."""
OVERVIEW_CHARTS = 5
"""Charts that [`overview`] makes."""


def overview(run: Run) -> list[go.Figure]:
    """Outcomes, held-out prompts, rewards, energy, and what became of the groups over the steps."""
    points = curve(run).set_index("step")
    if points.empty:
        return []
    rewards = reward_curves(run)
    totals = {"total": points["reward_mean"]}
    outcomes = {"all rollouts": points["pass_rate"], "trained on": points["selected_pass_rate"]}
    parts = {"live": "live", "dead, drawn in full": "dead", "stopped early": "stopped"}
    known = evaluated(run)
    return [
        lines(outcome_name(run).capitalize(), outcomes, y_range=(0, 1)),
        lines("Held-out accuracy" if all(map(is_share, known)) else "Held-out prompts", known),
        # A single reward is the total
        lines("Reward", totals | (dict(rewards.items()) if len(rewards.columns) > 1 else {})),
        _energy(run),
        lines("Shares of the groups", {label: points[name] for label, name in parts.items()}, y_range=(0, 1)),
    ]


def lines(
    heading: str,
    series: dict[str, pd.Series],
    x_label: str = "step",
    y_range: tuple[float, float] | None = None,
    smoothing: float = 0.0,
) -> go.Figure:
    """Chart with one line per series over its index. `smoothing` is the weight of earlier values in a moving average."""
    figure = _figure(heading, x_label, showlegend=True, hovermode="x unified")
    for place, (name, values) in enumerate(series.items()):
        shown = values.ewm(alpha=1 - smoothing, ignore_na=True).mean() if smoothing else values
        figure.add_scatter(
            x=values.index,
            y=shown,
            name=escape(name),
            mode="lines+markers" if len(values) <= 40 else "lines",
            marker_size=5,
            line_dash=_DASHES[place // len(_COLOURS) % len(_DASHES)],
        )
    if not series:
        figure.add_annotation(text="None was recorded.", showarrow=False).update_xaxes(visible=False)
    return figure.update_yaxes(range=y_range, visible=bool(series))


def sparkline(run: Run) -> go.Figure:
    """The reward that the run is judged by, without axes."""
    values = main_reward(run)
    figure = go.Figure(
        layout={"height": 44, "margin": dict.fromkeys("lrtb", 2), "colorway": _COLOURS, "showlegend": False}
    )
    figure.update_layout(paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)")
    figure.add_scatter(x=values.index, y=values, mode="lines")
    return figure.update_xaxes(visible=False).update_yaxes(visible=False)


def _figure(heading: str, x_label: str, **layout: Any) -> go.Figure:
    grid = {"gridcolor": "rgba(128,128,128,0.25)", "zeroline": False, "automargin": True}
    figure = go.Figure(
        layout={
            "title": {"text": escape(heading), "font_size": 15, "x": 0.01, "y": 0.97},
            "height": 320,
            "colorway": _COLOURS,
            "margin": {"l": 10, "r": 10, "t": 42, "b": 10},
            "font_color": "#44505c",
            "modebar_bgcolor": "rgba(0,0,0,0)",
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "legend": {"orientation": "h", "y": -0.25, "yanchor": "top"},
            "uirevision": "same",  # a refresh keeps the reader's zoom
            **layout,
        }
    )
    return figure.update_xaxes(title_text=x_label, **grid).update_yaxes(**grid)


def _energy(run: Run) -> go.Figure:
    """Distribution of the groups' energy over the steps. Dead groups are the row below 0."""
    steps, shares = energy_heat_map(run)
    width = run.meta.energy_max / (shares.shape[1] - 1)
    levels = width * (np.arange(shares.shape[1]) - 0.5)
    figure = _figure("Energy of the groups (below 0: dead)", "step")
    figure.add_heatmap(
        x=steps,
        y=levels,
        z=100 * shares.T,
        zmax=100 * brightest(shares[:, 1:]),
        zmin=0,
        colorscale="cividis",
        colorbar={"ticksuffix": " %", "thickness": 12},
        hovertemplate="step %{x}, energy %{y:.2f}: %{z:.1f} % of the groups<extra></extra>",
    )
    return figure


def prompts(run: Run, frame: pd.DataFrame) -> go.Figure:
    """Energy of prompts, as of [`Run.prompts`](lze_trl.record.Run.prompts), over their pass rate."""
    outcome = outcome_name(run)
    figure = _figure("Energy of each prompt: click one to open it", outcome, showlegend=True, hovermode="closest")
    texts = [escape(short_text(row)[:80]) for row in frame.to_dict("records")]
    # Pass rates of groups take few values: prompts with the same one are spread a little
    spread = (frame["prompt_id"] % 101 / 100 - 0.5) * 0.04
    points = pd.DataFrame({"x": frame["pass_rate"].fillna(0.0) + spread, "energy": frame["energy"], "text": texts})
    points["id"] = frame["prompt_id"].astype(str)  # too large for a JavaScript number
    counts = frame["state"].value_counts()
    for state, found in points.groupby(frame["state"]):
        figure.add_scatter(
            x=found["x"],
            y=found["energy"],
            name=f"{state} ({counts[state]:,})",
            mode="markers",
            marker={"color": _STATES[str(state)], "size": 8, "opacity": 0.7},
            text=found["text"],
            customdata=found["id"],
            hovertemplate=f"%{{text}}<br>{outcome} %{{x:.2f}}, energy %{{y:.2f}}<extra></extra>",
        )
    return figure.update_yaxes(title_text="energy", range=(-0.05, 1.05 * run.meta.energy_max))


def history(run: Run, prompt_id: int) -> go.Figure:
    """Outcome and energy of a prompt at its visits."""
    groups = run.groups(prompt_id).assign(step=lambda frame: frame["step"] + 1).set_index("step")
    names = {outcome_name(run): "pass_rate", "moving average of earlier visits": "ema", "energy": "energy"}
    shown = {label: groups[column] for label, column in names.items()}
    stopped = groups["cause"] == "stopped"
    figure = lines(
        f"History{' (hollow: stopped early)' if stopped.any() else ''}",
        shown,
        y_range=(0, max(1.0, run.meta.energy_max)),
    )
    return figure.update_traces(marker_symbol=np.where(stopped, "circle-open", "circle"))


def comparison(runs: dict[str, Run], axis: str, metric: str, smoothing: float = 0.0) -> go.Figure:
    """A metric of several runs, by their ids."""
    shown = {id: _points(run, axis, metric) for id, run in runs.items()}  # each keeps its colour in all charts
    return lines(METRICS.get(metric, metric).capitalize(), shown, AXES[axis], smoothing=smoothing)


def _points(run: Run, axis: str, metric: str) -> pd.Series:
    """A metric of a run over an axis."""
    points = curve(run)
    if points.empty:
        return pd.Series(dtype=float)
    if metric in points:
        return points.set_index(axis)[metric].dropna()
    known = evaluated(run)
    if metric == HELD_OUT:  # the first of its curves is what the run is judged by
        metric = next((name for name in known if name.startswith(HELD_OUT)), metric)
    values = known[metric] if metric in known else logged_curves(run, [metric]).get(metric, pd.Series(dtype=float))
    places = {name: [0, *points[name]] for name in ("step", axis)}  # nothing is spent before the first step
    return values.dropna().pipe(lambda known: known.set_axis(np.interp(known.index, places["step"], places[axis])))
