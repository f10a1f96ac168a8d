"""What the app and the report say about a run: its numbers and tables, as escaped HTML or data frames."""

import json
import re
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from pandas.api.types import is_float_dtype, is_integer_dtype, is_numeric_dtype
from tqdm import tqdm

from ..record import Run
from ..record.curves import GRADED, curve, evaluated, is_share, outcome_name
from ..record.evaluations import RESULT_FILES, first_and_last, read_results, rows_of
from ..record.ledger import PLAIN, against_plain, headline, skipped_visits
from ..record.numbers import number, percent
from ..record.schema import Status
from .meanings import MEANINGS


_TILES = 4  # at most, of what the run was evaluated on
_FEW_LIVE = 0.2  # share of live groups below which little was learned, whatever was saved
MOST_PROMPTS, MOST_ROWS = 2000, 200
"""Prompts that the chart, and the table, show at most: the first ones in the order of the table."""

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
_environment.filters |= {"number": number, "percent": percent}
_environment.globals |= {"plain": PLAIN, "zip": zip, "meanings": MEANINGS}
_environment.globals |= {"headline": headline, "skipped_visits": skipped_visits}

HTML: Any = _environment.get_template("pages.html").module
"""The macros of `pages.html`, as functions that return `Markup`. They escape every value."""


def overview(run: Run) -> Markup:
    """Where the run stands, and what it cost."""
    return tiles(run) + costs(run)


def tiles(run: Run) -> Markup:
    """The numbers of the run, and advice."""
    summary = run.summary()
    if not summary["generations"]:
        return HTML.problem("The run has started, and its first batch is not scored yet.")
    return HTML.tiles(_tiles(run, summary), Status.read(run.directory).advice)


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


def table(id: str, frame: pd.DataFrame, order: str | None = None, opened: str | None = None) -> Markup:
    """
    A table, empty without rows. One with an `order` is sorted by a click on a heading: it names the column by which it is sorted now, the
    highest first with a `-` before it. If the index of the frame has a name, it holds the keys by which rows are opened, `opened` is that
    of the open one.
    """
    if frame.empty:
        return Markup()
    numeric = {name: is_numeric_dtype(frame[name]) for name in frame}
    heads = [(name, is_number, _next(name, is_number, order)) for name, is_number in numeric.items()]
    forms = [
        number if is_float_dtype(kind) else "{:,}".format if is_integer_dtype(kind) else _shown
        for kind in frame.dtypes
    ]
    cells = [frame[name].map(form) for name, form in zip(frame, forms, strict=True)]
    keys = frame.index if frame.index.name else [None] * len(frame)
    return HTML.table(id, heads, order, zip(keys, zip(*cells, strict=True), strict=True), opened)


def _next(name: str, is_number: bool, order: str | None) -> str | None:
    """The order that a click on a heading asks for: numbers begin with the highest; another click turns it round."""
    if order is None:
        return None
    return name if order == f"-{name}" or (not is_number and order != name) else f"-{name}"


def _tiles(run: Run, summary: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Name, value and note of each number at the top."""
    prompts, times = summary["prompts"], dict.fromkeys(("rollouts", "updates", "total"), "–")
    times |= {work.name: work.times for work in against_plain(summary["ledger"])}
    pass_rates = curve(run)["pass_rate"].dropna()  # NaN for a batch that pruning left empty
    live = summary["groups"] - summary["dead"] - summary["stopped"]
    few = f"; {live:,} live groups" + (", few to save for" if live < _FEW_LIVE * summary["groups"] else "")
    first, last = (pass_rates.iloc[0], pass_rates.iloc[-1]) if len(pass_rates) else (None, None)
    return [
        ("step", f"{summary['steps']:,}", f"pass {summary['pass_index'] + 1} over the data"),
        *(_held_out_tile(*line) for line in list(evaluated(run).items())[:_TILES]),
        (outcome_name(run), percent(last), f"{percent(first)} at the start"),
        ("prompts seen", f"{sum(prompts.values()):,}", f"{prompts['frontier']:,} on the frontier"),
        ("solved or pruned", f"{prompts['solved'] + prompts['pruned']:,}", f"{prompts['forgotten']:,} forgotten"),
        ("groups trained on", percent(summary["selected"] / max(summary["groups"], 1)), f"of {summary['groups']:,}"),
        ("FLOPs of plain GRPO", times["total"], f"rollouts {times['rollouts']}, updates {times['updates']}{few}"),
    ]


def _held_out_tile(name: str, values: pd.Series) -> tuple[str, str, str]:
    show = percent if is_share(name) else number
    begun = f"{show(values.iloc[0])} at step {values.index[0]}" if len(values) > 1 else ""
    return name, show(values.iloc[-1]), begun


def brightest(shares: np.ndarray) -> float:
    """The share that gets the brightest colour. A few extreme cells at the start of a run would make all others dark."""
    return float(np.quantile(shares[shares > 0], 0.99)) if (shares > 0).any() else 1.0


def standing(run: Run) -> Markup:
    """Whether the run is training."""
    status, left = run.status(), Status.read(run.directory).waits_for
    return HTML.standing(
        status, status["updated"] and datetime.fromtimestamp(status["updated"]), left or _left(status)
    )


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


def version(run: Run) -> tuple:
    """Changes when a run has recorded or evaluated something, or ended."""
    evaluations = sorted((str(path), path.stat().st_mtime_ns) for path in run.directory.parent.glob(RESULT_FILES))
    status = Status.read(run.directory)
    return hash(run.version), status.state, status.waits_for, *evaluations


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
    return {
        "strategy": run.meta.settings.get("strategy", "–"),
        "state": f"{status['state']}, {left}" if left else status["state"],
        "step": summary["steps"],
        **{name: float(line.iloc[-1]) for name, line in known.items()},
        "pass rate": float(last["pass_rate"]),
        "dead": summary["dead"] / groups,
        "stopped": summary["stopped"] / groups,
        "trained on": summary["selected"] / groups,
        "tokens": float(last["tokens"]),
        "seconds": float(last["seconds"]),
        "cost ×": works.get("total", np.nan),
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
    "D": "difficulty",
    "u": "uncertainty",
    "m": "momentum",
    "visits": "visits",
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
    rows.index = pd.Index(frame["prompt_id"].astype(str), name="prompt id")
    return rows.rename(columns={"pass rate": outcome_name(run)})


def short_text(row: dict[str, Any]) -> str:
    """The beginning of a prompt's text, or its id if the text is not recorded."""
    return " ".join(row["text"][:300].split()) if isinstance(row["text"], str) else f"prompt {row['prompt_id']}"


def prompts(run: Run, frame: pd.DataFrame, total: int, order: str = "", opened: str = "") -> Markup:
    """The table of the first prompts in a frame, of `total` that were found."""
    shown = table(PROMPTS, prompt_table(run, frame.head(MOST_ROWS)), order, opened)
    more = f" The first {MOST_ROWS:,} are listed: sort or search to see others." if total > MOST_ROWS else ""
    return HTML.prompts(f"{total:,} {'prompt' if total == 1 else 'prompts'}.{more}", shown)


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
        "trained on": row["times_selected"],
        "re-checks": row["rechecks"],
    }
    for name in ("difficulty D", "uncertainty u", "momentum m", "energy"):
        facts[name] = number(row[name.split()[0]])
    facts["prompt id"] = prompt_id
    text = row["text"] if isinstance(row["text"], str) else "The text of this prompt is not recorded."
    return HTML.prompt(row["state"].capitalize(), turns(text), run.images(prompt_id), facts)


def completions(run: Run, prompt_id: int, generation: int | None = None) -> Markup:
    """Completions of a prompt at a generation batch, by default the latest with recorded ones, episodes turn by turn."""
    rows = run.completions(prompt_id, generation).to_dict("records")
    return HTML.completions([row | {"turns": turns(row["completion"])} for row in rows], run.meta)


def turns(text: str) -> list[tuple[str, str]]:
    """Role and content of each message of a recorded text; the role of a text that is no conversation is empty."""
    before, *parts = _TURN.split(text)
    return [("", before)] * bool(before or not parts) + list(zip(parts[::2], parts[1::2], strict=True))
