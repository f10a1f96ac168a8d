"""What the app and the report say about a run: its numbers and tables, as escaped HTML or data frames."""

import json
import re
from collections.abc import Callable, Collection
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from pandas.api.types import is_float_dtype, is_integer_dtype, is_numeric_dtype
from tqdm import tqdm

from ..record import Run
from ..record.causes import CAUSES
from ..record.curves import (
    GRADED,
    HELD_OUT,
    curve,
    evaluated,
    interval,
    is_share,
    last_fifth,
    main_reward,
    outcome_name,
    reward_curves,
    value_tables,
    waste,
)
from ..record.evaluations import RESULT_FILES, first_and_last, read_results, rows_of
from ..record.ledger import PLAIN, TAUGHT_NOTHING, against_plain, headline, skipped_visits, time_of_plain
from ..record.numbers import ago, fixed, number, percent
from ..record.schema import Status
from .meanings import MEANINGS


_FEW_LIVE = 0.2  # share of live groups below which little was learned, whatever was saved
_SHORT = 120  # characters of a prompt in a row: those that begin alike may end differently
MOST_PROMPTS, MOST_ROWS = 2000, 200
"""Prompts that the chart, and the table, show at most: the first ones in the order of the table."""

_CODE = re.compile("`([^`]+)`")
_TURN = re.compile(r"(?:^|\n\n)\[(system|user|assistant|tool)\]\n")  # as the recorder writes messages

# Beginnings of settings that do not describe the experiment: where a run writes, what it logs, where its servers are
_INCIDENTAL = (
    *("output_dir", "run_name", "project", "report_to", "push_to_hub", "hub_", "log", "num_completions_to_print"),
    *("save_", "telemetry", "trackio_", "summary", "disable_tqdm", "vllm_server_", "vllm_group_port", "local_rank"),
    *("resume_from_checkpoint", "eval_on_start", "ignore_data_skip"),
)

_environment = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
)
_environment.filters |= {"number": number, "percent": percent, "ago": ago}
_environment.filters["code"] = lambda text: Markup(_CODE.sub(r"<code>\1</code>", str(escape(text))))
_environment.globals |= {"plain": PLAIN, "zip": zip, "meanings": MEANINGS}
_environment.globals |= {"headline": headline, "skipped_visits": skipped_visits}

HTML: Any = _environment.get_template("pages.html").module
"""The macros of `pages.html`, as functions that return `Markup`. They escape every value."""


def overview(run: Run) -> Markup:
    """The cards of the run, and what it cost."""
    return cards(run) + costs(run)


def cards(run: Run, sparkline: str = "") -> Markup:
    """Whether the run learns, what it wastes and what it saves, with the most severe advice; `sparkline` is a figure of its reward as JSON."""
    summary = run.summary()
    if not summary["generations"]:
        return HTML.problem("The run has started, and its first batch is not scored yet.")
    found = [_learning(run), _wasted(run, summary), _saved(summary)]
    return HTML.cards(found, sparkline, Status.read(run.directory).advice)


def costs(run: Run) -> Markup:
    """Costs of the run against plain GRPO, and its evaluations."""
    totals, names = run.summary()["ledger"], ["work", "tokens", "seconds", "FLOPs", "plain GRPO", "ratio"]
    if not totals:  # before the first batch
        return Markup()
    compared = [[w.name, w.tokens, w.seconds, w.flops, w.plain_flops, w.times] for w in against_plain(totals)]
    works = pd.DataFrame(compared, columns=names)
    works.loc[works["work"] == "total", "tokens"] = np.nan  # one token is rolled out and trained on
    heading, rows = rows_of(first_and_last(read_results(run.directory.parent)))
    evaluations = pd.DataFrame(rows, columns=heading)
    return HTML.costs(totals, table("costs", works), table("evaluations", evaluations))


def by_value(run: Run, figures: Callable[[Run, str, list[str]], list[Any]] = lambda *of: []) -> Markup:
    """Tables of the values of columns of the data, a click on a row of which lists its prompts, and under each the `figures` of the column."""
    forms: dict[str, Callable[[Any], str]] = {"reward": fixed, HELD_OUT: fixed, "dead share": percent}
    place, shown = Markup('<div class="lze-chart" data-figure="{}"></div>'), Markup()
    for column, rows in value_tables(run).items():
        charts = [place.format(figure.to_json()) for figure in figures(run, column, rows["value"].tolist())]
        rows.index = pd.Index(f"{column}=" + rows["value"], name="search")
        shown += HTML.section(f"By {column}", table(f"by-{column}", rows, forms=forms) + Markup().join(charts))
    return shown


def table(
    id: str,
    frame: pd.DataFrame,
    order: str | None = None,
    opened: str | None = None,
    forms: dict[str, Callable[[Any], str]] | None = None,
    changed: Collection[str] = (),
) -> Markup:
    """
    A table, empty without rows. One with an `order` is sorted by a click on a heading: it names the column by which it is sorted now, the
    highest first with a `-` before it. If the index of the frame has a name, it holds the keys by which rows are opened, `opened` is that
    of the open one, and rows of keys in `changed` are marked. `forms` say how the numbers of some columns are written.
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
    return HTML.table(id, heads, order, zip(keys, zip(*cells, strict=True), strict=True), opened, changed)


def _next(name: str, is_number: bool, order: str | None) -> str | None:
    """The order that a click on a heading asks for: numbers begin with the highest; another click turns it round."""
    if order is None:
        return None
    return name if order == f"-{name}" or (not is_number and order != name) else f"-{name}"


def _learning(run: Run) -> tuple[str, str, list[str], bool]:
    """Name, number and notes of a card, and whether the number says little."""
    values = main_reward(run)
    now, change = last_fifth(values)
    show, rewards = fixed if values.name == "reward" else percent, reward_curves(run)
    notes = [
        "mean of the last fifth of the steps"
        + (f", {round(change, 3) + 0.0:+.3f} on the fifth before" if change == change else "")
    ]
    if len(rewards.columns) > 1:
        parts = (f"{name} {fixed(last_fifth(rewards[name].dropna())[0])}" for name in rewards)
        notes.append(f"rewards: {', '.join(parts)}")
    for name, line in evaluated(run).items():
        show_it, value = percent if is_share(name) else fixed, float(line.iloc[-1])
        low, high = interval(run, name, value) if name.startswith(HELD_OUT) else (np.nan, np.nan)
        between = f" [{show_it(low)}, {show_it(high)}]" if low == low else ""
        begun = f", {show_it(line.iloc[0])} at step {line.index[0]}" if len(line) > 1 else ""
        notes.append(f"{name} {show_it(value)}{between}{begun}")
    return "learning", f"{values.name} {show(now)}", notes, False


def _wasted(run: Run, summary: dict[str, Any]) -> tuple[str, str, list[str], bool]:
    share, cause, part = waste(run)
    notes = ["of the groups of the last fifth of the steps were dead and drawn in full"]
    notes += [f"{percent(part)} of these: {CAUSES[cause]}"] if cause else []
    notes.append(f"{percent(summary['dead'] / max(summary['groups'], 1))} in the whole run")
    if idle := summary["ledger"].get("skipped_updates"):
        notes.append(f"{idle:,.0f} of {summary['steps']:,} steps made no update: no group had a gradient")
    return "wasted", percent(share), notes, False


def _saved(summary: dict[str, Any]) -> tuple[str, str, list[str], bool]:
    totals, live = summary["ledger"], summary["groups"] - summary["dead"] - summary["stopped"]
    if not (works := against_plain(totals)):
        return "saved", "–", [TAUGHT_NOTHING], True
    few, spent, plain = live < _FEW_LIVE * summary["groups"], works[-1], time_of_plain(totals)
    rest = 1.0 - spent.ratio
    notes = [f"the cost of plain GRPO: {percent(abs(rest))} {'saved' if rest >= 0 else 'more'}"]
    fewer = {"completions": totals.get("plain_rows", 0) - totals.get("rows_rolled_out", 0)}
    fewer |= {"tokens": totals.get("plain_tokens", 0) - totals.get("rollout_tokens", 0)}
    kinds = [f"{number(abs(n))} {'fewer' if n >= 0 else 'more'} {name}" for name, n in fewer.items() if round(n)]
    if plain:
        minutes = (plain[1] - spent.seconds) / 60
        kinds.append(f"{abs(minutes):.1f} min {'less' if minutes >= 0 else 'more'}")
    notes += [", ".join(kinds)] if kinds else []
    notes.append(
        f"{totals.get('rows_rolled_out', 0) / live:.1f} completions for each of {live:,} live groups"
        if live
        else "no live group"
    )
    if few:
        notes.append("most groups were dead, so this is little to save from")
    return "saved", spent.times, notes, few


def standing(run: Run) -> Markup:
    """Which run it is, whether it is training, and how to go on with one that stopped before its end."""
    status, known = run.status(), run.meta.settings
    size, count = known.get("num_generations"), known.get("train_prompts")
    drawn = f"{f'{count:,} prompts' if count else 'prompts'} × {size} completions" if size else ""
    model = str(known.get("model") or known.get("model_name_or_path") or "")
    facts = [known.get("strategy"), model.rstrip("/").rpartition("/")[2], drawn]
    checkpoints = [path.name for path in run.directory.parent.glob("checkpoint-*") if path.name[11:].isdecimal()]
    stopped, latest = (
        status["state"] in ("crashed", "failed", "interrupted"),
        max(checkpoints, key=lambda name: int(name[11:]), default=""),
    )
    left = Status.read(run.directory).waits_for or _left(status)
    return HTML.standing(run.name, " · ".join(str(fact) for fact in facts if fact), status, left, stopped, latest)


def _left(status: dict[str, Any]) -> str:
    return "" if status["seconds_left"] is None else f"{tqdm.format_interval(status['seconds_left'])} left"


def settings(run: Run) -> Markup:
    """The settings: those that differ from their defaults first, then all of them by topic."""
    known, own, rows = run.meta.known, run.meta.settings, []
    for name in dict.fromkeys([name for name in known if name in own] + sorted(own)):
        topic, default = known.get(name) or (known.get(name.partition(".")[0], [""])[0], None)
        rows.append([name, _shown(own[name]), _shown(default), topic])
    table_of_all = pd.DataFrame(rows, columns=["setting", "value", "default", "topic"])
    differs = table_of_all["setting"].isin(known) & (table_of_all["value"] != table_of_all["default"])
    changed = HTML.section("What differs from the defaults", table("changed", table_of_all[differs]))
    return changed + HTML.section("All settings, by topic", table("settings-all", table_of_all))


def _shown(value: Any) -> str:
    """A value as it reads in a recipe, a dash for none."""
    if value is None or value != value or value in ("", "None") or value == []:
        return "–"
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def run_table(runs: dict[str, Run], search: str = "", order: str = "") -> pd.DataFrame:
    """One row per run that has every word of `search` in it, in the `order` of a [`table`]: strategy, standing, accuracy and cost."""
    rows = {id: {"run": id} | run_row(run) for id, run in runs.items()}
    frame = pd.DataFrame(rows.values(), index=pd.Index(rows, name="run id"))
    if (column := order.removeprefix("-")) in frame:
        frame = frame.sort_values(column, ascending=column == order, kind="stable")
    texts = [" ".join(map(_shown, row)).lower() for row in frame.itertuples(index=False)]
    return frame[[all(word in text for word in search.lower().split()) for text in texts]]


def runs_table(frame: pd.DataFrame, order: str, opened: str | None) -> Markup:
    """The table of [`run_table`]."""
    return table("runs", frame, order, opened, {name: form for name, form in _RUN_FORMS.items() if name in frame})


def version(run: Run) -> tuple:
    """Changes when a run has recorded or evaluated something, or ended."""
    evaluations = sorted((str(path), path.stat().st_mtime_ns) for path in run.directory.parent.glob(RESULT_FILES))
    status = Status.read(run.directory)
    return hash(run.version), status.state, status.waits_for, *evaluations


def final_values(runs: dict[str, Run]) -> pd.DataFrame:
    """The numbers of [`run_row`] side by side, from the second run on with their difference from the first."""
    rows = {id: {n: v for n, v in run_row(run).items() if isinstance(v, int | float)} for id, run in runs.items()}
    shown = []
    for name in dict.fromkeys(name for row in rows.values() for name in row):
        values = [row.get(name, np.nan) for row in rows.values()]
        form = _RUN_FORMS.get(name, number)
        shown.append([name, form(values[0])])
        for other in values[1:]:
            change = other - values[0]
            told = (
                f" ({'+' if change > 0 else '−' if change < 0 else '±'}{form(abs(change))})"
                if change == change
                else ""
            )
            shown[-1].append(form(other) + told)
    return pd.DataFrame(shown, columns=["at the end", *runs])


_RUN_FORMS: dict[str, Callable[[Any], str]] = {
    **dict.fromkeys(("dead", "stopped", "trained on"), percent),
    **dict.fromkeys(("reward", "best reward", "cost ×", f"{HELD_OUT} accuracy", f"{HELD_OUT} reward"), fixed),
    "wall time": lambda seconds: tqdm.format_interval(seconds) if seconds == seconds else "–",
}


def run_row(run: Run) -> dict[str, Any]:
    """The row of a run, which is looked up once for each [`version`] of it."""
    return _run_row(run, version(run))


@lru_cache(maxsize=1024)
def _run_row(run: Run, version: tuple) -> dict[str, Any]:
    summary, points, status = run.summary(), curve(run), run.status()
    left = "waits for servers" if Status.read(run.directory).waits_for else _left(status)
    last = points.iloc[-1] if len(points) else dict.fromkeys(points, np.nan)
    works = {work.name: work.ratio for work in against_plain(summary["ledger"])}
    groups, known = max(summary["groups"], 1), evaluated(run)
    run.close()  # of hundreds of runs, only those on the page are open
    times = run.sql("SELECT min(time) AS first, max(time) AS last FROM generations").iloc[0]
    reward, model = (
        main_reward(run),
        str(run.meta.settings.get("model") or run.meta.settings.get("model_name_or_path") or "–"),
    )
    return {
        "strategy": run.meta.settings.get("strategy", "–"),
        "state": f"{status['state']}, {left}" if left else status["state"],
        "step": summary["steps"],
        **{name: float(line.iloc[-1]) for name, line in known.items()},
        "reward": last_fifth(reward)[0],
        "best reward": float(reward.max()),
        "dead": summary["dead"] / groups,
        "stopped": summary["stopped"] / groups,
        "trained on": summary["selected"] / groups,
        "tokens": float(last["tokens"]),
        "seconds": float(last["seconds"]),
        "cost ×": works.get("total", np.nan),
        "wall time": float(times["last"] - times["first"]),
        "started": f"{datetime.fromtimestamp(times['first']):%Y-%m-%d %H:%M}" if len(points) else "–",
        "model": model.rstrip("/").rpartition("/")[2],
    }


def differing_settings(runs: dict[str, Run]) -> pd.DataFrame:
    """The settings of the experiment that differ between runs, a column for each run."""
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
    "first": "first_pass_rate",
    "visits": "visits",
    "last step": "last_step",
}


def prompt_order(order: str) -> str:
    """The order of [`Run.prompts`](lze_trl.record.Run.prompts) that an order of the table asks for, by default the highest energy first."""
    name = order.removeprefix("-")
    column = _PROMPT_COLUMNS.get("pass rate" if name == GRADED else name, "energy")
    return f"-{column}" if order.startswith("-") or not order else column


def prompt_table(run: Run, frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of [`Run.prompts`](lze_trl.record.Run.prompts) with short texts, by their ids as text."""
    rows = frame[list(_PROMPT_COLUMNS.values())].set_axis(list(_PROMPT_COLUMNS), axis=1)
    rows["prompt"] = [short_text(row) for row in frame.to_dict("records")]
    rows["last step"] += 1
    rows.index = pd.Index(frame["prompt_id"].astype(str), name="prompt id")
    return rows.rename(columns={"pass rate": outcome_name(run)})


def short_text(row: dict[str, Any]) -> str:
    """The beginning and the end of a prompt's text, or its id if the text is not recorded."""
    if not isinstance(row["text"], str):
        return f"prompt {row['prompt_id']}"
    text = " ".join(row["text"].split())
    return text if len(text) <= _SHORT else f"{text[: _SHORT // 2]} … {text[-_SHORT // 2 :]}"


def prompts(run: Run, frame: pd.DataFrame, total: int, order: str = "", opened: str = "", search: str = "") -> Markup:
    """The table of the first prompts in a frame, of `total` that were found. Those of the latest generation batch of a running run are marked."""
    outcome, shown = outcome_name(run), frame.head(MOST_ROWS)
    changed: Collection[str] = ()
    if run.status()["state"] == "running":
        (latest,) = run.sql("SELECT max(generation) AS latest FROM generations")["latest"]
        changed = set(shown.loc[shown["last_generation"] == latest, "prompt_id"].astype(str))
    forms: dict[str, Callable[[Any], str]] = {"energy": "{:.2f}".format, outcome: percent, "first": percent}
    rows = table(PROMPTS, prompt_table(run, shown), order, opened, forms, changed)
    more = f" The first {MOST_ROWS:,} are listed: sort or search to see others." if total > MOST_ROWS else ""
    told = (
        f"{total:,} {'prompt' if total == 1 else 'prompts'}.{more}"
        if total or not search
        else f"No prompt has all of: {search}"
    )
    return HTML.prompts(told, rows)


def prompt_detail(run: Run, prompt_id: int) -> Markup:
    """One prompt: its text, images and facts."""
    frame = run.prompts(prompt_id=prompt_id)
    if frame.empty:
        return HTML.problem("This run has no such prompt.")
    row = frame.iloc[0]
    facts = json.loads(row["columns"]) if isinstance(row["columns"], str) else {}
    facts |= {
        "drawn": row["drawn"],
        "visits": row["visits"],
        "last step": row["last_step"] + 1,
        "trained on": row["times_selected"],
        "re-checks": row["rechecks"],
        outcome_name(run): percent(row["pass_rate"]),
    }
    for name in ("energy", "difficulty D", "uncertainty u", "momentum m"):
        facts[name] = f"{row[name.split()[0]]:.2f}"
    text = row["text"] if isinstance(row["text"], str) else "The text of this prompt is not recorded."
    return HTML.prompt(row["state"].capitalize(), turns(text), run.images(prompt_id), facts, prompt_id)


def completions(run: Run, prompt_id: int, generation: int | None = None) -> Markup:
    """
    Completions of a prompt at a generation batch, by default the latest with recorded ones: the highest reward first, equal ones once,
    episodes turn by turn.
    """
    rows: dict[tuple, dict[str, Any]] = {}
    for row in (
        run.completions(prompt_id, generation).sort_values("reward", ascending=False, kind="stable").to_dict("records")
    ):
        same = row["completion"], str(row["rewards"]), row["completion_tokens"]
        rows.setdefault(same, row | {"turns": turns(row["completion"]), "times": 0})["times"] += 1
    return HTML.completions(list(rows.values()), run.meta)


def turns(text: str) -> list[tuple[str, str]]:
    """Role and content of each message of a recorded text; the role of a text that is no conversation is empty."""
    before, *parts = _TURN.split(text)
    return [("", before)] * bool(before or not parts) + list(zip(parts[::2], parts[1::2], strict=True))
