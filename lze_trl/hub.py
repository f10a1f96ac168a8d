"""Runs on the Hugging Face Hub: the model's card; telemetry and state as a dataset repo."""

import json
import logging
import re
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub import HfApi

from . import checkpoint as store
from .files import write_atomically
from .names import label
from .record import Meta, MissingTelemetryError, open_run
from .record.cards import cards
from .record.curves import held_out_curves
from .record.evaluations import FILE, read_results, results_table
from .record.evaluations import FOLDER as EVALUATIONS
from .record.schema import DIRECTORY, SQL_TYPES, Status
from .record.writer import list_parts, write_part
from .redaction import public, without_secrets
from .remote import RUN_FILES, STATE_FILES
from .version import __version__


logger = logging.getLogger(__name__)

_PUSHED = ["README.md", *RUN_FILES, *STATE_FILES, "report/**"]
# Kept out of a model repo, because they hold prompts, completions or paths. Patterns without a leading slash also match in checkpoints
_PRIVATE = (
    *(f"/{folder}/" for folder in (DIRECTORY, f"{DIRECTORY}.*", "report", EVALUATIONS, f"{store.REPLACED}.*")),
    *("/completions/", "/runs/", "/trainer_state.json"),
    *(f"/{store.STATE_NAME}.*", f"{store.ROWS_NAME}_*", "training_args.bin"),
)
_PLAIN_TEXTS = ("cause", "name", "ledger")  # text columns without text of the data
_STATE_PARTS = ("prompts", "foresight", "gate", "unseen")
"""What another run begins with, without problems that the model wrote."""
_SHOWN_SETTINGS = (
    *("strategy", "selector", "selection_ratio", "controller", "window", "pruning", "planner", "loss_normalizer"),
    *("num_generations", "generation_batch_size", "learning_rate", "loss_type", "scale_rewards", "beta"),
    *("max_completion_length", "temperature", "seed"),
)


@contextmanager
def left_out(what: str) -> Iterator[None]:
    """Turn any error within the block into a warning that something, such as a card, is left out: a model is uploaded all the same."""
    try:
        yield
    except Exception as error:  # any error
        logger.warning("%s is left out: %s: %s", what, type(error).__name__, without_secrets(str(error)))


def push_run(
    run_dir: str | Path,
    repo_id: str,
    private: bool | None = None,
    token: str | None = None,
    texts: Collection[str] = (),
) -> str:
    """
    Upload telemetry, prompt state, report and a card as a dataset repo, which is created if it is missing, `private` or not.

    They replace those of an earlier run in the repo. Only ids and numbers are uploaded, and the named `texts`: `"prompt"`, `"completion"`,
    `"images"`, and columns of the training set. `token` defaults to that of `hf auth login`. Returns the address of the repo.
    """
    run_dir = Path(run_dir).resolve()
    with TemporaryDirectory() as folder:
        copy = Path(folder, run_dir.name)
        _copy_public(run_dir, copy, texts)
        with left_out("The report"), suppress(ImportError):  # without `lze_trl[app]` there is none
            from .app.report import write_report

            write_report(copy)
        with left_out("The card of the telemetry"):
            (copy / "README.md").write_text(_dataset_card(copy, repo_id), encoding="utf-8")
        api, repo = HfApi(token=token), cast(dict[str, Any], {"repo_id": repo_id, "repo_type": "dataset"})
        url = api.create_repo(**repo, private=private, exist_ok=True)
        api.upload_folder(folder_path=copy, **repo, allow_patterns=_PUSHED, delete_patterns=_PUSHED)
    return str(url)


def _copy_public(run_dir: Path, copy: Path, texts: Collection[str]):
    """Write what may be published of a run into an empty folder, leaving out files that cannot be read."""
    source, target = run_dir / DIRECTORY, copy / DIRECTORY
    target.mkdir(parents=True)
    meta, status = Meta.read(source), Status.read(source)
    meta.settings = public({name: value for name, value in meta.settings.items() if name != "command"})
    meta.write(target)
    hidden = {label(name) for name in meta.settings.get("report_by") or ()} - {*map(label, texts)}
    advice = [line for line in status.advice if not line.startswith(tuple(f"`{name} = " for name in hidden))]
    Status(status.state, max_steps=status.max_steps, advice=public(advice)).write(target)
    for table in SQL_TYPES:
        for path in list_parts(source / table):
            with left_out(f"`{path}`"):
                write_part(target / table / path.name, _without_texts(pq.read_table(path), texts))
    for name, results in read_results(run_dir).items():
        results.pop("decoding", None)  # with the system prompt
        (copy / EVALUATIONS / name).mkdir(parents=True)
        write_atomically(copy / EVALUATIONS / name / FILE, json.dumps(public(results), indent=1).encode())
    with left_out("The prompt state"), suppress(FileNotFoundError):  # of a run that has not ended
        states, about = store.load(run_dir, store.STATE_NAME)
        parts = {name: SimpleNamespace(state_dict=states[name].copy) for name in _STATE_PARTS if name in states}
        own = ("format", "schema_version", "checksum")
        store.save(copy, store.STATE_NAME, parts, {name: about[name] for name in about if name not in own})


def _without_texts(rows: pa.Table, texts: Collection[str]) -> pa.Table:
    """Remove from a table all texts that are not named, and metrics by the values of columns that are not named."""
    kept = {*texts, *_PLAIN_TEXTS, *(f"by.{label(name)}" for name in texts)}
    if "name" in rows.column_names:
        paths = [name.removeprefix("eval_").split("/") for name in rows["name"].to_pylist()]
        rows = rows.filter(pa.array([path[0] != "by" or ".".join(path[:2]) in kept for path in paths], pa.bool_()))
    for place, column in enumerate(rows.schema):
        name = "prompt" if column.name == "text" else column.name
        if column.name == "columns":
            facts = [json.loads(value) for value in rows["columns"].to_pylist()]
            shown = [json.dumps({key: one[key] for key in one if key in texts}, ensure_ascii=False) for one in facts]
            rows = rows.set_column(place, column, pa.array(shown, column.type))
        elif re.search("string|binary", str(column.type)) and name not in kept:
            rows = rows.set_column(place, column, pa.nulls(len(rows), column.type))
    return rows


def keep_private(run_dir: str | Path, writes_problems: bool = False):
    """
    Keep files with prompts, completions or paths of this machine out of the model repo: transformers uploads the whole output directory,
    except what its `.gitignore` names. The state of a model that `writes_problems` holds these as well.
    """
    path = Path(run_dir) / ".gitignore"
    lines = path.read_text(encoding="utf-8", errors="surrogateescape").splitlines() if path.is_file() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    rules = [*_PRIVATE, f"{store.STATE_NAME}.*"] if writes_problems else _PRIVATE  # also of checkpoints
    content = "".join(f"{line}\n" for line in dict.fromkeys([*lines, *rules]))
    write_atomically(path, content.encode(errors="surrogateescape"))


def extend_model_card(run_dir: str | Path):
    """Add a section to the `README.md` that TRL has written: how the model was trained and evaluated. A run without telemetry gets none."""
    with suppress(MissingTelemetryError):
        section = model_card_section(run_dir)
        with open(Path(run_dir, "README.md"), "a", encoding="utf-8") as card:
            card.write(f"\n{section}\n")


def model_card_section(run_dir: str | Path) -> str:
    """Write Markdown about the run: what it learned, wasted and saved, settings and evaluations."""
    with closing(open_run(run_dir)) as run:
        if not (summary := run.summary())["generations"]:
            raise MissingTelemetryError("The run has no generation batch.")
        settings, held_out = dict(run.meta.settings), held_out_curves(run)
        learned = "".join(f"\n- {card}" for card in cards(run)) + "\n"
    if settings.get("selector") in ("all", "zero_variance"):
        settings.pop("selection_ratio", None)  # these selectors ignore it
    prompts = summary["prompts"]
    known = {name: settings[name] for name in _SHOWN_SETTINGS if settings.get(name) is not None}
    shown = "\n".join(f"| `{name}` | `{value}` |" for name, value in known.items())
    evaluated = ""
    if len(evaluations := results_table(run_dir)):
        evaluated = f"\n\n### Evaluations\n\n```text\n{evaluations.to_string(index=False)}\n```"
    for name, values in held_out.items():
        steps = dict.fromkeys(values.index[[0, -1]])
        shown_values = " → ".join(f"{values[step]:.3f} at step {step}" for step in steps)
        learned += f"\n{name.capitalize()} (`{values.name}`, sampled as in training): {shown_values}.\n"
    way = f"with data selection by `strategy: {settings.get('strategy')}`"
    if settings.get("selector") == "energy":
        way = "on the groups with the most Learning-Zone Energy ([arXiv 2605.17003](https://arxiv.org/abs/2605.17003))"
    return f"""## Trained where it learns

This model was trained with lze_trl {__version__}: GRPO {way}.

In {summary["generations"]:,} generation batches, {summary["selected"]:,} of {summary["groups"]:,} groups were trained on. Of {sum(prompts.values()):,}
prompts, {prompts["pruned"]:,} were pruned as solved at the end, and {prompts["forgotten"]:,} were forgotten.
{learned}
### Settings

| setting | value |
|---|---|
{shown}{evaluated}"""


def _dataset_card(run_dir: Path, repo_id: str) -> str:
    with closing(open_run(run_dir)) as run:
        answers = "".join(f"\n- {card}" for card in cards(run))
    return f"""---
tags: [lze, grpo, telemetry]
viewer: false
---

# Training telemetry of {run_dir.name}

Recorded by lze_trl: pass rate and energy of every group, the prompts, and their latest state. Look at it with `lze-trl app {repo_id}`.
{answers}
"""
