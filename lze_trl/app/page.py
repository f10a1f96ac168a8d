"""The app: one page that follows the runs while they train, made of Gradio's own components and Plotly's charts."""

import json
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import gradio as gr
from plotly.graph_objects import Figure
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from ..record import Run, TelemetryError
from ..record.curves import evaluated
from ..record.numbers import percent
from ..record.reader import STATES
from . import charts, profile, views
from .runs import RunBook


TABS = ("Overview", "Prompts", "Runs", "Compare", "Settings")
_LOCAL = ("127.0.0.1", "localhost", "::1", "[::1]")
_REFRESH_SECONDS = 1.0  # after which the page asks for what is new, if there was something the last time
_IDLE_SECONDS = 8.0  # the same, if there was nothing
_METRICS = [(label, name) for name, label in charts.METRICS.items()]
_FIRST_METRICS = list(charts.METRICS)[:4]  # by which runs are compared, unless others are chosen
_VISITS = 12  # latest visits of a prompt whose completions can be chosen
_IN_ADDRESS = ("run", "tab", "prompt", "search")
_LATEST = "the latest visit", ""
_ANY = "any value", ""
_WAITS = "A prompt that is found is shown here, with its history."


def serve(runs: list[str], host: str, port: int | None) -> gr.Blocks:
    """Start the app, and serve it until interrupted; see [`~lze_trl.app.launch`]."""
    with gr.Blocks(title="Learning-Zone Energy", analytics_enabled=False, fill_width=True) as app:
        profiles, others = profile.sort_out(runs)
        for folder in profiles:
            profile.show(folder, _html, _charts, opened=not others)
        if others or not profiles:
            _Page(RunBook(others))
    # Seconds, where Gradio has 1 and 10 ms, which take 4 % of a core
    app._queue.sleep_when_free, app._queue.progress_update_sleep_when_free = 0.1, 1.0
    app.launch(
        server_name=host,
        server_port=port,
        # Fonts of the reader's machine: the page asks no other server for anything
        theme=gr.themes.Base(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]),
        head=f"""<style>{_file("style.css")}</style>
            <script defer src="gradio_api/file={charts.PLOTLY}"></script>""",
        allowed_paths=[str(charts.PLOTLY)],
        # A page of another name that leads to this machine (DNS rebinding) gets no answer; elsewhere, names are not known
        app_kwargs={"middleware": [Middleware(TrustedHostMiddleware, allowed_hosts=_LOCAL)] if host in _LOCAL else []},
        max_file_size=0,  # nothing on the page uploads a file
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


def _file(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _html(id: str, **settings: Any) -> gr.HTML:
    return gr.HTML(
        elem_classes="lze", elem_id=f"lze-{id}", js_on_load=_file("tables.js"), apply_default_css=False, **settings
    )


def _charts(**settings: Any) -> gr.HTML:
    """Show the figures of [`_shown`], side by side where the page is wide enough."""
    return gr.HTML(
        html_template='<div class="lze-grid"></div>', js_on_load=_file("charts.js"), elem_classes="lze", **settings
    )


def _shown(*figures: Figure) -> str:
    """Write figures as JSON."""
    return f"[{','.join(str(figure.to_json()) for figure in figures)}]"


class _Page:
    """Components, and the handlers that fill them."""

    def __init__(self, book: RunBook):
        self.book = book
        ids = book.ids
        with gr.Row(elem_id="lze-head"):
            with gr.Column(scale=3, min_width=280):
                self.standing = _html("standing")
            # Disabled until `_begin` has answered, since its answer would replace an earlier choice
            self.run = gr.Dropdown(ids, value=None, label="Run", elem_id="lze-run", min_width=200, interactive=False)
            self.live = gr.Checkbox(True, label="Live", min_width=100, scale=0)
        self.address = gr.HTML(html_template="<i></i>", js_on_load=_file("address.js"), elem_id="lze-address")
        self.tab = gr.State(TABS[0])
        self.prompt = gr.State("")
        # The prompt that is shown while none is chosen. The page alone sets it, so that a refresh never undoes a choice
        self.first = gr.State("")
        self.orders = gr.State({})  # by the id of a table, see [`views.table`]
        self.held = gr.State([])  # prompts whose order stays, as the pointer is over them
        self.seen, self.drawn = gr.State(None), gr.State(None)  # what page and charts show, as of [`_version`]
        with gr.Tabs(elem_id="lze-tabs", overflow_behavior="wrap") as self.pages:
            self.tabs = [gr.Tab(name, id=name) for name in TABS]
        overview, prompts, runs, compare, settings = self.tabs
        with overview:
            self.cards = _html("overview")
            self.flow, self.plots = _charts(elem_id="lze-flow"), _charts(elem_id="lze-plots")
            self.stuck, self.costs = _html("stuck-prompts"), _html("cost")
            with gr.Accordion("What other strategies would cost", open=False):
                self.ask = gr.Button("Forecast from what this run has recorded", size="sm")
                self.forecast = _html("forecast")
        with prompts:
            self._add_prompts()
        with runs:
            self.words = gr.Textbox(label="Search", placeholder="words of a row", elem_id="lze-words")
            self.run_table = _html("run-table")
        with compare:
            self._add_comparison(ids)
        with settings:
            self.named = gr.Textbox(label="Search", placeholder="words of a row", elem_id="lze-named")
            self.settings = _html("settings")
        self._connect()

    def _add_prompts(self):
        with gr.Row():
            self.search = gr.Textbox(
                label="Search", placeholder="text, column, id, or source=gsm8k", elem_id="lze-search", min_width=240
            )
            states = [("all", "all"), *((views.LABELS.get(state, state), state) for state in STATES)]
            self.state = gr.Dropdown(states, value="all", label="State", elem_id="lze-state", min_width=100)
            self.column = gr.Dropdown([_ANY], value="", label="Column", elem_id="lze-column", min_width=100)
        with gr.Row(elem_id="lze-panes"):
            with gr.Column(scale=3, min_width=320):
                self.table = _html("prompt-table")
                self.scatter = _charts(elem_id="lze-scatter")
            with gr.Column(scale=2, min_width=320):
                self.detail = _html("detail", value=_WAITS)
                self.history = _charts(elem_id="lze-history")
                self.visit = gr.Dropdown(
                    [_LATEST], value="", label="Completions at", visible=False, elem_id="lze-visit"
                )
                self.completions = _html("completions")

    def _add_comparison(self, ids: list[str]):
        self.runs = gr.Dropdown(ids, value=[], multiselect=True, label="Runs", elem_id="lze-compared")
        with gr.Row():
            self.metrics = gr.Dropdown(
                _METRICS, value=_FIRST_METRICS, multiselect=True, label="Show", elem_id="lze-metrics"
            )
            self.smoothing = gr.Slider(0.0, 0.99, 0.0, step=0.01, label="Smoothing")
            self.axis = gr.Radio([(label, name) for name, label in charts.AXES.items()], value="step", label="Over")
        self.comparisons = _charts(elem_id="lze-comparisons")
        self.differing = _html("differences")

    def _connect(self):
        names = "tab run orders smoothing search state prompt first visit words named runs metrics axis held"
        self.controls = {name: getattr(self, name) for name in names.split()}
        controls = list(self.controls.values())
        chosen = {*controls, self.live, self.ask, self.forecast} - {self.first, self.visit, self.metrics}
        components = [part for part in vars(self).values() if isinstance(part, gr.components.Component)]
        shown = [part for part in components if part not in chosen]
        # One after the other: the answer to an earlier question never replaces that to a later one
        quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private", "concurrency_id": "page"}
        show: dict[str, Any] = {"fn": self._show, "inputs": controls, "outputs": shown, **quiet}
        drawn = [self.drawn, self.flow, self.plots, self.stuck, self.costs]
        draw = {"fn": self._draw, "inputs": [self.seen, self.drawn, self.tab, self.run], "outputs": drawn, **quiet}

        self.seen.change(**draw)
        begun = [*shown, self.run, self.runs, self.prompt, self.search]
        gr.on(None, self._begin, None, begun, **quiet)
        for tab in self.tabs:
            tab.select(lambda name=tab.label: name, None, self.tab, **quiet).then(**show)
        for name, control in self.controls.items():
            if name not in ("tab", "run", "orders", "prompt", "first", "visit", "held"):
                control.input(trigger_mode="always_last", **show)
        of_prompt = [self.prompt, self.visit]
        self.run.input(lambda: ("", ""), None, of_prompt, **quiet).then(**show)
        self.run.change(self._offer_forecast, self.run, [self.forecast, self.ask], **quiet)
        for part in (self.table, self.run_table):
            part.select(self._sort, self.orders, [self.orders, self.held], **quiet).then(**show)
        self.column.input(self._filter, [self.run, self.search, self.column], self.search, **quiet).then(**show)
        for event in (self.table.focus, self.table.blur):
            event(self._hold, None, self.held, **quiet)
        for part in (self.table, self.scatter):
            part.click(self._open_prompt, None, of_prompt, **quiet).then(**show)
        tabs = [self.tab, self.pages]
        self.cards.click(self._open_advised, None, [self.state, self.search, self.named, *tabs], **quiet).then(**show)
        self.flow.click(self._open_state, None, [self.state, *tabs], **quiet).then(**show)
        self.costs.click(self._open_state, None, [self.search, *tabs], **quiet).then(**show)
        self.stuck.click(self._open_listed, None, [*of_prompt, *tabs], **quiet).then(**show)
        self.run_table.input(self._tick, self.runs, self.runs, **quiet).then(**show)
        self.run_table.click(self._open_run, None, [self.run, *tabs, *of_prompt], **quiet).then(**show)
        self.visit.input(self._show_visit, [self.run, self.prompt, self.first, self.visit], shown, **quiet)
        self.timer = gr.Timer(_REFRESH_SECONDS)
        self.timer.tick(self._follow, [self.seen, *controls], [*shown, self.timer], **quiet)
        self.live.input(lambda live: gr.Timer(active=live), self.live, self.timer, **quiet)
        self.ask.click(self._forecast, self.run, self.forecast, api_visibility="private")

    def _sort(self, orders: dict[str, str], event: gr.EventData) -> tuple[dict[str, str], list[str]]:
        return orders | {event.table: event.sort}, []

    def _filter(self, id: str, search: str, chosen: str) -> str:
        """Search for the value of a column that was chosen, in place of another one, beside the other words."""
        others = [word for word in search.split() if word not in self.book.open(id).column_words()]
        return " ".join([*others, *([chosen] if chosen else [])])

    def _hold(self, event: gr.EventData) -> list[str]:
        return list(event.rows)

    def _open_prompt(self, event: gr.EventData) -> tuple[str, str]:
        return event.row, ""

    def _open_listed(self, event: gr.EventData) -> tuple[Any, ...]:
        return event.row, "", TABS[1], gr.Tabs(selected=TABS[1])

    def _tick(self, runs: list[str], event: gr.EventData) -> Any:
        ticked = [run for run in runs if run != event.run] + [event.run] * event.ticked
        return gr.update(choices=self.book.ids, value=ticked)

    def _open_state(self, event: gr.EventData) -> tuple[Any, ...]:
        return event.row, TABS[1], gr.Tabs(selected=TABS[1])

    def _open_advised(self, event: gr.EventData) -> tuple[Any, ...]:
        """Open what a sentence of advice is about, see [`~views.cards`]."""
        target = {"state": "all", "search": "", "named": ""} | json.loads(event.row)
        return target["state"], target["search"], target["named"], target["tab"], gr.Tabs(selected=target["tab"])

    def _open_run(self, event: gr.EventData) -> tuple[Any, ...]:
        return gr.update(choices=self.book.ids, value=event.row), TABS[0], gr.Tabs(selected=TABS[0]), "", ""

    def _offer_forecast(self, id: str) -> tuple[Any, Any]:
        """Remove the forecast of the run before, and show the button for one if the recording of this run can answer."""
        with suppress(TelemetryError):
            return "", gr.update(visible=self.book.open(id).meta.settings.get("controller", "uniform") == "uniform")
        return "", gr.update(visible=False)

    def _forecast(self, id: str) -> Any:
        from ..forecast import forecast
        from ..forecast.recorded import sample_of_folder

        try:
            return views.forecast(forecast(sample_of_folder(self.book.open(id).directory)))
        except (TelemetryError, ValueError) as error:
            return views.HTML.problem(error)

    def _begin(self, request: gr.Request) -> dict[Any, Any]:
        """Look for runs that have begun since the app was started, and show what the address names, by default the latest run."""
        self.book.look()
        ids, asked = self.book.ids, dict(request.query_params)
        run = asked.get("run") if asked.get("run") in ids else self.book.latest
        if asked.get("run") not in (None, run):
            gr.Warning("The run of this address is not here. This is the latest one.")
        prompt = asked.get("prompt", "") if re.fullmatch(r"-?\d{1,19}", asked.get("prompt", "")) else ""
        chosen = {"run": run, "prompt": prompt, "search": asked.get("search", ""), "runs": ids[:8]}
        given = {name: part.value for name, part in self.controls.items()} | chosen
        begun = {self.controls[name]: value for name, value in chosen.items()}
        begun |= {part: gr.update(choices=ids, value=begun[part], interactive=True) for part in (self.run, self.runs)}
        return begun | self._show(*given.values())

    def _version(self, given: dict[str, Any]) -> list[Any]:
        """Return what changes with the controls, and when a run on the page has recorded or evaluated something, or ended."""
        own = {name: value for name, value in given.items() if name not in ("prompt", "first", "visit", "held")}
        versions: list[Any] = [own]
        for id in {"Runs": self.book.ids, "Compare": given["runs"]}.get(given["tab"], [given["run"]]):
            try:
                versions.append(views.version(self.book.open(id)))
            except TelemetryError as error:
                versions.append(str(error))
        return versions

    def _is_loading(self, given: dict[str, Any]) -> bool:
        """Tell whether `_begin` has still to show the run of the address."""
        return not given["run"] and bool(self.book.ids)

    def _follow(self, seen: list[Any] | None, *values: Any) -> Any:
        given = dict(zip(self.controls, values, strict=True))
        if seen is None or self._is_loading(given):
            return gr.skip()
        if given["tab"] == "Runs":
            self.book.look()
        if self._version(given) != seen:
            return self._show(*values) | {self.timer: gr.Timer(_REFRESH_SECONDS)}
        changes: dict[Any, Any] = {self.timer: gr.Timer(_IDLE_SECONDS)}
        with suppress(TelemetryError):
            if given["tab"] not in ("Runs", "Compare"):
                changes[self.standing] = views.standing(self.book.open(given["run"]))  # says how long ago
        return changes

    def _draw(self, seen: list[Any] | None, drawn: list[Any] | None, tab: str, id: str) -> Any:
        """Draw the charts of the overview, which take longer than its cards, if what they show has changed."""
        if tab != TABS[0] or seen == drawn:
            return gr.skip()
        nothing = dict.fromkeys((self.flow, self.plots, self.stuck, self.costs), "")
        with suppress(TelemetryError):
            run = self.book.open(id)
            if figures := charts.overview(run):  # none before the first batch
                figures[0].update_layout(title_text="Prompts by their state: click to list them")
                shown = {self.flow: _shown(figures[0]), self.plots: _shown(*figures[1:])}
                told = views.evaluations(run) + views.by_value(run, charts.by_value)
                nothing |= shown | {self.stuck: views.stuck(run), self.costs: told}
        return {self.drawn: seen} | nothing

    def _show(self, *values: Any) -> Any:
        """Return what changes on the page, by component: only the open tab."""
        given = dict(zip(self.controls, values, strict=True))
        if self._is_loading(given):
            return gr.skip()
        address = json.dumps({name: given[name] for name in _IN_ADDRESS})
        changes: dict[Any, Any] = {self.seen: self._version(given), self.address: address}
        try:
            if given["tab"] in ("Runs", "Compare"):
                return changes | self._show_runs(given)
            run = self.book.open(given["run"])
            changes[self.standing] = views.standing(run)
            if given["tab"] == "Overview":
                changes[self.cards] = views.cards(run, charts.sparkline(run).to_json())
            elif given["tab"] == "Prompts":
                changes |= self._show_prompts(run, given)
            else:
                changes[self.settings] = views.settings(run, given["named"])
        except TelemetryError as error:
            changes |= {self.standing: views.HTML.problem(error), self.cards: ""}
        return changes

    def _show_prompts(self, run: Run, given: dict[str, Any]) -> dict[Any, Any]:
        state, search = None if given["state"] == "all" else given["state"], given["search"] or ""
        order, words = given["orders"].get(views.PROMPTS, ""), run.column_words()
        found = run.prompts(state, search, views.MOST_PROMPTS, order=views.prompt_order(order))
        if held := {id: place for place, id in enumerate(given["held"])}:
            places = found["prompt_id"].astype(str).map(held)
            found = found.loc[places.sort_values(kind="stable", na_position="last").index]
        counts = run.prompt_counts(search)
        total = counts[state] if state else sum(counts.values())
        ids = found["prompt_id"].astype(str).tolist()
        first = given["first"] if given["first"] in ids else next(iter(ids), "")
        opened = given["prompt"] if given["prompt"] and ids else first
        return {
            self.first: first,
            self.column: gr.update(
                choices=[_ANY, *words], value=next((word for word in words if word in search.split()), "")
            ),
            self.scatter: _shown(charts.prompts(run, found)) if ids else "",
            self.table: views.prompts(run, found, total, order, opened, search),
        } | self._show_prompt(given["run"], opened, given["visit"])

    def _show_visit(self, id: str, chosen: str, first: str, visit: str) -> dict[Any, Any]:
        return self._show_prompt(id, chosen or first, visit)

    def _show_prompt(self, id: str, chosen: str, visit: str) -> dict[Any, Any]:
        if not chosen:
            nothing = {self.history: "", self.visit: gr.update(visible=False)}
            return {self.detail: _WAITS, self.completions: "", **nothing}
        run, prompt_id = self.book.open(id), int(chosen)
        visits = run.sql(
            """SELECT generation, step + 1 AS step, avg(outcome) AS outcome FROM completions WHERE prompt_id = ?
            GROUP BY ALL ORDER BY generation DESC LIMIT ?""",
            [prompt_id, _VISITS],
        )
        choices = [(f"step {row.step}: {percent(row.outcome)}", str(row.generation)) for row in visits.itertuples()]
        return {
            self.history: _shown(charts.history(run, prompt_id)),
            self.visit: gr.update(choices=[_LATEST, *choices], value=visit, visible=not visits.empty),
            self.detail: views.prompt_detail(run, prompt_id),
            self.completions: views.completions(run, prompt_id, int(visit) if visit else None),
        }

    def _show_runs(self, given: dict[str, Any]) -> dict[Any, Any]:
        runs, problems, order = {}, [], given["orders"].get("runs", "-started")
        for id in self.book.ids if given["tab"] == "Runs" else given["runs"]:
            try:
                runs[id] = self.book.open(id)
                views.run_row(runs[id])  # fails here for one that cannot be read
            except TelemetryError as error:
                problems.append(f"{id}: {error}")
                runs.pop(id, None)
        changes: dict[Any, Any] = {self.standing: views.HTML.heading(given["tab"], " ".join(problems))}
        if given["tab"] == "Runs":
            table = views.run_table(runs, given["words"], order)
            return changes | {self.run_table: views.runs_table(table, order, given["run"], given["runs"])}
        logged = {name for run in runs.values() for name in run.sql("SELECT DISTINCT name FROM steps")["name"]}
        tasks = {name for run in runs.values() for name in evaluated(run)}
        figures = [charts.comparison(runs, given["axis"], name, given["smoothing"]) for name in given["metrics"]]
        return changes | {
            self.comparisons: _shown(*(figure for of_metric in figures for figure in of_metric)),
            self.metrics: gr.update(choices=[*_METRICS, *sorted((tasks | logged) - {*charts.METRICS})]),
            self.differing: views.differences(runs),
        }
