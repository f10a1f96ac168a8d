"""The app: one page that follows the runs while they train, made of Gradio's own components and Plotly's charts."""

import sys
from pathlib import Path
from typing import Any

import gradio as gr
import pandas as pd

from ..record import Run, TelemetryError
from ..record.evaluations import RESULT_FILES
from ..record.reader import STATES
from ..record.schema import Status
from . import charts, views
from .runs import RunBook


TABS = ("Overview", "Training", "Prompts", "Runs", "Settings")
REFRESH_SECONDS = 1.0
"""How often the page asks for what is new."""

_VISITS = 12
"""Latest visits of a prompt whose completions can be chosen."""

# A Plotly chart tells the page which point was clicked; Gradio does not pass this on
_OPEN_POINT = """
document.addEventListener("pointerover", (event) => {
  const plot = event.target.closest?.("#lze-scatter .js-plotly-plot");
  if (!plot || plot.dataset.lze) return;
  plot.dataset.lze = "listens";
  plot.on("plotly_click", (data) => trigger("click", { prompt: String(data.points[0].customdata) }));
});
"""


def build(runs: list[str]) -> gr.Blocks:
    """The app over runs, given as for [`~lze_trl.app.launch`], not started."""
    with gr.Blocks(title="Learning-Zone Energy", analytics_enabled=False, fill_width=True) as app:
        _Page(RunBook(runs))
    return app


def serve(runs: list[str], host: str, port: int | None) -> gr.Blocks:
    """Start the app, and serve it until interrupted; see [`~lze_trl.app.launch`]."""
    app = build(runs)
    app.launch(
        server_name=host,
        server_port=port,
        # Fonts of the reader's machine: the page asks no other server for anything
        theme=gr.themes.Base(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]),
        head=f"<style>{(Path(__file__).parent / 'style.css').read_text(encoding='utf-8')}</style>",
        footer_links=[],
        ssr_mode=False,
        share=False,
        quiet=True,  # Gradio's own message advertises sharing
        prevent_thread_lock=True,
    )
    sys.stdout.write(f"The app is at {app.local_url}\n")
    sys.stdout.flush()
    if not hasattr(sys, "ps1"):  # in a notebook, the next cell can run
        app.block_thread()
    return app


class _Page:
    """Components, and the handlers that fill them."""

    def __init__(self, book: RunBook):
        self.book = book
        ids = book.ids
        with gr.Row():
            gr.Markdown("## Learning-Zone Energy")
            self.run = gr.Dropdown(ids, value=next(iter(ids), None), label="Run", elem_id="lze-run")
            self.smoothing = gr.Slider(0.0, 0.99, 0.0, step=0.01, label="Smoothing")
            self.live = gr.Checkbox(True, label="Live", info="Follow the run while it trains", min_width=120)
        self.standing = gr.HTML(elem_classes="lze", elem_id="lze-standing")
        self.tab = gr.State("Overview")
        self.prompt = gr.State("")
        self.seen = gr.State(None)  # what the page shows, as of [`_version`]
        self.order = gr.State([])  # ids of the prompts in the table, which keep their places at a refresh
        with gr.Tabs():
            self.tabs = [gr.Tab(name) for name in TABS]
        overview, training, prompts, compare, settings = self.tabs
        with overview:
            self.numbers = gr.HTML(elem_classes="lze", elem_id="lze-overview")
            self.overview_plots = _plots()
        with training:
            self.training_plots = _plots()
        with prompts:
            self._add_prompts()
        with compare:
            self._add_comparison()
        with settings:
            self.settings = gr.Dataframe(
                headers=["setting", "value"], label="Settings", wrap=True, interactive=False, elem_id="lze-settings"
            )
        self._connect()

    def _add_prompts(self):
        with gr.Row():
            self.search = gr.Textbox(label="Search", placeholder="text, column or id", elem_id="lze-search")
            self.state = gr.Dropdown(["all", *STATES], value="all", label="State", elem_id="lze-state")
        with gr.Row():
            with gr.Column(scale=3, min_width=320):
                self.scatter = gr.Plot(show_label=False, elem_id="lze-scatter")
                self.bridge = gr.HTML(js_on_load=_OPEN_POINT)
                self.found = gr.Markdown(elem_id="lze-found")
                self.table = gr.Dataframe(
                    label="Prompts: choose one to open it",
                    interactive=False,
                    elem_id="lze-table",
                    column_widths=[280, 90, 80, 90, 80, 70, 190],
                    datatype=["str", "str", "number", "number", "number", "number", "str"],
                )
            with gr.Column(scale=2, min_width=320):
                self.history = gr.Plot(show_label=False, visible=False)
                self.visit = gr.Dropdown(
                    [("the latest visit", "")], value="", label="Completions at", visible=False, elem_id="lze-visit"
                )
                self.detail = gr.HTML("Choose a prompt to see its history.", elem_classes="lze", elem_id="lze-detail")

    def _add_comparison(self):
        ids = self.book.ids
        self.runs = gr.CheckboxGroup(ids, value=ids[:8], label="Runs", elem_id="lze-runs")
        with gr.Row():
            metrics = [(label, name) for name, label in charts.METRICS.items()]
            self.metric = gr.Dropdown(metrics, value="pass_rate", label="Show", elem_id="lze-metric")
            self.axis = gr.Radio([(label, name) for name, label in charts.AXES.items()], value="step", label="Over")
        self.comparison = gr.Plot(show_label=False, elem_id="lze-comparison")
        self.run_table = gr.Dataframe(
            label="Runs, and the settings that differ", interactive=False, elem_id="lze-run-table"
        )

    def _connect(self):
        names = "tab run smoothing search state prompt visit runs metric axis"
        self.controls = {name: getattr(self, name) for name in names.split()}
        controls = list(self.controls.values())
        shown = [self.standing, self.numbers, *self.overview_plots, *self.training_plots, self.scatter, self.found]
        shown += [self.table, self.history, self.visit, self.detail]
        shown += [self.comparison, self.run_table, self.settings, self.seen, self.order]
        # One after the other: the answer to an earlier question never replaces that to a later one
        quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private", "concurrency_id": "page"}
        show: dict[str, Any] = {"fn": self._show, "inputs": controls, "outputs": shown, **quiet}
        gr.on(None, self._look, None, [self.run, self.runs], **quiet).then(**show)
        for tab in self.tabs:
            tab.select(lambda name=tab.label: name, None, self.tab, **quiet).then(**show)
        for name, control in self.controls.items():
            if name not in ("tab", "run", "prompt", "visit"):
                control.input(trigger_mode="always_last", **show)
        self.run.input(lambda: ("", ""), None, [self.prompt, self.visit], **quiet).then(**show)
        # Opening a prompt leaves the table alone, so that the reader can go on with the keyboard
        opened = [self.run, self.prompt, self.visit]
        detail: dict[str, Any] = {"fn": self._show_opened, "inputs": opened, "outputs": shown, **quiet}
        self.table.select(self._open_row, None, [self.prompt, self.visit], **quiet).then(**detail)
        self.bridge.click(self._open_point, None, [self.prompt, self.visit], **quiet).then(**detail)
        self.visit.input(**detail)
        timer = gr.Timer(REFRESH_SECONDS)
        timer.tick(self._follow, [self.seen, self.order, *controls], shown, **quiet)
        self.live.input(lambda live: gr.Timer(active=live), self.live, timer, **quiet)

    def _open_row(self, event: gr.SelectData) -> tuple[str, str]:
        return str(event.row_value[-1]), ""

    def _open_point(self, event: gr.EventData) -> tuple[str, str]:
        return str(event._data["prompt"]), ""

    def _look(self) -> tuple[Any, Any]:
        """Look for runs that have begun since the app was started."""
        self.book.look()
        ids = self.book.ids
        return gr.update(choices=ids, value=next(iter(ids), None)), gr.update(choices=ids, value=ids[:8])

    def _version(self, given: dict[str, Any]) -> list[Any]:
        """Changes with the controls, and when a run on the page has recorded or evaluated something, or ended."""
        versions: list[Any] = [{name: value for name, value in given.items() if name not in ("prompt", "visit")}]
        for id in given["runs"] if given["tab"] == "Runs" else [given["run"]]:
            try:
                run = self.book.open(id)
                evaluations = sorted(map(str, run.directory.parent.glob(RESULT_FILES)))
                versions.append([hash(run.version), Status.read(run.directory).state, *evaluations])
            except TelemetryError as error:
                versions.append(str(error))
        return versions

    def _follow(self, seen: list[Any] | None, order: list[int], *values: Any) -> Any:
        given = dict(zip(self.controls, values, strict=True))
        return gr.skip() if self._version(given) == seen else self._show(*values, order=order)

    def _show(self, *values: Any, order: list[int] | None = None) -> dict[Any, Any]:
        """What changes on the page, by component: only the open tab. The prompts in `order` keep their places."""
        given = dict(zip(self.controls, values, strict=True))
        changes: dict[Any, Any] = {self.seen: self._version(given)}
        try:
            if given["tab"] == "Runs":
                return changes | self._show_runs(given)
            run = self.book.open(given["run"])
            changes[self.standing] = views.standing(run)
            if given["tab"] == "Overview":
                changes |= {self.numbers: views.overview(run)} | _filled(self.overview_plots, charts.overview(run))
            elif given["tab"] == "Training":
                changes |= _filled(self.training_plots, charts.training(run, given["smoothing"]))
            elif given["tab"] == "Prompts":
                changes |= self._show_prompts(run, given, order or []) | self._show_prompt(
                    run, given["prompt"], given["visit"]
                )
            else:
                changes[self.settings] = views.settings_table(run)
        except TelemetryError as error:
            changes |= {self.standing: views.HTML.problem(error), self.numbers: ""} | _filled(self.overview_plots, [])
        return changes

    def _show_prompts(self, run: Run, given: dict[str, Any], order: list[int]) -> dict[Any, Any]:
        state = None if given["state"] == "all" else given["state"]
        places = {id: place for place, id in enumerate(order)}
        found = run.prompts(state, given["search"], limit=views.MOST_PROMPTS)
        found = found.sort_values("prompt_id", key=lambda ids: ids.map(places).fillna(len(places)), kind="stable")
        counts = run.prompt_counts(given["search"])
        total = counts[state] if state else sum(counts.values())
        more = f" Shown are the {len(found):,} of highest energy." if len(found) < total else ""
        return {
            self.scatter: charts.prompts(run, found),
            self.found: f"{total:,} prompts.{more}",
            self.table: views.prompt_table(run, found),
            self.order: found["prompt_id"].tolist(),
        }

    def _show_opened(self, id: str, chosen: str, visit: str) -> dict[Any, Any]:
        return self._show_prompt(self.book.open(id), chosen, visit)

    def _show_prompt(self, run: Run, chosen: str, visit: str) -> dict[Any, Any]:
        if not chosen:
            nothing = {part: gr.update(visible=False) for part in (self.history, self.visit)}
            return {self.detail: "Choose a prompt to see its history.", **nothing}
        prompt_id = int(chosen)
        visits = run.sql(
            """SELECT generation, step + 1 AS step, avg(outcome) AS outcome FROM completions WHERE prompt_id = ?
            GROUP BY ALL ORDER BY generation DESC LIMIT ?""",
            [prompt_id, _VISITS],
        )
        choices = [
            (f"step {row.step}: {views.percent(row.outcome)}", str(row.generation)) for row in visits.itertuples()
        ]
        return {
            self.history: gr.update(value=charts.history(run, prompt_id), visible=True),
            self.visit: gr.update(choices=[("the latest visit", ""), *choices], visible=bool(choices)),
            self.detail: views.prompt_detail(run, prompt_id, int(visit) if visit else None),
        }

    def _show_runs(self, given: dict[str, Any]) -> dict[Any, Any]:
        runs, problems = {}, []
        for id in given["runs"]:
            try:
                runs[id] = self.book.open(id)
            except TelemetryError as error:
                problems.append(f"{id}: {error}")
        return {
            self.standing: views.HTML.problem(" ".join(problems)) if problems else "",
            self.comparison: charts.comparison(runs, given["axis"], given["metric"], given["smoothing"]),
            self.run_table: views.run_table(runs) if runs else pd.DataFrame({"run": []}),
        }


def _plots() -> list[gr.Plot]:
    """Places for charts, side by side where the page is wide enough."""
    with gr.Row():
        return [gr.Plot(show_label=False, visible=False, min_width=400) for _ in range(charts.MOST_CHARTS)]


def _filled(plots: list[gr.Plot], figures: list[Any]) -> dict[Any, Any]:
    """Charts in the first places, and the others hidden."""
    shown = {plot: gr.update(value=figure, visible=True) for plot, figure in zip(plots, figures, strict=False)}
    return shown | {plot: gr.update(visible=False) for plot in plots[len(figures) :]}
