"""What the app and the report say about a run: its numbers and tables, as escaped HTML or data frames."""

import json
import re
from collections.abc import Callable, Collection
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from pandas.api.types import is_float_dtype, is_integer_dtype, is_numeric_dtype
from tqdm import tqdm

from ..record import Run, curves
from ..record.cards import cards as cards_of
from ..record.causes import CAUSES
from ..record.curves import HELD_OUT, curve
from ..record.evaluations import RESULT_FILES, results_table
from ..record.ledger import against_plain
from ..record.numbers import ago, fixed, number, percent
from ..record.schema import Status
from .meanings import MEANINGS


if TYPE_CHECKING:  # it needs torch, and the app does not
    from ..forecast import Forecast

_SHORT = 120  # characters of a prompt in a row: those that begin alike may end differently
LABELS = {"hopeless": "no signal"}
"""States that are shown by another name than that of [`~lze_trl.record.reader.STATES`]."""
MOST_PROMPTS, MOST_ROWS = 2000, 200
"""Prompts that the chart, and the table, show at most: the first ones in the order of the table."""

_CODE = re.compile("`([^`]+)`")
_SETTING = re.compile(r"`(\w+)(?=[`: ])")
_OF_VALUE = re.compile(r"`([\w.-]+) = ([^`]+)` took ")  # as [`~lze_trl.names.label`] writes column and value
_TURN = re.compile(r"(?:^|\n\n)\[(system|user|assistant|tool)\]\n")  # as the recorder writes messages

# Beginnings of settings that do not describe the experiment: where a run writes, what it logs, where its servers are
_INCIDENTAL = (
    *("output_dir", "run_name", "project", "report_to", "push_to_hub", "hub_", "log", "num_completions_to_print"),
    *("save_", "telemetry", "trackio_", "summary", "disable_tqdm", "vllm_server_", "vllm_group_port", "local_rank"),
    *("resume_from_checkpoint", "eval_on_start", "ignore_data_skip", "command"),
)
# Set by transformers or TRL from other settings, or by the machine
_DERIVED = (
    *("do_", "generation_batch_size", "dataloader_pin_memory", "use_cpu", "activation_checkpointing"),
    *("steps_per_generation", "pad_to_multiple_of"),
)
_MADE_OF = ("model", "model_name_or_path", "datasets", "rewards", "versions", "commit", "command", "recorded by")
_ANSWERS = ("answer", "solution", "ground_truth")  # columns that may hold the answer of a prompt

_environment = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
)
_environment.filters |= {"number": number, "percent": percent, "ago": ago}
_environment.filters["code"] = lambda text: Markup(_CODE.sub(r"<code>\1</code>", str(escape(text))))
_environment.globals |= {"zip": zip, "meanings": MEANINGS, "passes": curves.PASSES}

HTML: Any = _environment.get_template("pages.html").module
"""The macros of `pages.html`, as functions that return `Markup`. They escape every value."""


def cards(run: Run, sparkline: str = "") -> Markup:
    """Say whether the run learns, what it wastes and what it saves, with the most severe advice. In the app, `sparkline` is a figure of its reward as JSON, and advice has links."""
    found = cards_of(run)
    if not found:
        return HTML.problem("The run has started, and its first batch is not scored yet.")
    lines = Status.read(run.directory).advice
    return HTML.cards(found, sparkline, [(line, _targets(run, line) if sparkline else {}) for line in lines])


def _targets(run: Run, advice: str) -> dict[str, dict[str, str]]:
    """Find what a sentence of advice is about. Returns what its links say, with the tab, and the state or search, that each opens."""
    found = {}
    if of_value := _OF_VALUE.match(advice):
        found["these prompts"] = {"tab": "Prompts", "search": "=".join(of_value.groups())}
    elif states := [name for name in ("solved", "hopeless") if f"with this cause: {CAUSES[name]}." in advice]:
        found["these prompts"] = {"tab": "Prompts", "state": states[0]}
    names = [name for name in _SETTING.findall(advice) if name in run.meta.settings]
    return found | {name: {"tab": "Settings", "named": name} for name in names}


def evaluations(run: Run) -> Markup:
    """Tabulate the first and the last evaluation of the run; empty without one."""
    found = table("evaluations", results_table(run.directory.parent))
    return HTML.section("Evaluations", found) if found else found


def by_value(run: Run, figures: Callable[[Run, str, list[str]], list[Any]] = lambda *of: []) -> Markup:
    """Tabulate the values of columns of the data, with the `figures` of each column. A click on a row lists its prompts."""
    forms: dict[str, Callable[[Any], str]] = {"reward": fixed, HELD_OUT: fixed, "dead share": percent}
    place, grid = Markup('<div class="lze-chart" data-figure="{}"></div>'), Markup('<div class="lze-grid">{}</div>')
    shown = Markup()
    for column, rows in curves.value_tables(run).items():
        charts = [place.format(figure.to_json()) for figure in figures(run, column, rows["value"].tolist())]
        rows.index = pd.Index(f"{column}=" + rows["value"], name="search")
        listed = table(f"by-{column}", rows, forms=forms)
        shown += HTML.section(f"By {column}", listed + grid.format(Markup().join(charts)))
    return shown


def table(
    id: str,
    frame: pd.DataFrame,
    order: str | None = None,
    opened: str | None = None,
    forms: dict[str, Callable[[Any], str]] | None = None,
    changed: Collection[str] = (),
    ticked: Collection[str] | None = None,
) -> Markup:
    """
    Make a table, empty without rows. One with an `order` is sorted by a click on a heading: it names the column by which it is sorted now, the
    highest first with a `-` before it. If the index of the frame has a name, it holds the keys by which rows are opened, `opened` is that
    of the open one, and rows of keys in `changed` are marked. `forms` say how the numbers of some columns are written. With `ticked`, rows
    have a tick box, which is set for these keys.
    """
    if frame.empty:
        return Markup()
    numeric = {name: is_numeric_dtype(frame[name]) for name in frame}
    heads = [(name, is_number, _next(name, is_number, order)) for name, is_number in numeric.items()]
    usual = {
        name: number if is_float_dtype(kind) else "{:,}".format if is_integer_dtype(kind) else _shown
        for name, kind in frame.dtypes.items()
    }
    cells = [frame[name].map((usual | (forms or {}))[name]) for name in frame]
    keys = frame.index if frame.index.name else [None] * len(frame)
    return HTML.table(id, heads, order, zip(keys, zip(*cells, strict=True), strict=True), opened, changed, ticked)


def _next(name: str, is_number: bool, order: str | None) -> str | None:
    """Return the order that a click on a heading asks for: numbers begin with the highest; another click turns it round."""
    if order is None:
        return None
    return name if order == f"-{name}" or (not is_number and order != name) else f"-{name}"


def standing(run: Run) -> Markup:
    """Say which run it is, whether it is training, and how to go on with one that stopped before its end."""
    status, known = run.status(), run.meta.settings
    size, count = known.get("num_generations"), known.get("train_prompts")
    drawn = f"{f'{count:,} prompts' if count else 'prompts'} × {size} completions" if size else ""
    facts = [known.get("strategy"), _model(run), drawn]
    checkpoints = [path.name for path in run.directory.parent.glob("checkpoint-*") if path.name[11:].isdecimal()]
    stopped = status["state"] in ("crashed", "failed", "interrupted")
    latest = max(checkpoints, key=lambda name: int(name[11:]), default="")
    left = Status.read(run.directory).waits_for or _left(status)
    return HTML.standing(run.name, " · ".join(str(fact) for fact in facts if fact), status, left, stopped, latest)


def _model(run: Run) -> str:
    name = run.meta.settings.get("model") or run.meta.settings.get("model_name_or_path") or ""
    return str(name).rstrip("/").rpartition("/")[2]


def _left(status: dict[str, Any]) -> str:
    return "" if status["seconds_left"] is None else f"{tqdm.format_interval(status['seconds_left'])} left"


def settings(run: Run, search: str = "") -> Markup:
    """Tabulate the settings that have every word of `search`, by topic; without a search, also what the run was made of and what is no default."""
    known, own = run.meta.known, run.meta.settings
    topics = list(dict.fromkeys(topic for topic, _ in known.values()))[::-1]  # those of this package first
    names = [name for name in known if name in own]
    names.sort(key=lambda name: (name != "strategy", topics.index(known[name][0])))
    names += sorted(own.keys() - known.keys())
    usual = {name: known.get(name, [known.get(name.partition(".")[0], [""])[0], None]) for name in names}
    rows = [[name, _shown(own[name]), _shown(usual[name][1]), usual[name][0]] for name in names]
    every = pd.DataFrame(rows, columns=["setting", "value", "default", "topic"])
    differs = every["setting"].isin(known) & (every["value"] != every["default"])
    differs &= ~every["setting"].str.startswith(_INCIDENTAL + _DERIVED)
    parts = Markup()
    if not search:
        parts += _made_of(run) + HTML.section("What differs from the defaults", table("changed", every[differs]))
    return parts + HTML.section("All settings, by topic", table("settings-all", _with_words(every, search)))


def _with_words(frame: pd.DataFrame, search: str) -> pd.DataFrame:
    """Return the rows that have every word of `search`."""
    texts = [" ".join(map(_shown, row)).lower() for row in frame.itertuples(index=False)]
    return frame[[all(word in text for word in search.lower().split()) for text in texts]]


def _made_of(run: Run) -> Markup:
    """Tabulate the model, the data, the rewards and the software of a run, as far as they were recorded."""
    own, names = run.meta.settings, run.meta.reward_names
    weights = own.get("reward_weights") or [1.0] * len(names)
    weighted = (f"{name}{f' (weight {w:g})' * (w != 1)}" for w, name in zip(weights, names, strict=False))
    facts = own | {"rewards": ", ".join(weighted), "recorded by": f"lze_trl {run.meta.package_version}"}
    rows = [[name.replace("_", " "), _shown(facts[name])] for name in _MADE_OF if _shown(facts.get(name)) != "–"]
    return HTML.section("This run", table("made-of", pd.DataFrame(rows, columns=["what", "value"])))


def _shown(value: Any) -> str:
    """Write a value as it reads in a recipe, a dash for none."""
    if value is None or value != value or value in ("", "None") or value == []:
        return "–"
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def run_table(runs: dict[str, Run], search: str = "", order: str = "") -> pd.DataFrame:
    """List the runs that have every word of `search` in their row, in the `order` of a [`table`]: strategy, standing, accuracy and cost."""
    rows = {id: {"run": id} | run_row(run) for id, run in runs.items()}
    frame = pd.DataFrame(rows.values(), columns=None if rows else ["run", "step"], index=pd.Index(rows, name="run id"))
    if (column := order.removeprefix("-")) in frame:
        frame = frame.sort_values(column, ascending=column == order, kind="stable")
    return _with_words(frame, search)


def runs_table(frame: pd.DataFrame, order: str, opened: str | None, compared: Collection[str] = ()) -> Markup:
    """Show the frame of [`run_table`], with ticks for the runs that are compared, without the numbers that only [`differences`] shows."""
    parts = [name for name in frame if name.startswith(("reward: ", HELD_OUT)) and name not in _RUN_FORMS]
    shown = [name for name in frame if name not in (*parts, "of", "seconds", "trained on")]
    steps = [f"{row.step:,}{f' of {row.of:,}' * bool(row.of)}" for row in frame.itertuples()]
    forms = {name: form for name, form in _RUN_FORMS.items() if name in shown}
    return table("runs", frame.assign(step=steps)[shown], order, opened, forms, ticked=compared)


def version(run: Run) -> tuple:
    """Return what changes when a run has recorded or evaluated something, or ended."""
    evaluations = sorted((str(path), path.stat().st_mtime_ns) for path in run.directory.parent.glob(RESULT_FILES))
    status = Status.read(run.directory)
    return hash(run.version), status.state, status.waits_for, *evaluations


def differences(runs: dict[str, Run]) -> Markup:
    """Say where runs reached the same score, and tabulate their numbers at the end and the settings that differ."""
    told = "Choose two runs or more that are judged by the same reward, to see what the same score has cost each."
    if (found := curves.reached(runs)) is not None:
        name, level, places = found
        costs = (f"by {id} after {number(tokens)} tokens (step {step:,})" for id, (step, tokens) in places.items())
        told = f"{name} {(percent if curves.is_share(name) else fixed)(level)} is reached {', '.join(costs)}."
        told = told if places else f"No {name} above that of their start was reached by all of these runs."
    heading = "Values at the end, and their difference from the first run"
    ends = HTML.section(heading, table("final", final_values(runs)))
    differing = HTML.section("Settings that differ", table("differing", differing_settings(runs)))
    return HTML.section("The same score", HTML.note(told)) + ends + differing


def final_values(runs: dict[str, Run]) -> pd.DataFrame:
    """Set the numbers of [`run_row`] side by side, from the second run on with their difference from the first."""
    frame = pd.DataFrame({id: run_row(run) for id, run in runs.items()})
    numbers = [name for name in frame.index if name != "of" and not any(isinstance(v, str) for v in frame.loc[name])]
    shown = []
    for name in numbers:
        form = fixed if name.startswith((HELD_OUT, "reward: ")) else _RUN_FORMS.get(name, number)
        first, *others = frame.loc[name].astype(float)
        changes = [(value, value - first, "+" if value > first else "−" if value < first else "±") for value in others]
        told = [form(value) + f" ({sign}{form(abs(by))})" * (by == by) for value, by, sign in changes]
        shown.append([name, form(first), *told])
    return pd.DataFrame(shown, columns=["at the end", *runs])


_RUN_FORMS: dict[str, Callable[[Any], str]] = {
    **dict.fromkeys(("dead", "stopped", "trained on"), percent),
    **dict.fromkeys(("reward", "best reward", "cost ×", f"{HELD_OUT} accuracy", f"{HELD_OUT} reward"), fixed),
    "wall time": lambda seconds: tqdm.format_interval(seconds) if seconds == seconds else "–",
}


def run_row(run: Run) -> dict[str, Any]:
    """Return the row of a run, which is looked up once for each [`version`] of it."""
    return _run_row(run, version(run))


@lru_cache(maxsize=1024)
def _run_row(run: Run, version: tuple) -> dict[str, Any]:
    summary, points, status = run.summary(), curve(run), run.status()
    left = "waits for servers" if Status.read(run.directory).waits_for else _left(status)
    last = points.iloc[-1] if len(points) else dict.fromkeys(points, np.nan)
    works = {work.name: work.ratio for work in against_plain(summary["ledger"])}
    groups, known = max(summary["groups"], 1), curves.evaluated(run)
    run.close()  # of hundreds of runs, only those on the page are open
    times = run.sql("SELECT min(time) AS first, max(time) AS last FROM generations").iloc[0]
    reward, parts = curves.main_reward(run), curves.reward_curves(run)
    return {
        "strategy": run.meta.settings.get("strategy", "–"),
        "state": f"{status['state']}, {left}" if left else status["state"],
        "step": summary["steps"],
        "of": int(status["max_steps"] or 0),
        **{name: float(line.iloc[-1]) for name, line in known.items()},
        "reward": curves.last_fifth(reward)[0],
        **{f"reward: {name}": curves.last_fifth(parts[name].dropna())[0] for name in parts if len(parts.columns) > 1},
        "best reward": float(reward.max()),
        "dead": summary["dead"] / groups,
        "stopped": summary["stopped"] / groups,
        "trained on": summary["selected"] / groups,
        "tokens": float(last["tokens"]),
        "seconds": float(last["seconds"]),
        "cost ×": works.get("total", np.nan),
        "wall time": float(times["last"] - times["first"]),
        "started": f"{datetime.fromtimestamp(times['first']):%Y-%m-%d %H:%M}" if len(points) else "–",
        "model": _model(run) or "–",
    }


def differing_settings(runs: dict[str, Run]) -> pd.DataFrame:
    """List the settings of the experiment that differ between runs, a column for each run."""
    rows = []
    for name in sorted({name for run in runs.values() for name in run.meta.settings}):
        values = [_shown(run.meta.settings.get(name)) for run in runs.values()]
        if len(set(values)) > 1 and not name.startswith(_INCIDENTAL):
            rows.append([name, *values])
    return pd.DataFrame(rows, columns=["setting", *runs])


PROMPTS = "prompts"
"""Id of the table of prompts, whose columns are those of [`Run.prompts`](lze_trl.record.Run.prompts) by other names."""
_PROMPT_COLUMNS = {
    "prompt": "text",
    "state": "state",
    "energy": "energy",
    "pass rate": "pass_rate",
    "drawn": "drawn",
    "at first visit": "first_pass_rate",
    "visits": "visits",
    "last step": "last_step",
}


def prompt_order(order: str) -> str:
    """Translate an order of the table into one of [`Run.prompts`](lze_trl.record.Run.prompts), by default the highest energy first."""
    name = order.removeprefix("-")
    column = _PROMPT_COLUMNS.get("pass rate" if name == curves.GRADED else name, "energy")
    return f"-{column}" if order.startswith("-") or not order else column


def prompt_table(run: Run, frame: pd.DataFrame) -> pd.DataFrame:
    """Shorten the rows of [`Run.prompts`](lze_trl.record.Run.prompts); the index holds their ids as text."""
    rows = frame[list(_PROMPT_COLUMNS.values())].set_axis(list(_PROMPT_COLUMNS), axis=1)
    rows["prompt"] = [short_text(row) for row in frame.to_dict("records")]
    rows["last step"] += 1
    rows["state"] = rows["state"].replace(LABELS)
    rows.index = pd.Index(frame["prompt_id"].astype(str), name="prompt id")
    return rows.rename(columns={"pass rate": curves.outcome_name(run)})


def short_text(row: dict[str, Any]) -> str:
    """Return the beginning and the end of a prompt's text, and a short answer; its id if the text is not recorded."""
    if not isinstance(row["text"], str):
        return f"prompt {row['prompt_id']}"
    text = " ".join(row["text"].split())
    text = text if len(text) <= _SHORT else f"{text[: _SHORT // 2]} … {text[-_SHORT // 2 :]}"
    columns = json.loads(row["columns"]) if isinstance(row.get("columns"), str) else {}
    answers = (str(columns[name]) for name in _ANSWERS if columns.get(name) is not None)
    answer = next((answer for answer in answers if 0 < len(answer) <= _SHORT // 4), None)
    return text if answer is None else f"{text} → {answer}"


def prompts(run: Run, frame: pd.DataFrame, total: int, order: str = "", opened: str = "", search: str = "") -> Markup:
    """Tabulate the first prompts of a frame, of `total` that were found, and mark those of the latest generation batch of a running run."""
    outcome, shown = curves.outcome_name(run), frame.head(MOST_ROWS)
    changed: Collection[str] = ()
    if run.status()["state"] == "running":
        (latest,) = run.sql("SELECT max(generation) AS latest FROM generations")["latest"]
        changed = set(shown.loc[shown["last_generation"] == latest, "prompt_id"].astype(str))
    forms: dict[str, Callable[[Any], str]] = {"energy": "{:.2f}".format, outcome: percent, "at first visit": percent}
    rows = table(PROMPTS, prompt_table(run, shown), order, opened, forms, changed)
    more = f" The first {MOST_ROWS:,} are listed: sort or search to see others." if total > MOST_ROWS else ""
    told = f"{total:,} {'prompt' if total == 1 else 'prompts'}.{more}"
    return HTML.prompts(told if total or not search else f"No prompt has all of: {search}", rows)


def prompt_detail(run: Run, prompt_id: int) -> Markup:
    """Show one prompt: its text, images and facts."""
    frame = run.prompts(prompt_id=prompt_id)
    if frame.empty:
        return HTML.problem("This run has no such prompt.")
    row = frame.iloc[0]
    facts = json.loads(row["columns"]) if isinstance(row["columns"], str) else {}
    facts |= {"drawn": row["drawn"], "visits": row["visits"], "last step": row["last_step"] + 1}
    prunes = run.meta.settings.get("pruning", "none") != "none"
    facts |= {"trained on": row["times_selected"]} | ({"re-checks": row["rechecks"]} if prunes else {})
    facts |= {curves.outcome_name(run): percent(row["pass_rate"])}
    for name in ("energy", "difficulty D", "uncertainty u", "momentum m"):
        facts[name] = f"{row[name.split()[0]]:.2f}"
    text = row["text"] if isinstance(row["text"], str) else "The text of this prompt is not recorded."
    state = LABELS.get(row["state"], row["state"]).capitalize()
    return HTML.prompt(state, turns(text), run.images(prompt_id), facts, prompt_id)


def completions(run: Run, prompt_id: int, generation: int | None = None) -> Markup:
    """
    Show completions of a prompt at a generation batch, by default the latest with recorded ones: the highest reward first, equal ones once,
    episodes turn by turn.
    """
    rows: dict[tuple, dict[str, Any]] = {}
    found = run.completions(prompt_id, generation).sort_values("reward", ascending=False, kind="stable")
    for row in found.to_dict("records"):
        same = row["completion"], str(row["rewards"]), row["completion_tokens"]
        rows.setdefault(same, row | {"turns": turns(row["completion"]), "times": 0})["times"] += 1
    latest = run.sql("SELECT max(step) AS step FROM groups WHERE prompt_id = ?", [prompt_id])["step"].iloc[0]
    return HTML.completions(list(rows.values()), run.meta, latest, curves.outcome_name(run) == curves.GRADED)


def best_and_worst(run: Run, order: str, count: int = 5) -> Markup:
    """Show the recorded completions of the last fifth of the generation batches with the highest rewards, or with `"ASC"` the lowest, each text once."""
    found = run.sql(
        f"""SELECT *, coalesce(text, '') AS prompt FROM completions
        JOIN (SELECT prompt_id, any_value(text) AS text FROM prompts GROUP BY ALL) USING (prompt_id)
        WHERE generation >= (SELECT 0.8 * max(generation) FROM generations) AND reward IS NOT NULL AND completion IS NOT NULL
        QUALIFY row_number() OVER (PARTITION BY completion ORDER BY generation DESC, prompt_id, index) = 1
        ORDER BY reward {order}, generation DESC, prompt_id, index LIMIT ?""",
        [count],
    )
    rows = [row | {"turns": turns(row["completion"]), "times": 1} for row in found.to_dict("records")]
    return HTML.completions(rows, run.meta, None, curves.outcome_name(run) == curves.GRADED)


def stuck(run: Run) -> Markup:
    """Tabulate the prompts that cost most since their last pass, and say what all such prompts cost."""
    found = curves.stuck_prompts(run)
    if found.empty:
        return Markup()
    all = found.iloc[0]
    told = (
        f"{all['prompts']:,} {'prompt' if all['prompts'] == 1 else 'prompts'} had no pass in their latest {curves.FEW_VISITS} visits or more: "
        f"{all['all_visits']:,.0f} visits, {all['all_completions']:,.0f} completions, {percent(all['all_share'])} of the tokens of all completions. Drop or ease them."
    )
    texts = [short_text(row) for row in found.to_dict("records")]
    names = {"visits": "visits without a pass", "share": "share of tokens", "step": "since step"}
    shown = found[["visits", "completions", "share", "step"]].rename(columns=names)
    shown.index = pd.Index(found["prompt_id"].astype(str), name="prompt id")
    shown.insert(0, "prompt", texts)
    rows = table("stuck", shown, forms={"share of tokens": percent})
    return HTML.section("Prompts that cost without a pass", HTML.note(told) + rows)


def forecast(found: "Forecast") -> Markup:
    """Show what strategies would cost, as a sentence, bars and what was assumed."""
    shares = {f"groups of {size}": share for size, share in found.dead.items()}
    causes = {CAUSES[cause]: share for cause, share in found.causes.items()}
    costs = {price.name: price.seconds for price in found.prices}
    rollouts = {price.name: price.rollouts for price in found.prices}
    parts = {"Dead groups, by their size": shares, "Dead groups, by cause": causes}
    parts |= {"Time to the accuracy of plain GRPO, × plain GRPO": costs, "Completions, × plain GRPO": rollouts}
    return HTML.forecast(found, {name: rows for name, rows in parts.items() if rows})


def turns(text: str) -> list[tuple[str, str]]:
    """Split a recorded text into role and content of each message; the role of a text that is no conversation is empty."""
    before, *parts = _TURN.split(text)
    return [("", before)] * bool(before or not parts) + list(zip(parts[::2], parts[1::2], strict=True))
