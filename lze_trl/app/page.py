"""The app: one page that follows the runs while they train, made of Gradio's own components and Plotly's charts."""

import sys
from pathlib import Path
from typing import Any

import gradio as gr
import pandas as pd

from ..record import Run, TelemetryError
from ..record.evaluations import RESULT_FILES
from ..record.numbers import percent
from ..record.reader import STATES
from ..record.schema import Status
from . import charts, views
from .runs import RunBook


TABS = ("Overview", "Prompts", "Runs", "Settings")
REFRESH_SECONDS = 1.0
"""How often the page asks for what is new."""

_METRICS = [(label, name) for name, label in charts.METRICS.items()]
_VISITS = 12
"""Latest visits of a prompt whose completions can be chosen."""


def serve(runs: list[str], host: str, port: int | None) -> gr.Blocks:
    """Start the app, and serve it until interrupted; see [`~lze_trl.app.launch`]."""
    with gr.Blocks(title="Learning-Zone Energy", analytics_enabled=False, fill_width=True) as app:
        _Page(RunBook(runs))
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
            self.live = gr.Checkbox(True, label="Live", info="Follow the run while it trains", min_width=120)
        self.standing = gr.HTML(elem_classes="lze", elem_id="lze-standing")
        self.tab = gr.State("Overview")
        self.prompt = gr.State("")
        self.seen = gr.State(None)  # what the page shows, as of [`_version`]
        with gr.Tabs():
            self.tabs = [gr.Tab(name) for name in TABS]
        overview, prompts, compare, settings = self.tabs
        with overview:
            self.numbers = gr.HTML(elem_classes="lze", elem_id="lze-overview")
            with gr.Row():  # side by side where the page is wide enough
                self.plots = [gr.Plot(show_label=False, min_width=400) for _ in range(charts.OVERVIEW_CHARTS)]
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
            self.metric = gr.Dropdown(_METRICS, value="pass_rate", label="Show", elem_id="lze-metric")
            self.smoothing = gr.Slider(0.0, 0.99, 0.0, step=0.01, label="Smoothing")
            self.axis = gr.Radio([(label, name) for name, label in charts.AXES.items()], value="step", label="Over")
        self.comparison = gr.Plot(show_label=False, elem_id="lze-comparison")
        self.run_table = gr.Dataframe(
            label="Runs, and the settings that differ", interactive=False, elem_id="lze-run-table"
        )

    def _connect(self):
        names = "tab run smoothing search state prompt visit runs metric axis"
        self.controls = {name: getattr(self, name) for name in names.split()}
        controls = list(self.controls.values())
        chosen = {self.run, self.live, self.tab, self.search, self.state, self.runs, self.axis, self.smoothing}
        parts = (*vars(self).values(), *self.plots)
        shown = [part for part in parts if isinstance(part, gr.components.Component) and part not in chosen]
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
        self.table.select(self._open_row, self.run, shown, **quiet)
        self.visit.input(self._show_prompt, [self.run, self.prompt, self.visit], shown, **quiet)
        timer = gr.Timer(REFRESH_SECONDS)
        timer.tick(self._follow, [self.seen, *controls], shown, **quiet)
        self.live.input(lambda live: gr.Timer(active=live), self.live, timer, **quiet)

    def _open_row(self, id: str, event: gr.SelectData) -> dict[Any, Any]:
        chosen = str(event.row_value[-1])
        return {self.prompt: chosen} | self._show_prompt(id, chosen, "")

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

    def _follow(self, seen: list[Any] | None, *values: Any) -> Any:
        given = dict(zip(self.controls, values, strict=True))
        return gr.skip() if self._version(given) == seen else self._show(*values)

    def _show(self, *values: Any) -> dict[Any, Any]:
        """What changes on the page, by component: only the open tab."""
        given = dict(zip(self.controls, values, strict=True))
        changes: dict[Any, Any] = {self.seen: self._version(given)}
        try:
            if given["tab"] == "Runs":
                return changes | self._show_runs(given)
            run = self.book.open(given["run"])
            changes[self.standing] = views.standing(run)
            if given["tab"] == "Overview":
                changes |= {self.numbers: views.overview(run)} | dict(
                    zip(self.plots, charts.overview(run), strict=False)
                )
            elif given["tab"] == "Prompts":
                changes |= self._show_prompts(run, given)
            else:
                changes[self.settings] = views.settings_table(run)
        except TelemetryError as error:
            changes |= {self.standing: views.HTML.problem(error), self.numbers: ""} | dict.fromkeys(self.plots)
        return changes

    def _show_prompts(self, run: Run, given: dict[str, Any]) -> dict[Any, Any]:
        state = None if given["state"] == "all" else given["state"]
        found = run.prompts(state, given["search"], limit=views.MOST_PROMPTS)
        counts = run.prompt_counts(given["search"])
        total = counts[state] if state else sum(counts.values())
        more = f" Shown are the {len(found):,} of highest energy." if len(found) < total else ""
        return {
            self.scatter: charts.prompts(run, found),
            self.found: f"{total:,} prompts.{more}",
            self.table: views.prompt_table(run, found),
        } | self._show_prompt(given["run"], given["prompt"], given["visit"])

    def _show_prompt(self, id: str, chosen: str, visit: str) -> dict[Any, Any]:
        if not chosen:
            nothing = {part: gr.update(visible=False) for part in (self.history, self.visit)}
            return {self.detail: "Choose a prompt to see its history.", **nothing}
        run, prompt_id = self.book.open(id), int(chosen)
        visits = run.sql(
            """SELECT generation, step + 1 AS step, avg(outcome) AS outcome FROM completions WHERE prompt_id = ?
            GROUP BY ALL ORDER BY generation DESC LIMIT ?""",
            [prompt_id, _VISITS],
        )
        choices = [(f"step {row.step}: {percent(row.outcome)}", str(row.generation)) for row in visits.itertuples()]
        choices.insert(0, ("the latest visit", ""))
        return {
            self.history: gr.update(value=charts.history(run, prompt_id), visible=True),
            self.visit: gr.update(choices=choices, value=visit, visible=not visits.empty),
            self.detail: views.prompt_detail(run, prompt_id, int(visit) if visit else None),
        }

    def _show_runs(self, given: dict[str, Any]) -> dict[Any, Any]:
        runs, problems = {}, []
        for id in given["runs"]:
            try:
                runs[id] = self.book.open(id)
            except TelemetryError as error:
                problems.append(f"{id}: {error}")
        names = {name for run in runs.values() for name in run.sql("SELECT DISTINCT name FROM steps")["name"]}
        return {
            self.metric: gr.update(choices=[*_METRICS, *sorted(names)]),
            self.standing: views.HTML.problem(" ".join(problems)) if problems else "",
            self.comparison: charts.comparison(runs, given["axis"], given["metric"], given["smoothing"]),
            self.run_table: views.run_table(runs) if runs else pd.DataFrame({"run": []}),
        }
