"""The report of a run: one HTML file that needs nothing else, and pictures."""

import io
import json
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .. import __version__
from ..files import write_atomically
from ..record import MissingTelemetryError, Run, open_run
from ..record.curves import curve, energy_heat_map
from ..record.ledger import against_plain, skipped_visits
from . import views


REPORT = "report"
"""Folder of the report inside a run's output directory."""

_BLUE, _ORANGE, _GREEN, _GREY = "#0072b2", "#d55e00", "#009e73", "#8a96a3"
_FORGOTTEN_SHOWN = 50
_STYLE = Path(__file__).parent / "style.css"
_PAGE_STYLE = """
body { margin: 0 auto; padding: 24px 16px; max-width: 1180px; background: var(--lze-wash); font-family: system-ui, sans-serif; }
h1 { font-size: 26px; margin: 0 0 2px; } h2 { font-size: 18px; margin: 26px 0 8px; }
footer { color: var(--lze-soft); font-size: 12px; margin-top: 24px; }
"""
# The reader's preference stands in for the switch of the app
_DARK = "<script>if (matchMedia('(prefers-color-scheme: dark)').matches) document.body.classList.add('dark');</script>"


def write_report(run_dir: str | Path, out: str | Path | None = None) -> Path:
    """
    Write the report of a run, finished or not.

    Args:
        run_dir (`str` or `Path`):
            Output directory of a training.
        out (`str` or `Path`, *optional*):
            Folder to write to, `<run_dir>/report` by default.

    Returns:
        `Path`: The HTML file; `summary.png` and `energy.png` lie beside it.

    Raises:
        TelemetryError: If the run has no telemetry that can be read.
    """
    run_dir = Path(run_dir)
    folder = Path(out) if out is not None else run_dir / REPORT
    run = open_run(run_dir)
    try:
        _check_not_empty(run)
        folder.mkdir(parents=True, exist_ok=True)
        _save(_summary_figure(run), folder / "summary.png")
        _save(_energy_figure(run), folder / "energy.png")
        path = folder / "report.html"
        write_atomically(path, report_html(run).encode())
    finally:
        run.close()
    return path


def write_summary_picture(run_dir: str | Path, path: str | Path) -> Path:
    """
    Write the picture of a run: accuracy and reward, energy, and savings over the steps.

    Args:
        run_dir (`str` or `Path`): Output directory of a training.
        path (`str` or `Path`): PNG to write.

    Returns:
        `Path`: The PNG.
    """
    run = open_run(run_dir)
    try:
        _check_not_empty(run)
        _save(_summary_figure(run), Path(path))
    finally:
        run.close()
    return Path(path)


def _check_not_empty(run: Run):
    if curve(run, bins=1).empty:
        raise MissingTelemetryError("The run has started, and its first batch is not scored yet. Try again later.")


def report_html(run: Run) -> str:
    """The report as one HTML document."""
    title = escape(f"Report of {run.name}")
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{_STYLE.read_text(encoding="utf-8")}{_PAGE_STYLE}</style></head>
<body>{_DARK}<main class="lze"><h1>{title}</h1><p>{_sentence(run)}</p>
{views.overview(run)}
<h2>What was learned</h2>{_learned(run)}
<h2>Forgotten prompts</h2>{_forgotten(run)}
<h2>Settings</h2>{_settings(run.meta.settings)}
<footer>Written {when} by lze_trl {escape(__version__)}; recorded by lze_trl {escape(run.meta.package_version)}.</footer>
</main></body></html>
"""


def _sentence(run: Run) -> str:
    summary = run.summary()
    return (
        f"{summary['generations']:,} generation batches, {summary['rows']:,} completions; {summary['selected']:,} of "
        f"{summary['groups']:,} groups trained on, {summary['dead']:,} dead."
    )


def _learned(run: Run) -> str:
    """Prompts by their state at the first visit that could be scored, and now."""
    rows = run.arrow("""SELECT
        CASE WHEN first_pass_rate IS NULL THEN 'unscored' WHEN first_pass_rate = 1 THEN 'solved'
            WHEN first_pass_rate = 0 THEN 'hopeless' ELSE 'frontier' END AS first,
        state, count(*) AS prompts FROM prompt_states GROUP BY ALL""").to_pylist()
    counts = {(row["first"], row["state"]): row["prompts"] for row in rows}
    present = [state for state in views.STATE_LABELS if any((first, state) in counts for first, _ in counts)]
    head = "".join(f"<th>now {views.STATE_LABELS[state][1]}</th>" for state in present)
    body = "".join(
        f"<tr><th scope='row'>{first} at the first visit</th>"
        + "".join(f"<td>{counts.get((first, state), 0):,}</td>" for state in present)
        + "</tr>"
        for first in ("hopeless", "frontier", "solved", "unscored")
        if first != "unscored" or any((first, state) in counts for state in present)
    )
    return (
        f"<figure class='lze-figure'><div class='lze-scroll'><table class='lze-table'><thead><tr><th>prompts</th>{head}</tr>"
        f"</thead><tbody>{body}</tbody></table></div></figure>"
    )


def _forgotten(run: Run) -> str:
    """Prompts that were solved and failed their re-check."""
    total = run.prompt_counts()["forgotten"]
    if not total:
        return "<p class='lze-note'>None: every pruned prompt that was re-checked is still, or again, solved.</p>"
    frame = run.prompts(state="forgotten", sort="pass_rate", descending=False, limit=_FORGOTTEN_SHOWN)
    rows = "".join(
        f"<tr><td>{escape(str(row['text'])[:200])}</td><td>{views.percent(row['pass_rate'])}</td>"
        + "".join(f"<td>{escape(str(row[name]))}</td>" for name in ("visits", "rechecks", "last_step"))
        + "</tr>"
        for row in frame.to_dict("records")
    )
    note = f"<p class='lze-note'>{len(frame)} of {total:,}.</p>" if total > len(frame) else ""
    return (
        "<figure class='lze-figure'><div class='lze-scroll'><table class='lze-table lze-prompts'><thead><tr><th>prompt</th>"
        f"<th>pass rate</th><th>visits</th><th>re-checks</th><th>last step</th></tr></thead><tbody>{rows}</tbody></table>"
        f"</div>{note}</figure>"
    )


def _settings(settings: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><th scope='row'>{escape(name)}</th><td>{escape(json.dumps(value, default=str))}</td></tr>"
        for name, value in sorted(settings.items())
    )
    return (
        "<details class='lze-figure'><summary>All settings of the run</summary><div class='lze-scroll'>"
        f"<table class='lze-table'><tbody>{rows}</tbody></table></div></details>"
    )


def _figure(width: float, height: float, ratios: list[float]) -> tuple[Figure, list[Axes]]:
    # Without pyplot: a training may have chosen a backend of its own, and its figures would never be freed
    figure = Figure(figsize=(width, height), dpi=110, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(ratios), squeeze=False, width_ratios=ratios)[0].tolist()
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Figure, path: Path):
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    write_atomically(path, buffer.getvalue())


def _summary_figure(run: Run) -> Figure:
    figure, (accuracy, energy, savings) = _figure(13.0, 3.6, [1.0, 1.15, 0.7])
    points = curve(run)
    for name, label, colour, dashes in (
        ("pass_rate", "pass rate, all rollouts", _BLUE, "-"),
        ("selected_pass_rate", "pass rate, trained on", _ORANGE, "--"),
        ("reward_mean", "reward", _GREEN, ":"),
        ("dead", "share of dead groups", _GREY, "-."),
    ):
        accuracy.plot(points["step"], points[name], color=colour, ls=dashes, lw=1.6, label=label)
    accuracy.set(title="Accuracy and reward", xlabel="step", ylim=(min(0.0, points["reward_mean"].min()), None))
    accuracy.grid(alpha=0.3)
    accuracy.legend(frameon=False, fontsize=8)
    _draw_energy(run, figure, energy)
    _draw_savings(savings, run.summary()["ledger"])
    return figure


def _energy_figure(run: Run) -> Figure:
    figure, (axis,) = _figure(8.0, 4.0, [1.0])
    _draw_energy(run, figure, axis)
    return figure


def _draw_energy(run: Run, figure: Figure, axis: Axes):
    steps, shares = energy_heat_map(run)
    live = shares[:, 1:]
    top = np.quantile(live[live > 0], 0.99) if (live > 0).any() else 1.0
    edges = np.concatenate([[steps[0] - 1], steps]) if (np.diff(steps) > 0).all() else np.arange(len(steps) + 1)
    levels = np.linspace(0.0, run.meta.energy_max, live.shape[1] + 1)
    mesh = axis.pcolormesh(edges, levels, 100 * live.T, cmap="cividis", vmin=0, vmax=100 * top, rasterized=True)
    axis.set(title="Energy of the groups", xlabel="step", ylabel="energy")
    figure.colorbar(mesh, ax=axis, label="groups (%)", extend="max")


def _draw_savings(axis: Axes, totals: dict[str, float]):
    works = against_plain(totals)
    used = [work.ratio if work.plain_flops else 0.0 for work in works]
    axis.set(title="FLOPs", xlim=(0, 1.25 * max(1.0, *used)), xlabel="× plain GRPO, same number of optimizer steps")
    names = [work.name for work in works]
    axis.barh(names, [1.0] * len(works), color="#e3e8ed", height=0.6)
    axis.barh(names, used, color=_BLUE, height=0.6)
    for row, work in enumerate(works):
        axis.text(used[row] + 0.02, row, work.times, va="center")
    axis.text(0.0, -0.24, skipped_visits(totals), transform=axis.transAxes, fontsize=8, color=_GREY)
    axis.invert_yaxis()
