"""The app: one page with four views, its state in the address, following the runs while they train."""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gradio as gr
import numpy as np

from ..record import TelemetryError
from ..record.evaluations import RESULT_FILES
from ..record.status import Status
from . import views
from .charts import Look
from .markup import HTML, STATES
from .runs import RunBook


VIEWS = ("Runs", "Overview", "Training", "Prompts", "Compare", "Settings")
REFRESH_SECONDS = 1.0
"""How often the page asks for what is new."""

_SORTS = [
    ("energy, highest first", "-energy"),
    ("energy, lowest first", "energy"),
    ("pass rate, highest first", "-pass_rate"),
    ("pass rate, lowest first", "pass_rate"),
    ("most visited", "-visits"),
    ("most often trained on", "-times_selected"),
    ("latest visit", "-last_step"),
]
_STATES = ("all", *(name for name in STATES if name != "unscored"))
# Parameters of the address, in the order of the controls, and their defaults, which the address leaves out. The defaults
# of the runs depend on which were given. `view` and `page` are taken by Gradio
_DEFAULTS: dict[str, Any] = {
    "tab": "Overview",
    "run": None,
    "state": "all",
    "q": "",
    "sort": "-energy",
    "at": 1,
    "prompt": "",
    "visit": "",
    "picked": "",
    "by": "",
    "runs": (),
    "axis": "step",
    "metric": "pass_rate",
    "smooth": 0.0,
    "log": False,
    "zoom": "",
}
_CHOICES = {"tab": VIEWS, "state": _STATES, "sort": dict(_SORTS).values(), "axis": views.AXES, "metric": views.METRICS}
_NO_COLUMN = ("–", "")
_LOOK = ("smooth", "log", "zoom")
_SHOWN_PARAMETERS = {
    "Runs": ("tab",),
    "Overview": ("tab", "run"),
    "Training": ("tab", "run", *_LOOK),
    "Prompts": ("tab", "run", "state", "q", "sort", "at", "prompt", "visit", "picked", "by"),
    "Compare": ("tab", "runs", "axis", "metric", *_LOOK),
    "Settings": ("tab", "run"),
}
_COMPARED = 8
"""Runs that are compared unless the reader chooses others, at most."""

_Held = tuple[list[Any], list[int]]
"""What the prompts on the page were asked for with, and their ids."""


def build(runs: list[str]) -> gr.Blocks:
    """The app over runs, given as for [`~lze_trl.app.launch`], not started."""
    with gr.Blocks(title="Learning-Zone Energy", analytics_enabled=False, fill_width=True) as app:
        _Page(RunBook(runs))
    return app


def serve(runs: list[str], host: str, port: int | None) -> gr.Blocks:
    """Start the app, and serve it until interrupted; see [`~lze_trl.app.launch`]."""
    address = json.dumps({"defaults": _DEFAULTS, "shown": _SHOWN_PARAMETERS})
    app = build(runs)
    app.launch(
        server_name=host,
        server_port=port,
        theme=gr.themes.Base(
            primary_hue="sky",
            neutral_hue="slate",
            font=["system-ui", "sans-serif"],
            font_mono=["ui-monospace", "monospace"],
        ),
        # Not as `css`, which Gradio rewrites, so that the rules for light and dark would not apply
        head=f"<style>{_asset('style.css')}{_asset('page.css')}</style>"
        f"<script>{_asset('page.js').replace('ADDRESS', address, 1)}</script>",
        footer_links=[],
        ssr_mode=False,
        share=False,
        quiet=True,  # what it prints advertises sharing
        prevent_thread_lock=True,
    )
    sys.stdout.write(f"The app is at {app.local_url}\n")
    sys.stdout.flush()
    if not hasattr(sys, "ps1"):  # in a notebook, the next cell can run
        app.block_thread()
    return app


def _asset(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


class _Page:
    """Controls, the handlers behind them, and what they show."""

    def __init__(self, book: RunBook):
        self.book = book
        gr.HTML(
            '<header class="lze lze-title"><h1>Learning-Zone Energy</h1><p>where the model is learning</p></header>'
        )
        self._add_controls()
        self._add_results()
        self._connect()

    def _add_controls(self):
        ids = self.book.ids
        with gr.Row(elem_classes="lze-controls"):
            self.view = gr.Radio(
                VIEWS,
                value=_DEFAULTS["tab"],
                show_label=False,
                container=False,
                elem_id="lze-view",
                scale=2,
                min_width=300,
            )
            self.run = gr.Dropdown(ids, value=ids[0] if ids else None, label="Run", elem_id="lze-run", scale=1)
            self.pause = gr.Button("Pause", elem_id="lze-pause", min_width=90, scale=0)
        with gr.Row(visible=False, elem_classes="lze-controls") as self.prompt_controls:
            self.search = gr.Textbox(
                label="Search", placeholder="text, column or id", elem_id="lze-search", min_width=220
            )
            self.sort = gr.Dropdown(_SORTS, value="-energy", label="Sort by", elem_id="lze-sort", min_width=230)
            self.by = gr.Dropdown(
                [_NO_COLUMN], value="", label="Break down by", elem_id="lze-by", min_width=160, allow_custom_value=True
            )
            self.state = gr.Radio(_STATES, value="all", label="State", elem_id="lze-state", scale=3, min_width=300)
        with gr.Row(visible=False, elem_classes="lze-controls") as self.compare_controls:
            self.runs = gr.CheckboxGroup(
                ids, value=ids[:_COMPARED], label="Runs", elem_id="lze-runs", scale=2, min_width=300
            )
            axes = [(label, name) for name, label in views.AXES.items()]
            self.axis = gr.Radio(axes, value="step", label="Over", elem_id="lze-axis", scale=2, min_width=300)
            metrics = [(label, name) for name, label in views.METRICS.items()]
            self.metric = gr.Dropdown(metrics, value="pass_rate", label="Show", elem_id="lze-metric", min_width=240)
        with gr.Row(visible=False, elem_classes="lze-controls") as self.look_controls:
            self.smooth = gr.Slider(0.0, 0.99, 0.0, step=0.01, label="Smoothing", elem_id="lze-smooth", min_width=240)
            self.log = gr.Checkbox(label="Logarithmic", container=False, elem_id="lze-log", min_width=120)

    def _add_results(self):
        with gr.Row(elem_classes="lze-results"):
            with gr.Column(scale=3, elem_classes="lze-column"):
                self.main = gr.HTML(
                    elem_classes="lze", apply_default_css=False, elem_id="lze-main", js_on_load=_SET_PARAMETERS
                )
                with gr.Row(visible=False, elem_classes="lze-pager") as self.pager:
                    self.previous = gr.Button("← Previous", size="sm", elem_id="lze-previous")
                    self.page = gr.Number(1, label="Page", precision=0, minimum=1, container=False, elem_id="lze-page")
                    self.next = gr.Button("Next →", size="sm", elem_id="lze-next")
            with gr.Column(scale=2, elem_classes="lze-column", visible=False) as self.side:
                self.detail = gr.HTML(
                    elem_classes="lze", apply_default_css=False, elem_id="lze-detail", js_on_load=_SET_PARAMETERS
                )
        self.prompt = gr.Textbox(visible="hidden", elem_id="lze-prompt")
        self.visit = gr.Textbox(visible="hidden", elem_id="lze-visit")
        self.picked = gr.Textbox(visible="hidden", elem_id="lze-picked")
        self.zoom = gr.Textbox(visible="hidden", elem_id="lze-zoom")
        self.seen = gr.State(None)
        self.held = gr.State(None)  # the prompts that keep their places, of [`_Held`]

    def _connect(self):
        search = (self.state, self.search, self.sort)
        controls = [self.view, self.run, *search, self.page, self.prompt, self.visit, self.picked, self.by]
        controls += [self.runs, self.axis, self.metric, self.smooth, self.log, self.zoom]
        pages = (self.side, self.prompt_controls, self.compare_controls, self.look_controls, self.pager)
        shown = [self.main, self.detail, *pages, self.page, self.run, self.by, self.seen, self.held]
        # One after the other: the answer to an earlier question never replaces that to a later one
        quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private", "concurrency_id": "page"}
        show: dict[str, Any] = {"fn": self._show, "inputs": [self.held, *controls], "outputs": shown, **quiet}
        show_and_write = show | {"js": "(held, ...values) => [held, ...window.lzeWriteAddress(values)]"}

        gr.on(None, self._restore, None, controls, **quiet).then(**show)
        # A change shows the first page again, except that of the page or the prompt
        for control in (self.run, *search):
            control.input(lambda: 1, None, self.page, trigger_mode="always_last", **quiet).then(**show_and_write)
        for shown_by in (self.view, self.by, self.runs, self.metric, self.page, self.smooth, self.log):
            shown_by.input(trigger_mode="always_last", **show_and_write)
        # What was chosen of one axis is nothing of another
        self.axis.input(lambda: "", None, self.zoom, trigger_mode="always_last", **quiet).then(**show_and_write)
        for part in (self.main, self.detail):
            part.click(self._set, None, controls, **quiet).then(**show_and_write)
        self.main.submit(lambda: None, None, self.held, **quiet).then(**show)
        for button, change in ((self.previous, -1), (self.next, 1)):
            turned = button.click(
                lambda page, change=change: max(1, (page or 1) + change), self.page, self.page, **quiet
            )
            turned.then(**show_and_write)
        timer = gr.Timer(REFRESH_SECONDS)
        timer.tick(self._follow, [self.seen, self.held, *controls], shown, **quiet)
        self.pause.click(self._pause, self.pause, [timer, self.pause], **quiet)

    def _set(self, event: gr.EventData) -> list[Any]:
        """Values of the controls for a button of the page, which names those that it sets."""
        values = self._values({name: str(value) for name, value in event._data.items()})
        return [values[name] if name in event._data else gr.skip() for name in _DEFAULTS]

    def _pause(self, label: str) -> tuple[gr.Timer, str]:
        """Stop or restart the refreshes. What the reader asks for is shown all the same."""
        resumed = label == "Resume"
        return gr.Timer(active=resumed), "Pause" if resumed else "Resume"

    def _restore(self, request: gr.Request) -> list[Any]:
        """Values of the controls from the address, after a look for runs that have begun."""
        self.book.look()
        values = self._values(request.query_params)
        for name in ("run", "runs"):
            values[name] = gr.update(choices=self.book.ids, value=values[name])
        return list(values.values())

    def _values(self, given: Mapping[str, str]) -> dict[str, Any]:
        """Values of the controls as they are given, with the default instead of any that a control cannot have."""
        ids, values = self.book.ids, {}
        for name, default in _DEFAULTS.items():
            value = given.get(name, default)
            values[name] = value if value in _CHOICES.get(name, [value]) else default
        values["at"] = max(1, int(given["at"])) if given.get("at", "").isdecimal() else 1
        values["run"] = given.get("run") if given.get("run") in ids else next(iter(ids), None)
        values["runs"] = [id for id in ids if id in given["runs"].split(",")] if "runs" in given else ids[:_COMPARED]
        values["smooth"] = float(given["smooth"]) if re.fullmatch(r"0\.\d{1,2}", given.get("smooth", "")) else 0.0
        values["log"] = given.get("log") == "true"
        return values

    def _version(self, given: dict[str, Any]) -> list[Any]:
        """Changes with the controls, and when one of the runs on the page has recorded or evaluated something, or ended."""
        versions: list[Any] = [given]
        for id in {"Compare": given["runs"], "Runs": self.book.ids}.get(given["tab"], [given["run"]]):
            try:
                run = self.book.open(id)
                state = Status.read(run.directory).state
                versions.append([hash(run.version), state, *sorted(run.directory.parent.glob(RESULT_FILES))])
            except TelemetryError as error:
                versions.append(str(error))
        return versions

    def _follow(self, seen: list[Any] | None, held: _Held | None, *values: Any) -> Any:
        given = dict(zip(_DEFAULTS, values, strict=True))
        return gr.skip() if self._version(given) == seen else self._show(held, *values)

    def _show(self, held: _Held | None, *values: Any) -> dict[Any, Any]:
        """What changes on the page, by component."""
        given = dict(zip(_DEFAULTS, values, strict=True))
        view, version = given["tab"], self._version(given)
        detail, pages, columns = "", 1, []
        try:
            if view == "Runs":
                main = views.all_runs(self.book)
            elif view == "Compare":
                ids = [id for id in self.book.ids if id in given["runs"]]
                main = views.compare(self.book, ids, given["axis"], given["metric"], _look(given))
            elif view == "Prompts":
                run, chosen, page = self.book.open(given["run"]), given["prompt"], given["at"] or 1
                asked = [given[name] for name in ("run", "state", "q", "sort", "at")]
                places = held[1] if held and held[0] == asked else []
                detail = views.prompt_detail(run, chosen, given["visit"], given["picked"])
                search = given["state"], given["q"], given["sort"], page - 1
                main, pages, places = views.prompt_table(run, *search, chosen, places, detail)
                held = asked, places
                columns = run.columns()
                if given["by"] in columns:
                    main = views.breakdown(run, given["by"]) + main
            elif view == "Settings":
                main = views.settings(self.book.open(given["run"]))
            else:
                run = self.book.open(given["run"])
                shown = views.training(run, _look(given)) if view == "Training" else views.overview(run)
                main = views.standing(run) + shown
        except TelemetryError as error:
            main = HTML.problem(error)
        visible = {
            self.side: view == "Prompts",
            self.prompt_controls: view == "Prompts",
            self.compare_controls: view == "Compare",
            self.look_controls: view in ("Training", "Compare"),
            self.pager: pages > 1,
            self.run: view not in ("Runs", "Compare"),
        }
        changes: dict[Any, Any] = {component: gr.update(visible=value) for component, value in visible.items()}
        if view == "Prompts" and given["at"] and given["at"] > pages:
            changes[self.page] = pages
        if view == "Prompts":
            changes[self.by] = gr.update(choices=[_NO_COLUMN, *columns])
        return {self.main: main, self.detail: detail, self.seen: version, self.held: held, **changes}


def _look(given: dict[str, Any]) -> Look:
    """How lines are shown."""
    try:
        low, high = map(float, given["zoom"].split(","))
        span = (low, high) if np.isfinite([low, high]).all() and low < high else None
    except ValueError:
        span = None
    return Look(float(given["smooth"] or 0.0), bool(given["log"]), span)


# The buttons of the page name parameters of the address and their new values, as text: the id of a prompt does not fit into
# a JavaScript number. One more button asks for the order of now
_SET_PARAMETERS = """
element.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button || "csv" in button.dataset) return;
  if ("update" in button.dataset) { trigger("submit"); return; }
  trigger("click", { ...button.dataset });
});
element.addEventListener("lze-set", (event) => trigger("click", event.detail));
"""
