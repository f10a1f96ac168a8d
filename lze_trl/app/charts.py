"""The app's charts, as Plotly figures. Plotly interprets some HTML in labels, so text of a run is escaped."""

from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly
import plotly.graph_objects as go

from ..record import Run, curves
from ..record.curves import HELD_OUT, curve
from ..record.numbers import number, percent
from ..record.reader import STATES
from .views import LABELS, short_text


PLOTLY = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
AXES = {"step": "steps", "tokens": "tokens rolled out", "flops": "FLOPs", "seconds": "time (s)"}
_COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#c99700", "#56b4e9"]  # of Okabe and Ito, for the colour-blind
_GRID = {"gridcolor": "rgba(128,128,128,0.25)", "zeroline": False, "automargin": True}
_FEW_POINTS = 40  # of every line of a chart, up to which they are marked
_SPREAD = 0.02  # of prompts with the same pass rate: those of groups take few values
_DOTTED = {"dash": "dot", "color": "#7a8794", "width": 1}
_DASHES = ("solid", "dash", "dot")  # once the colours are used up
_STATES = dict(zip(STATES, ("#0072b2", "#009e73", "#7a8794", "#c99700", "#d55e00", "#cc79a7", "#56b4e9"), strict=True))
_FLOW_LABELS = LABELS | {"frontier": "frontier (learnable)"}
_FLOW = {curves.UNSEEN: "#c5ced8", **_STATES}
_FATES = {"live": "#009e73", "dead, drawn in full": "#d55e00", "stopped early": "#7a8794"}

METRICS = {
    HELD_OUT: "held-out prompts",
    "reward_mean": "reward, in total and one by one",
    "dead_share": "share of dead groups",
    "completions/mean_length": "length of completions, tokens",
    "pass_rate": "pass rate (mean outcome)",
    "energy_mean": "mean energy",
}
"""What [`comparison`] can show besides other metrics that the trainers have logged."""


def overview(run: Run) -> list[go.Figure]:
    """Draw the states of the prompts, what became of groups and tokens, every reward; then outcomes, lengths and times, over the steps."""
    points = curve(run).set_index("step")
    if points.empty:
        return []
    fates = 100 * points[["live", "dead", "stopped"]].set_axis(list(_FATES), axis=1)
    return [
        _bars("Prompts by their state", curves.prompt_flow(run), "prompts", _FLOW),
        _bars("What became of the groups", fates.loc[:, fates.any()], "% of the groups", _FATES),
        _tokens(run, points),
        *_rewards(run, points),
        _histogram(run),
        *_calibration(run),
        _lengths(run),
        _bars("Time of a step", curves.seconds_per_step(run), "seconds", {}),
    ]


def _bars(heading: str, parts: pd.DataFrame, y_label: str, colours: dict[str, str]) -> go.Figure:
    """Stack the parts of a whole, the columns of a frame, over the steps. A click on a state gives its name."""
    figure = _figure(heading, "step", showlegend=True, hovermode="x unified", barmode="stack", bargap=0)
    widths = np.diff(parts.index, prepend=0)
    for name, values in parts.items():
        figure.add_bar(
            x=values.index - widths / 2 + 0.5,
            width=widths,
            y=values,
            name=escape(_FLOW_LABELS.get(name, name)),
            marker={"color": colours.get(name), "line_width": 0},
            customdata=[name] * len(values) if name in STATES else None,
            hovertemplate="%{y:,.4~g}",
        )
    return figure.update_yaxes(title_text=y_label)


def _tokens(run: Run, points: pd.DataFrame) -> go.Figure:
    """Draw the tokens rolled out so far, with the gap to those of plain GRPO."""
    figure = lines("Tokens rolled out", {"this run": points["tokens"], "plain GRPO": points["plain_tokens"]})
    tokens, plain = points[["tokens", "plain_tokens"]].iloc[-1]
    if plain == plain and round(plain - tokens):
        told = f"{number(abs(plain - tokens))} tokens {'fewer' if tokens <= plain else 'more'}"
        figure.add_annotation(x=0.02, y=0.98, xref="paper", yref="paper", text=told, showarrow=False)
    return figure


def _rewards(run: Run, points: pd.DataFrame) -> list[go.Figure]:
    """Draw a chart for each reward, in training and on held-out prompts, and one for the tasks that the run was evaluated on."""
    rewards, limits = curves.reward_curves(run), curves.reward_limits(run)
    held_out = {values.name: values for values in curves.held_out_curves(run).values()}
    tasks = {name: values for name, values in curves.evaluated(run).items() if not name.startswith(HELD_OUT)}
    total, is_total = held_out.get("eval_reward"), len(rewards.columns) == 1
    shown = {} if is_total else {"total": (points["reward_mean"], total)}
    for name, own in zip(rewards, run.meta.reward_names, strict=True):
        shown[name] = rewards[name], held_out.get(f"eval_rewards/{own}/mean", total if is_total else None)
    figures = []
    for name, (line, known) in shown.items():
        figure = lines(f"Reward: {name}", {"training": line} | ({} if known is None else {"held-out": known}))
        for limit in set(limits.loc[name].dropna()):
            which = "highest group" if limit == limits.loc[name, "high"] else "lowest group"
            figure.add_hline(y=limit, line=_DOTTED, annotation={"text": which, "font_size": 10})
        figures.append(figure)
    return figures + ([lines("Evaluated tasks", tasks)] if tasks else [])


def _histogram(run: Run) -> go.Figure:
    """Draw how many groups have each mean outcome, over the steps."""
    shares = curves.outcome_histogram(run)
    figure = _figure(f"{curves.outcome_name(run).capitalize()} of the groups drawn in full", "step")
    figure.add_heatmap(
        x=shares.index,
        y=list(shares.columns),
        z=100 * shares.to_numpy().T,
        zmin=0,
        ygap=2,
        colorscale=["rgba(0, 114, 178, 0.06)", _COLOURS[0]],
        colorbar={"ticksuffix": " %", "thickness": 12},
        hovertemplate="step %{x}, %{y}: %{z:.1f} % of the groups<extra></extra>",
    )
    return figure.update_yaxes(type="category", title_text=curves.outcome_name(run))


def _calibration(run: Run) -> list[go.Figure]:
    """Draw how often new prompts were alive over their forecast, if the run has made such forecasts."""
    points = curves.calibration(run).set_index("forecast")
    if points.empty:
        return []
    figure = lines("New prompts: forecast and truth", {"share of live groups": points["alive"]}, "forecast", (0, 1.05))
    figure.update_traces(text=points["groups"], hovertemplate="%{y:.2f} of %{text:,} groups")
    return [figure.add_scatter(x=[0, 1], y=[0, 1], name="as forecast", mode="lines", line=_DOTTED)]


def _lengths(run: Run) -> go.Figure:
    """Draw mean and 90th percentile of the lengths by outcome, and the share of the completions that were cut off."""
    figure = lines("Length of completions, and share cut off", curves.lengths(run))
    cut_off = curves.logged_curves(run, [name := "completions/clipped_ratio"]).get(name)
    if cut_off is not None:
        figure.add_scatter(x=cut_off.index, y=100 * cut_off, name="cut off", yaxis="y2", line=_DOTTED)
        right = {"overlaying": "y", "side": "right", "showgrid": False, "automargin": True}
        figure.update_layout(yaxis2=right | {"range": (0, 102), "ticksuffix": " %", "dtick": 50})
    return figure.update_layout(yaxis_title_text="tokens")


def lines(
    heading: str,
    series: dict[str, pd.Series],
    x_label: str = "step",
    y_range: tuple[float, float] | None = None,
    smoothing: float = 0.0,
) -> go.Figure:
    """Draw one line per series over its index. `smoothing` is the weight of earlier values in a moving average."""
    figure = _figure(heading, x_label, showlegend=True, hovermode="x unified")
    few = all(len(values) <= _FEW_POINTS for values in series.values())
    for place, (name, values) in enumerate(series.items()):
        shown = values.ewm(alpha=1 - smoothing, ignore_na=True).mean() if smoothing else values
        figure.add_scatter(
            x=values.index,
            y=shown,
            name=escape(name),
            mode="lines+markers" if few or name == HELD_OUT else "lines",
            marker_size=5,
            line_dash=_DASHES[place // len(_COLOURS) % len(_DASHES)],
        )
    if not series:
        figure.add_annotation(text="None was recorded.", showarrow=False).update_xaxes(visible=False)
    return figure.update_yaxes(range=y_range, rangemode="tozero", visible=bool(series))


def by_value(run: Run, column: str, values: list[str]) -> list[go.Figure]:
    """Draw a figure of each reward, with a line for each of the values of a column of the data, in training and on held-out prompts."""
    figures, names_of = [], [f"rewards/{name}/mean" for name in dict.fromkeys(run.meta.reward_names)]
    for reward in [*(["reward"] if len(names_of) > 1 else []), *names_of]:
        names = {f"by/{column}/{value}/{reward}": value for value in values}
        names |= {f"eval_{name}": f"{value}, {HELD_OUT}" for name, value in names.items()}
        logged = curves.logged_curves(run, list(names))
        heading = f"{reward.removeprefix('rewards/').removesuffix('/mean')} by {column}"
        figures.append(lines(heading, {called: logged[name] for name, called in names.items() if name in logged}))
    return figures


def sparkline(run: Run) -> go.Figure:
    """Draw the reward that the run is judged by, without axes."""
    figure = lines("", {"reward": curves.main_reward(run)}).update_traces(mode="lines")
    figure.update_layout(height=44, margin=dict.fromkeys("lrtb", 2), showlegend=False)
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
            "legend": {"orientation": "h", "y": 0, "yanchor": "bottom", "yref": "container"},
            "uirevision": "same",  # a refresh keeps the reader's zoom
            **layout,
        }
    )
    figure.update_xaxes(title_text=x_label, unifiedhovertitle_text=f"{escape(x_label)} %{{x}}", **_GRID)
    return figure.update_yaxes(hoverformat=",.4~g", **_GRID)


def pass_rates(values: pd.Series) -> go.Figure:
    """Draw how many prompts of a profile have each pass rate."""
    bins = {"start": 0.0, "end": 1.05, "size": 0.05}
    figure = _figure("Prompts by pass rate", "pass rate", yaxis_title="prompts")
    return figure.add_histogram(x=values, xbins=bins, hovertemplate="%{x}: %{y:,} prompts<extra></extra>")


def prompts(run: Run, frame: pd.DataFrame) -> go.Figure:
    """Draw the energy of prompts, a frame of [`Run.prompts`](lze_trl.record.Run.prompts), over their pass rate."""
    outcome = curves.outcome_name(run)
    spread_by = f"{outcome} (points are spread by ± {_SPREAD})"
    figure = _figure("Energy of each prompt: click one to open it", spread_by, showlegend=True, hovermode="closest")
    told = ((short_text(row)[:80], percent(row["pass_rate"])) for row in frame.to_dict("records"))
    texts = [f"{escape(text)}<br>{outcome} {rate}" for text, rate in told]
    spread = (frame["prompt_id"] % 101 / 50 - 1.0) * _SPREAD
    points = pd.DataFrame({"x": frame["pass_rate"].fillna(0.0) + spread, "energy": frame["energy"], "text": texts})
    points["id"] = frame["prompt_id"].astype(str)  # too large for a JavaScript number
    counts = frame["state"].value_counts()
    for state, found in points.groupby(frame["state"]):
        figure.add_scatter(
            x=found["x"],
            y=found["energy"],
            name=f"{LABELS.get(str(state), state)} ({counts[state]:,})",
            mode="markers",
            marker={"color": _STATES[str(state)], "size": 8, "opacity": 0.7},
            text=found["text"],
            customdata=found["id"],
            hovertemplate="%{text}, energy %{y:.2f}<extra></extra>",
        )
    rates = np.linspace(0.0, 1.0, 41)
    curve_of = {"name": "E at D = 1, m = 0", "mode": "lines", "line": _DOTTED, "hoverinfo": "skip"}
    figure.add_scatter(x=rates, y=4 * rates * (1 - rates), **curve_of)
    figure.update_xaxes(range=(-0.03, 1.03))
    return figure.update_yaxes(title_text="energy", range=(-0.05, 1.05 * run.meta.energy_max))


def history(run: Run, prompt_id: int) -> go.Figure:
    """Draw outcome and energy of a prompt at its visits."""
    groups = run.groups(prompt_id).assign(step=lambda frame: frame["step"] + 1).set_index("step")
    names = {curves.outcome_name(run): "pass_rate", "moving average of earlier visits": "ema", "energy": "energy"}
    shown = {label: groups[column] for label, column in names.items()}
    stopped = groups["cause"] == "stopped"
    heading = f"History{' (hollow: stopped early)' if stopped.any() else ''}"
    figure = lines(heading, shown, y_range=(-0.05, 1.05 * max(1.0, run.meta.energy_max)))  # points at 0 are whole
    return figure.update_traces(marker_symbol=np.where(stopped, "circle-open", "circle"))


def comparison(runs: dict[str, Run], axis: str, metric: str, smoothing: float = 0.0) -> list[go.Figure]:
    """Draw a metric of several runs, by their ids, if one of them has it; with the total reward, also each reward function."""
    names = dict.fromkeys(name for run in runs.values() for name in run.meta.reward_names)
    several = metric == "reward_mean" and len(names) > 1
    shown = {METRICS.get(metric, metric): metric}
    shown |= {f"reward: {name}": f"rewards/{name}/mean" for name in names} if several else {}
    figures = []
    for label, name in shown.items():
        values = {id: _points(run, axis, name) for id, run in runs.items()}  # each keeps its colour in all charts
        if any(map(len, values.values())):
            figures.append(lines(label[:1].upper() + label[1:], values, AXES[axis], smoothing=smoothing))
    if figures and metric == HELD_OUT and (found := curves.reached(runs)) and found[2]:
        figures[0].add_hline(y=found[1], line=_DOTTED)
    return figures


def _points(run: Run, axis: str, metric: str) -> pd.Series:
    """Return a metric of a run over an axis."""
    points = curve(run)
    if points.empty:
        return pd.Series(dtype=float)
    if metric in points:
        return points.set_index(axis)[metric].dropna()
    known = curves.evaluated(run)
    if metric == HELD_OUT:  # the first of its curves is what the run is judged by
        metric = next((name for name in known if name.startswith(HELD_OUT)), metric)
    if metric not in known:
        known |= curves.logged_curves(run, [metric])
    values = known.get(metric, pd.Series(dtype=float)).dropna()
    places = {name: [0, *points[name]] for name in ("step", axis)}  # nothing is spent before the first step
    return values.set_axis(np.interp(values.index, places["step"], places[axis]))
