"""Runs on the Hugging Face Hub: the model's card; telemetry and state as a dataset repo."""

from contextlib import closing, suppress
from pathlib import Path
from typing import Any, cast

from huggingface_hub import HfApi

from .checkpoint import REPLACED
from .files import write_atomically
from .record import MissingTelemetryError, open_run
from .record.curves import held_out_curves
from .record.evaluations import FOLDER as EVALUATIONS
from .record.evaluations import first_and_last, read_results, rows_of, text_table
from .record.ledger import headline, skipped_visits
from .record.schema import DIRECTORY
from .remote import RUN_FILES, STATE_FILES
from .version import __version__


PICTURE = "lze_summary.png"
"""Picture of the run, beside the model card."""

_PUSHED = [*RUN_FILES, *STATE_FILES, "report/**"]
_PRIVATE = (f"/{DIRECTORY}/", f"/{DIRECTORY}.*/", "/report/", f"/{EVALUATIONS}/", f"/{REPLACED}.*/")
_SHOWN_SETTINGS = (
    *("strategy", "selector", "selection_ratio", "controller", "pruning", "planner", "loss_normalizer"),
    *("num_generations", "generation_batch_size", "learning_rate", "loss_type", "scale_rewards", "beta"),
    *("max_completion_length", "temperature", "seed"),
)


def push_run(run_dir: str | Path, repo_id: str, private: bool | None = None, token: str | None = None) -> str:
    """
    Upload telemetry, prompt state, report and a card as a dataset repo, which is created if it is missing, `private` or not.

    They replace those of a run that the repo held before. Recorded prompts and completions become as public as the repo.
    `token` is by default that of `hf auth login`. Returns the address of the repo.
    """
    run_dir = Path(run_dir)
    with suppress(ImportError):  # without `lze_trl[app]` there is no report
        from .app.report import write_report

        write_report(run_dir)
    api, repo = HfApi(token=token), cast(dict[str, Any], {"repo_id": repo_id, "repo_type": "dataset"})
    url = api.create_repo(**repo, private=private, exist_ok=True)
    api.upload_file(path_or_fileobj=_dataset_card(run_dir, repo_id).encode(), path_in_repo="README.md", **repo)
    api.upload_folder(folder_path=run_dir, **repo, allow_patterns=_PUSHED, delete_patterns=_PUSHED)
    return str(url)


def keep_private(run_dir: str | Path):
    """
    Keep telemetry and report, which hold prompts and completions, out of the model repo: the trainer of transformers
    uploads the whole output directory, except what its `.gitignore` names.
    """
    path = Path(run_dir) / ".gitignore"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(f"{line}\n" for line in dict.fromkeys([*lines, *_PRIVATE])).encode())


def extend_model_card(run_dir: str | Path):
    """
    Add to the `README.md` that TRL has written how the model was trained and evaluated, with a picture beside it, which needs
    `lze_trl[app]`. A run without telemetry gets no section.
    """
    with suppress(MissingTelemetryError):
        with suppress(ImportError):
            from .app.report import write_summary_picture

            write_summary_picture(run_dir, Path(run_dir, PICTURE))
        section = model_card_section(run_dir)
        with open(Path(run_dir, "README.md"), "a", encoding="utf-8") as card:
            card.write(f"\n{section}\n")


def model_card_section(run_dir: str | Path) -> str:
    """Markdown about the run: savings, settings, evaluations and picture."""
    with closing(open_run(run_dir)) as run:
        summary, settings, held_out = run.summary(), dict(run.meta.settings), held_out_curves(run)
    if settings.get("selector") in ("all", "zero_variance"):
        settings.pop("selection_ratio", None)  # these selectors ignore it
    prompts = summary["prompts"]
    shown = "\n".join(
        f"| `{name}` | `{settings[name]}` |" for name in _SHOWN_SETTINGS if settings.get(name) is not None
    )
    evaluations = first_and_last(read_results(run_dir))
    evaluated = f"\n\n### Evaluations\n\n```text\n{text_table(*rows_of(evaluations))}```" if evaluations else ""
    shows = Path(run_dir, PICTURE).is_file()
    picture = f"![Pass rate and energy over the steps]({PICTURE})\n\n" if shows else ""
    learned = ""
    for name, values in held_out.items():
        shown_values = " → ".join(
            f"{values[step]:.3f} at step {step}" for step in dict.fromkeys(values.index[[0, -1]])
        )
        learned += f"\n{name.capitalize()} (`{values.name}`, sampled as in training): {shown_values}.\n"
    way = f"with data selection by `strategy: {settings.get('strategy')}`"
    if settings.get("selector") == "energy":
        way = "on the groups with the most Learning-Zone Energy ([arXiv 2605.17003](https://arxiv.org/abs/2605.17003))"
    return f"""## Trained where it learns

This model was trained with lze_trl {__version__}: GRPO {way}.

{picture}In {summary["generations"]:,} generation batches, {summary["selected"]:,} of {summary["groups"]:,} groups were trained on. Of {sum(prompts.values()):,}
prompts, {prompts["pruned"]:,} were pruned as solved at the end, and {prompts["forgotten"]:,} were forgotten.
{learned}
{_savings(summary["ledger"])}

### Settings

| setting | value |
|---|---|
{shown}{evaluated}"""


def _savings(totals: dict[str, float]) -> str:
    """Markdown about the cost, against plain GRPO."""
    return f"### Savings\n\n{headline(totals)}\n\n{skipped_visits(totals)}"


def _dataset_card(run_dir: Path, repo_id: str) -> str:
    with closing(open_run(run_dir)) as run:
        savings = _savings(run.summary()["ledger"])
    return f"""---
tags: [lze, grpo, telemetry]
viewer: false
---

# Training telemetry of {run_dir.name}

Recorded by lze_trl: pass rate and energy of every group, the prompts, and their latest state. Look at it with `lze-trl app {repo_id}`.

![Pass rate and energy over the steps](report/summary.png)

{savings}
"""
