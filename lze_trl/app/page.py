"""The app: one page with three views, its state in the address, following the runs while they train."""

import argparse
import json
from pathlib import Path
from typing import Any

import gradio as gr

from ..job.hub import resolve_run
from ..record import TelemetryError
from ..record.reader import SORT_COLUMNS
from . import views
from .runs import RunBook


VIEWS = ("Overview", "Prompts", "Compare")
REFRESH_SECONDS = 1.0
"""How often the page asks for what is new."""

_STATES = [
    ("all", "all"),
    *((label, name) for name, (_, label, _) in views.STATE_LABELS.items() if name != "unscored"),
]
_SORTS = [
    ("energy, highest first", "-energy"),
    ("energy, lowest first", "energy"),
    ("pass rate, highest first", "-pass_rate"),
    ("pass rate, lowest first", "pass_rate"),
    ("most visited", "-visits"),
    ("most often trained on", "-times_selected"),
    ("latest visit", "-last_step"),
]
# Parameters of the address, in the order of the controls; `view` and `page` are taken by Gradio
_PARAMETERS = ("tab", "run", "state", "q", "sort", "at", "prompt", "runs", "axis", "metric")
_DEFAULTS: dict[str, Any] = {
    "tab": VIEWS[0],
    "state": "all",
    "q": "",
    "sort": "-energy",
    "at": 1,
    "prompt": "",
    "axis": "step",
    "metric": "pass_rate",
}

_SHOWN_PARAMETERS = {
    "Overview": ("tab", "run"),
    "Prompts": ("tab", "run", "state", "q", "sort", "at", "prompt"),
    "Compare": ("tab", "runs", "axis", "metric"),
}


def build(runs: list[str]) -> gr.Blocks:
    """
    The app over a list of runs.

    Args:
        runs (`list[str]`): Output directories of trainings, or Hub ids of dataset repos with telemetry.

    Returns:
        `gr.Blocks`: The app, not started.
    """
    book = RunBook(runs)
    with gr.Blocks(title="Learning-Zone Energy", analytics_enabled=False, fill_width=True) as app:
        _Page(book)
    return app


def launch(
    runs: list[str], host: str = "127.0.0.1", port: int | None = None, prevent_thread_lock: bool = False
) -> gr.Blocks:
    """
    Start the app.

    Args:
        runs (`list[str]`):
            Output directories of trainings, or Hub ids of dataset repos with telemetry.
        host (`str`, *optional*, defaults to `"127.0.0.1"`):
            Address to listen on. The app has no login: give another one only where everyone may see the runs.
        port (`int`, *optional*):
            Port to listen on, by default the first free one from 7860 on.
        prevent_thread_lock (`bool`, *optional*, defaults to `False`):
            Whether to return at once instead of serving until interrupted.

    Raises:
        MissingTelemetryError: If a run is neither a folder nor a repo on the Hub.
    """
    for run in runs:
        resolve_run(run)  # a wrong name is an error here, not a page that waits for ever
    app = build(runs)
    app.launch(
        server_name=host,
        server_port=port,
        prevent_thread_lock=prevent_thread_lock,
        theme=gr.themes.Base(
            primary_hue="sky",
            neutral_hue="slate",
            font=["system-ui", "sans-serif"],
            font_mono=["ui-monospace", "monospace"],
        ),
        # Not as `css`, which Gradio rewrites, so that the rules for light and dark would not apply
        head=f"<style>{_asset('style.css')}{_asset('page.css')}</style><script>{_script()}</script>",
        allowed_paths=[],
        show_error=False,
        footer_links=[],
        ssr_mode=False,
        quiet=prevent_thread_lock,
    )
    return app


def _script() -> str:
    address = {"names": _PARAMETERS, "defaults": _DEFAULTS, "shown": _SHOWN_PARAMETERS}
    return _asset("page.js").replace("ADDRESS", json.dumps(address), 1)


def _asset(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def main(argv: list[str] | None = None):
    """Command line of the app."""
    parser = argparse.ArgumentParser(prog="lze-trl app", description="Look at runs in the browser.")
    parser.add_argument("runs", metavar="RUN", nargs="*", help="output folder of a run, or Hub id of its telemetry")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; the app has no login")
    parser.add_argument("--port", type=int, help="port to listen on")
    arguments = parser.parse_args(argv)
    launch(arguments.runs, arguments.host, arguments.port)


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
                VIEWS, value=VIEWS[0], show_label=False, container=False, elem_id="lze-view", scale=2, min_width=300
            )
            self.run = gr.Dropdown(ids, value=ids[0] if ids else None, label="Run", elem_id="lze-run", scale=1)
        with gr.Row(visible=False, elem_classes="lze-controls") as self.prompt_controls:
            self.search = gr.Textbox(
                label="Search", placeholder="text, column or id", elem_id="lze-search", min_width=220
            )
            self.sort = gr.Dropdown(_SORTS, value="-energy", label="Sort by", elem_id="lze-sort", min_width=230)
            self.state = gr.Radio(_STATES, value="all", label="State", elem_id="lze-state", scale=3, min_width=300)
        with gr.Row(visible=False, elem_classes="lze-controls") as self.compare_controls:
            self.runs = gr.CheckboxGroup(ids, value=ids, label="Runs", elem_id="lze-runs", scale=2, min_width=300)
            axes = [(label, name) for name, label in views.AXES.items()]
            self.axis = gr.Radio(axes, value="step", label="Over", elem_id="lze-axis", scale=2, min_width=300)
            metrics = [(label, name) for name, label in views.METRICS.items()]
            self.metric = gr.Dropdown(metrics, value="pass_rate", label="Show", elem_id="lze-metric", min_width=240)

    def _add_results(self):
        with gr.Row(elem_classes="lze-results"):
            with gr.Column(scale=3, elem_classes="lze-column"):
                self.main = gr.HTML(
                    elem_classes="lze", apply_default_css=False, elem_id="lze-main", js_on_load=_OPEN_PROMPT
                )
                with gr.Row(visible=False, elem_classes="lze-pager") as self.pager:
                    self.previous = gr.Button("← Previous", size="sm", elem_id="lze-previous")
                    self.page = gr.Number(1, label="Page", precision=0, minimum=1, container=False, elem_id="lze-page")
                    self.next = gr.Button("Next →", size="sm", elem_id="lze-next")
            with gr.Column(scale=2, elem_classes="lze-column", visible=False) as self.side:
                self.detail = gr.HTML(elem_classes="lze", apply_default_css=False, elem_id="lze-detail")
        self.prompt = gr.Textbox(visible="hidden", elem_id="lze-prompt")
        self.seen = gr.State(None)

    def _connect(self):
        self.controls = [
            self.view,
            self.run,
            self.state,
            self.search,
            self.sort,
            self.page,
            self.prompt,
            self.runs,
            self.axis,
            self.metric,
        ]
        shown = [
            self.main,
            self.detail,
            self.side,
            self.prompt_controls,
            self.compare_controls,
            self.pager,
            self.page,
            self.run,
            self.seen,
        ]
        quiet = {"show_progress": "hidden", "api_visibility": "private"}
        load = gr.on(None, self._restore, None, self.controls, **quiet)
        load.then(self._show, self.controls, shown, **quiet)
        # A change shows the first page again, except that of the page or the prompt
        for control in (self.state, self.search, self.sort, self.run):
            control.input(self._first_page, None, [self.page, self.prompt], trigger_mode="always_last", **quiet).then(
                self._show, self.controls, shown, js=_WRITE_ADDRESS, **quiet
            )
        for control in (self.view, self.runs, self.axis, self.metric, self.page):
            control.input(self._show, self.controls, shown, js=_WRITE_ADDRESS, trigger_mode="always_last", **quiet)
        self.main.click(self._open, None, self.prompt, **quiet).then(
            self._show, self.controls, shown, js=_WRITE_ADDRESS, **quiet
        )
        for button, change in ((self.previous, -1), (self.next, 1)):
            button.click(
                lambda page, change=change: max(1, int(page or 1) + change), self.page, self.page, **quiet
            ).then(self._show, self.controls, shown, js=_WRITE_ADDRESS, **quiet)
        timer = gr.Timer(REFRESH_SECONDS)
        timer.tick(self._follow, [self.seen, *self.controls], shown, **quiet)

    def _first_page(self) -> tuple[int, str]:
        return 1, ""

    def _open(self, event: gr.EventData) -> str:
        prompt_id = views.parse_prompt_id(str(event._data.get("prompt", "")))
        return "" if prompt_id is None else str(prompt_id)

    def _restore(self, request: gr.Request) -> list[Any]:
        """Values of the controls from the address, each checked against what it may be."""
        given = dict(request.query_params)
        ids = self.book.ids
        allowed = {
            "tab": VIEWS,
            "run": ids,
            "state": [value for _, value in _STATES],
            "sort": [value for _, value in _SORTS],
            "axis": list(views.AXES),
            "metric": list(views.METRICS),
        }
        values = {**_DEFAULTS, "run": ids[0] if ids else None, "runs": ids}
        for name, choices in allowed.items():
            if given.get(name) in choices:
                values[name] = given[name]
        values["q"] = given.get("q", "")
        values["at"] = int(given["at"]) if given.get("at", "").isdecimal() else 1
        values["prompt"] = given.get("prompt", "")
        if "runs" in given:
            values["runs"] = [id for id in given["runs"].split(",") if id in ids]
        return [values[name] for name in _PARAMETERS]

    def _version(self, view: str, run: str, runs: list[str]) -> Any:
        """Changes when one of the runs on the page has recorded something."""
        versions = []
        for id in runs if view == "Compare" else [run]:
            try:
                versions.append(hash(self.book.open(id).version))
            except TelemetryError as error:
                versions.append(str(error))
        return versions

    def _follow(self, seen: Any, *values: Any) -> Any:
        given = dict(zip(_PARAMETERS, values, strict=True))
        if seen is not None and self._version(given["tab"], given["run"], given["runs"]) == seen:
            return [gr.skip()] * 9
        return self._show(*values)

    def _show(self, *values: Any) -> list[Any]:
        given = dict(zip(_PARAMETERS, values, strict=True))
        view = given["tab"] if given["tab"] in VIEWS else VIEWS[0]
        version = self._version(view, given["run"], given["runs"])
        main, detail, pages = "", "", 1
        try:
            if view == "Compare":
                axis = given["axis"] if given["axis"] in views.AXES else "step"
                metric = given["metric"] if given["metric"] in views.METRICS else "pass_rate"
                main = views.compare(self.book, [id for id in self.book.ids if id in given["runs"]], axis, metric)
            elif view == "Prompts":
                main, detail, pages = self._prompts(given)
            else:
                main = views.overview(self.book.open(given["run"]))
        except TelemetryError as error:
            main = views.problem(error)
        return [
            main,
            detail,
            gr.update(visible=view == "Prompts"),
            gr.update(visible=view == "Prompts"),
            gr.update(visible=view == "Compare"),
            gr.update(visible=view == "Prompts" and pages > 1),
            pages if view == "Prompts" and (given["at"] or 1) > pages else gr.skip(),
            gr.update(visible=view != "Compare"),
            version,
        ]

    def _prompts(self, given: dict[str, Any]) -> tuple[str, str, int]:
        run = self.book.open(given["run"])
        state = given["state"] if given["state"] in views.STATE_LABELS else "all"
        sort = given["sort"] if str(given["sort"]).lstrip("-") in SORT_COLUMNS else "-energy"
        chosen = str(given["prompt"] or "")
        page = int(given["at"] or 1) - 1
        table, pages = views.prompt_table(run, state, str(given["q"] or ""), sort, page, chosen)
        return table, views.prompt_detail(run, chosen), pages


# A row of the table is a button with the prompt's id, which does not fit into a JavaScript number
_OPEN_PROMPT = """
element.addEventListener("click", (event) => {
  const button = event.target.closest("[data-prompt]");
  if (!button) return;
  trigger("click", { prompt: button.dataset.prompt });
  if (window.innerWidth < 1000) document.getElementById("lze-detail").scrollIntoView({ behavior: "smooth" });
});
"""

_WRITE_ADDRESS = "(...values) => window.lzeWriteAddress(values)"
