"""The report of a run: one HTML file that needs nothing else, and its picture."""

import base64
import gzip
import io
import json
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import plotly
from matplotlib.figure import Figure

from ..files import write_atomically
from ..record import MissingTelemetryError, Run, open_run
from ..record.curves import curve, evaluated, outcome_histogram, outcome_name, reward_curves
from ..version import __version__
from . import charts
from .views import HTML, best_and_worst, overview, settings, standing


_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#c99700", "#56b4e9")


PLOTLY = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"


def write_report(run_dir: str | Path) -> Path:
    """
    Write the report of a run, finished or not, into `<run_dir>/report`.

    Returns the HTML file; `summary.png` lies beside it. A run that cannot be read raises a [`TelemetryError`].
    """
    folder = Path(run_dir) / "report"
    write_summary_picture(run_dir, folder / "summary.png")
    with closing(open_run(run_dir)) as run:
        script = gzip.compress(PLOTLY.read_bytes())  # 1.5 MB instead of 5
        document = HTML.report(
            run.name,
            standing(run),
            run.summary(),
            overview(run),
            [json.loads(str(figure.to_json())) for figure in charts.overview(run)],
            {heading: best_and_worst(run, order) for heading, order in (("Best", "DESC"), ("Worst", "ASC"))},
            settings(run, None),
            base64.b64encode(script).decode(),
            f"Written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC by lze_trl {__version__}; "
            f"recorded by lze_trl {run.meta.package_version}.",
        )
    write_atomically(folder / "report.html", document.encode())
    return folder / "report.html"


def write_summary_picture(run_dir: str | Path, path: str | Path) -> Path:
    """Write the picture of a run: rewards, and shares of groups by their outcome, over the steps."""
    with closing(open_run(run_dir)) as run:
        if curve(run, bins=1).empty:
            raise MissingTelemetryError("The run has started, and its first batch is not scored yet. Try again later.")
        figure, picture = _draw_summary(run), io.BytesIO()
    figure.savefig(picture, format="png")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_atomically(Path(path), picture.getvalue())
    return Path(path)


def _draw_summary(run: Run) -> Figure:
    # Without pyplot: a training may have chosen a backend of its own, and its figures would never be freed
    figure = Figure(figsize=(11.0, 3.6), dpi=110, layout="constrained", facecolor="white")
    outcomes, groups = figure.subplots(1, 2)
    for axis in (outcomes, groups):
        axis.spines[["top", "right"]].set_visible(False)
    rewards = {name: values.dropna() for name, values in reward_curves(run).items()}
    if len(rewards) > 1:
        rewards = {"reward": curve(run).set_index("step")["reward_mean"].dropna()} | rewards
    for (name, values), colour in zip(rewards.items(), _COLOURS, strict=False):
        outcomes.plot(values.index, values, color=colour, lw=1.6, label=name)
    known = evaluated(run)
    for (name, values), marker in zip(known.items(), "osv^D", strict=False):
        outcomes.plot(values.index, values, color="black", marker=marker, ms=3, lw=1.0, label=name)
    lowest = min([0.0, *(values.min() for values in [*rewards.values(), *known.values()])])
    outcomes.set(title="Rewards, and scores on other prompts", xlabel="step", ylim=(lowest, None))
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
    groups.set(title="Groups drawn in full, colour: % of them", xlabel="step", ylabel=outcome_name(run))
    return figure
