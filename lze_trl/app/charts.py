"""The app's charts, as Plotly figures. Plotly interprets some HTML in labels, so text of a run is escaped."""

from html import escape
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ..record import Run
from ..record.curves import (
    HELD_OUT,
    UNSEEN,
    curve,
    evaluated,
    held_out_curves,
    lengths,
    logged_curves,
    main_reward,
    outcome_histogram,
    outcome_name,
    prompt_flow,
    reward_curves,
    reward_limits,
    seconds_per_step,
)
from ..record.numbers import number, percent
from ..record.reader import STATES
from .views import short_text


AXES = {"step": "steps", "tokens": "tokens rolled out", "flops": "FLOPs", "seconds": "time (s)"}
_COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#c99700", "#56b4e9"]  # of Okabe and Ito, for the colour-blind
_GRID = {"gridcolor": "rgba(128,128,128,0.25)", "zeroline": False, "automargin": True}
_DASHES = ("solid", "dash", "dot")  # once the colours are used up
_STATES = dict(zip(STATES, ("#0072b2", "#009e73", "#7a8794", "#c99700", "#d55e00", "#cc79a7", "#56b4e9"), strict=True))
_FRONTIER = "frontier (learnable)"
_FLOW = {UNSEEN: "#c5ced8", _FRONTIER: _STATES["frontier"], **_STATES}
_FATES = {"live": "#009e73", "dead, drawn in full": "#d55e00", "stopped early": "#7a8794"}

METRICS = {
    HELD_OUT: "held-out prompts",
    "pass_rate": "pass rate (mean outcome)",
    "reward_mean": "reward",
    "dead_share": "share of dead groups",
    "energy_mean": "mean energy",
}
"""What [`comparison`] can show besides the metrics that the trainers have logged."""
OVERVIEW_CHARTS = 7
"""Charts that [`overview`] makes."""


def overview(run: Run) -> list[go.Figure]:
    """States of the prompts, what became of groups and tokens, every reward; then outcomes, lengths and times, over the steps."""
    points = curve(run).set_index("step")
    if points.empty:
        return []
    seconds = seconds_per_step(run)
    shares = {"live": points["live"], "dead, drawn in full": points["dead"], "stopped early": points["stopped"]}
    flow = prompt_flow(run)
    listed = {_FRONTIER if state == "frontier" else state: flow[state] for state in flow}
    return [
        _bars("Prompts by their state: click to list them", listed, "prompts", _FLOW, list(flow.columns)),
        _bars(
            "What became of the groups",
            {name: 100 * share for name, share in shares.items()},
            "% of the groups",
            _FATES,
        ),
        _tokens(run, points),
        _rewards(run, points),
        _histogram(run),
        _lengths(run),
        _bars("Time of a step", {name: seconds[name] for name in seconds}, "seconds", {}),
    ]


def _bars(
    heading: str, parts: dict[str, pd.Series], y_label: str, colours: dict[str, str], keys: list[str] | None = None
) -> go.Figure:
    """Parts of a whole over the steps. A click on one gives its key, if it has one."""
    figure = _figure(heading, "step", showlegend=True, hovermode="x unified", barmode="stack", bargap=0)
    for place, (name, values) in enumerate(parts.items()):
        key = None if keys is None or keys[place] == UNSEEN else [keys[place]] * len(values)
        widths = np.diff(values.index, prepend=0)
        figure.add_bar(
            x=values.index - widths / 2 + 0.5,
            width=widths,
            y=values,
            name=escape(name),
            marker={"color": colours.get(name), "line_width": 0},
            customdata=key,
            hovertemplate="%{y:,.4~g}",
        )
    return figure.update_yaxes(title_text=y_label)


def _tokens(run: Run, points: pd.DataFrame) -> go.Figure:
    """Tokens rolled out so far, with the gap to those of plain GRPO."""
    figure = lines("Tokens rolled out", {"this run": points["tokens"], "plain GRPO": points["plain_tokens"]})
    tokens, plain = points[["tokens", "plain_tokens"]].iloc[-1]
    if plain == plain and round(plain - tokens):
        told = f"{number(abs(plain - tokens))} tokens {'fewer' if tokens <= plain else 'more'}"
        figure.add_annotation(x=0.02, y=0.98, xref="paper", yref="paper", text=told, showarrow=False)
    return figure.update_yaxes(rangemode="tozero")


def _rewards(run: Run, points: pd.DataFrame) -> go.Figure:
    """One small chart for each reward, in training and on held-out prompts, and one for the tasks that the run was evaluated on."""
    rewards, limits = reward_curves(run), reward_limits(run)
    held_out = {values.name: values for values in held_out_curves(run).values()}
    tasks = {name: values for name, values in evaluated(run).items() if not name.startswith(HELD_OUT)}
    several = len(rewards.columns) != 1
    shown = {"total": (points["reward_mean"], "eval_reward")} if several else {}
    names = dict(zip(rewards.columns, run.meta.reward_names, strict=True))
    shown |= {name: (rewards[name], f"eval_rewards/{names[name]}/mean") for name in rewards}
    charts = [*shown, *(["evaluated tasks"] if tasks else [])]
    figure = make_subplots(
        len(charts), 1, shared_xaxes=True, vertical_spacing=0.25 / len(charts), subplot_titles=[*map(escape, charts)]
    )
    figure.update_layout(
        _figure("Rewards (dotted: lowest and highest group)", "").layout,
        height=130 * len(charts) + 150,
    )
    for row, (name, (values, metric)) in enumerate(shown.items(), start=1):
        known = held_out.get(metric, held_out.get("eval_reward") if not several else None)
        for label, line, colour in (("training", values, _COLOURS[0]), ("held-out", known, _COLOURS[1])):
            if line is not None:
                figure.add_scatter(
                    x=line.index,
                    y=line,
                    name=label,
                    legendgroup=label,
                    showlegend=row == 1,
                    line_color=colour,
                    mode="lines+markers" if label == "held-out" else "lines",
                    row=row,
                    col=1,
                )
        low, high = limits.loc[name]
        for limit in {low, high} - {np.nan}:
            if limit == limit:
                figure.add_hline(y=limit, line={"dash": "dot", "color": "#7a8794", "width": 1}, row=row, col=1)
    for name, line in tasks.items():
        figure.add_scatter(x=line.index, y=line, name=escape(name), mode="lines+markers", row=len(charts), col=1)
    figure.update_xaxes(**_GRID, rangemode="tozero").update_yaxes(**_GRID, rangemode="tozero")
    return figure.update_xaxes(title_text="step", row=len(charts)).update_layout(showlegend=True)


def _histogram(run: Run) -> go.Figure:
    """How many groups have each mean outcome, over the steps."""
    shares = outcome_histogram(run)
    figure = _figure(f"{outcome_name(run).capitalize()} of the groups drawn in full", "step")
    figure.add_heatmap(
        x=shares.index,
        y=list(shares.columns),
        z=100 * shares.to_numpy().T,
        zmin=0,
        ygap=2,
        colorscale="cividis",
        colorbar={"ticksuffix": " %", "thickness": 12},
        hovertemplate="step %{x}, %{y} right: %{z:.1f} % of the groups<extra></extra>",
    )
    return figure.update_yaxes(type="category", title_text="right of all")


def _lengths(run: Run) -> go.Figure:
    figure = lines("Length of completions, and share cut off", lengths(run))
    cut_off = logged_curves(run, [name := "completions/clipped_ratio"]).get(name)
    if cut_off is not None:
        figure.add_scatter(
            x=cut_off.index, y=100 * cut_off, name="cut off", yaxis="y2", line={"dash": "dot", "color": "#7a8794"}
        )
        figure.update_layout(
            yaxis2={
                "overlaying": "y",
                "side": "right",
                "range": (0, 102),
                "ticksuffix": " %",
                "showgrid": False,
                "dtick": 50,
                "automargin": True,
            }
        )
    return figure.update_layout(yaxis={"title_text": "tokens", "rangemode": "tozero"})


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


def by_value(run: Run, column: str, values: list[str]) -> list[go.Figure]:
    """A figure of each reward, with a line for each of the values of a column of the data, in training and on held-out prompts."""
    figures, names_of = [], [f"rewards/{name}/mean" for name in dict.fromkeys(run.meta.reward_names)]
    for reward in [*(["reward"] if len(names_of) > 1 else []), *names_of]:
        names = {f"by/{column}/{value}/{reward}": value for value in values}
        names |= {f"eval_{name}": f"{value}, {HELD_OUT}" for name, value in names.items()}
        logged = logged_curves(run, list(names))
        heading = f"{reward.removeprefix('rewards/').removesuffix('/mean')} by {column}"
        figures.append(lines(heading, {called: logged[name] for name, called in names.items() if name in logged}))
    return figures


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
    return figure.update_xaxes(title_text=x_label, **_GRID).update_yaxes(**_GRID)


def prompts(run: Run, frame: pd.DataFrame) -> go.Figure:
    """Energy of prompts, as of [`Run.prompts`](lze_trl.record.Run.prompts), over their pass rate."""
    outcome = outcome_name(run)
    figure = _figure("Energy of each prompt: click one to open it", outcome, showlegend=True, hovermode="closest")
    texts = [
        f"{escape(short_text(row)[:80])}<br>{outcome} {percent(row['pass_rate'])}" for row in frame.to_dict("records")
    ]
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
            hovertemplate="%{text}, energy %{y:.2f}<extra></extra>",
        )
    rates = np.linspace(0.0, 1.0, 41)
    figure.add_scatter(
        x=rates,
        y=4 * rates * (1 - rates),
        name="E at D = 1, m = 0",
        mode="lines",
        line={"dash": "dot", "color": "#7a8794"},
        hoverinfo="skip",
    )
    figure.update_xaxes(range=(-0.03, 1.03))
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
