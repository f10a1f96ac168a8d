"""The report of a run: one HTML file that needs nothing else, and its picture."""

import base64
import io
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pandas as pd
from markupsafe import Markup
from matplotlib.figure import Figure

from ..files import write_atomically
from ..record import MissingTelemetryError, Run, open_run
from ..record.curves import curve, evaluated, outcome_histogram, outcome_name
from ..record.reader import STATES
from ..version import __version__
from .views import HTML, by_value, overview, settings, table


_BLUE, _ORANGE, _GREEN, _GREY = "#0072b2", "#d55e00", "#009e73", "#8a96a3"


def write_report(run_dir: str | Path) -> Path:
    """
    Write the report of a run, finished or not, into `<run_dir>/report`.

    Returns the HTML file; `summary.png` lies beside it. A run that cannot be read raises a [`TelemetryError`].
    """
    folder = Path(run_dir) / "report"
    picture = write_summary_picture(run_dir, folder / "summary.png").read_bytes()
    with closing(open_run(run_dir)) as run:
        document = HTML.report(
            run.name,
            run.summary(),
            overview(run) + by_value(run),
            _learned(run),
            settings(run),
            base64.b64encode(picture).decode(),
            f"Written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC by lze_trl {__version__}; "
            f"recorded by lze_trl {run.meta.package_version}.",
        )
    write_atomically(folder / "report.html", document.encode())
    return folder / "report.html"


def write_summary_picture(run_dir: str | Path, path: str | Path) -> Path:
    """Write the picture of a run: outcomes, rewards and shares of groups by their outcome over the steps."""
    with closing(open_run(run_dir)) as run:
        if curve(run, bins=1).empty:
            raise MissingTelemetryError("The run has started, and its first batch is not scored yet. Try again later.")
        figure, picture = _draw_summary(run), io.BytesIO()
    figure.savefig(picture, format="png")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_atomically(Path(path), picture.getvalue())
    return Path(path)


def _learned(run: Run) -> Markup:
    """Table of the prompts by their state at the first visit that could be scored and was not stopped, and now."""
    frame = run.sql("""SELECT state, CASE WHEN state = 'stopped' THEN state WHEN first_pass_rate IS NULL THEN 'unscored' WHEN first_pass_rate = 1 THEN 'solved'
        WHEN first_pass_rate = 0 THEN 'hopeless' ELSE 'frontier' END AS first FROM prompt_states""")
    counts = pd.crosstab(frame["first"] + " at the first visit", "now " + frame["state"])
    now = [f"now {state}" for state in STATES if f"now {state}" in counts]
    rows = counts.reindex([f"{state} at the first visit" for state in STATES], columns=now).dropna().astype(int)
    return table("learned", rows.rename_axis("prompts").reset_index())


def _draw_summary(run: Run) -> Figure:
    # Without pyplot: a training may have chosen a backend of its own, and its figures would never be freed
    figure = Figure(figsize=(11.0, 3.6), dpi=110, layout="constrained", facecolor="white")
    outcomes, groups = figure.subplots(1, 2)
    for axis in (outcomes, groups):
        axis.spines[["top", "right"]].set_visible(False)
    points, outcome = curve(run), outcome_name(run)
    for name, label, colour, dashes in (
        ("pass_rate", f"{outcome}, all rollouts", _BLUE, "-"),
        ("selected_pass_rate", f"{outcome}, trained on", _ORANGE, "--"),
        ("reward_mean", "reward", _GREEN, ":"),
        ("dead_share", "share of dead groups", _GREY, "-."),
    ):
        outcomes.plot(points["step"], points[name], color=colour, ls=dashes, lw=1.6, label=label)
    known = evaluated(run)
    for (name, values), marker in zip(known.items(), "osv^D", strict=False):
        outcomes.plot(values.index, values, color="black", marker=marker, ms=3, lw=1.0, label=name)
    lowest = min([0.0, points["reward_mean"].min(), *(values.min() for values in known.values())])
    outcomes.set(title=f"{outcome.capitalize()} and reward", xlabel="step", ylim=(lowest, None))
    outcomes.grid(alpha=0.3)
    for text in outcomes.legend(frameon=False, fontsize=8).get_texts():
        text.set_parse_math(False)  # a `$` in the name of a task or a reward is one
    shares = outcome_histogram(run)
    steps, levels = shares.index.to_numpy(), np.arange(len(shares.columns) + 1) - 0.5
    if len(steps):
        edges = np.concatenate([[steps[0] - 1], steps])
        mesh = groups.pcolormesh(edges, levels, 100 * shares.to_numpy().T, cmap="cividis", vmin=0, rasterized=True)
        figure.colorbar(mesh, ax=groups)
    groups.set_yticks(levels[:-1] + 0.5, shares.columns)
    # A label beside the colours would be cut off: the layout does not count its length
    groups.set(title="Groups drawn in full, colour: % of them", xlabel="step", ylabel=outcome)
    return figure
