"""The report of a run: one HTML file that needs nothing else."""

import base64
import gzip
import json
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

from ..files import write_atomically
from ..record import MissingTelemetryError, open_run
from ..version import __version__
from . import charts
from .views import HTML, best_and_worst, by_value, cards, evaluations, settings, standing


def write_report(run_dir: str | Path) -> Path:
    """
    Write the report of a run, finished or not, into `<run_dir>/report`.

    Returns the HTML file. A run that cannot be read raises a [`TelemetryError`].
    """
    folder = Path(run_dir) / "report"
    with closing(open_run(run_dir)) as run:
        if not (figures := charts.overview(run)):
            raise MissingTelemetryError("The run has started, and its first batch is not scored yet. Try again later.")
        script = gzip.compress(charts.PLOTLY.read_bytes())  # 1.5 MB instead of 5
        document = HTML.report(
            run.name,
            standing(run),
            run.summary(),
            cards(run) + evaluations(run) + by_value(run),
            [json.loads(str(figure.to_json())) for figure in figures],
            {heading: best_and_worst(run, order) for heading, order in (("Best", "DESC"), ("Worst", "ASC"))},
            settings(run),
            base64.b64encode(script).decode(),
            f"Written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC by lze_trl {__version__}; "
            f"recorded by lze_trl {run.meta.package_version}.",
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "report.html", document.encode())
    return folder / "report.html"
