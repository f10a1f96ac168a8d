"""Runs on the Hugging Face Hub: the model's card; telemetry and state as a dataset repo."""

from contextlib import closing, suppress
from pathlib import Path
from typing import Any, cast

from huggingface_hub import HfApi

from .checkpoint import REPLACED
from .files import write_atomically
from .record import MissingTelemetryError, open_run
from .record.curves import held_out
from .record.evaluations import FOLDER as EVALUATIONS
from .record.evaluations import first_and_last, markdown, read_results
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


def correct_model_card(path: str | Path, model_id: str, base_model: str | None, datasets: list[str]):
    """Correct what TRL's card says of a model in a folder, and of several training sets."""
    # TRL names no folder: here one has its last two names, since the last alone is often "model"
    name = f"the local model `{Path(*Path(base_model).parts[-2:])}`" if base_model else "a model without a name"
    links = ", ".join(f"[{dataset}](https://huggingface.co/datasets/{dataset})" for dataset in datasets)
    text = Path(path).read_text(encoding="utf-8")
    for before, after in (
        ("[None](https://huggingface.co/None)", name),
        ('model="None"', f'model="{model_id}"'),
        (f"[{datasets}](https://huggingface.co/datasets/{datasets}) dataset", f"{links} datasets"),
    ):
        text = text.replace(before, after)
    write_atomically(Path(path), text.encode())


def extend_model_card(run_dir: str | Path):
    """
    Add how the model was trained to the `README.md` that TRL has written, or replace what an earlier call has added, with
    the picture beside it, which needs `lze_trl[app]`. A run without telemetry gets no section.
    """
    with suppress(MissingTelemetryError):
        with suppress(ImportError):
            from .app.report import write_summary_picture

            write_summary_picture(run_dir, Path(run_dir, PICTURE))
        _put(Path(run_dir, "README.md"), "run", model_card_section(run_dir))


def add_evaluations(run_dir: str | Path):
    """Write the evaluations of a run into its model card, in place of earlier ones; without a card, nothing happens."""
    card, evaluations = Path(run_dir) / "README.md", read_results(run_dir)
    if card.is_file() and evaluations:
        _put(card, "evaluations", f"## Evaluations\n\n{markdown(first_and_last(evaluations))}")


def _put(card: Path, name: str, section: str):
    """Put a section into a card, at its end or in place of the one of this name."""
    text = card.read_text(encoding="utf-8") if card.exists() else ""
    start, end = f"<!-- lze:{name} -->", f"<!-- lze:{name}:end -->"
    before, _, rest = text.partition(start)
    after = rest.partition(end)[2].lstrip()
    write_atomically(card, f"{before.rstrip()}\n\n{start}\n{section}\n{end}\n{after}".encode())


def model_card_section(run_dir: str | Path) -> str:
    """Markdown about the run: savings, settings and picture."""
    with closing(open_run(run_dir)) as run:
        summary, settings, accuracy = run.summary(), dict(run.meta.settings), held_out(run)
    if settings.get("selector") in ("all", "zero_variance"):
        settings.pop("selection_ratio", None)  # these selectors ignore it
    prompts = summary["prompts"]
    shown = "\n".join(
        f"| `{name}` | `{settings[name]}` |" for name in _SHOWN_SETTINGS if settings.get(name) is not None
    )
    shows = Path(run_dir, PICTURE).is_file()
    picture = f"![Pass rate and energy over the steps]({PICTURE})\n\n" if shows else ""
    learned = ""
    if len(accuracy):
        values = " → ".join(f"{accuracy[step]:.3f} at step {step}" for step in dict.fromkeys(accuracy.index[[0, -1]]))
        kind = "accuracy" if accuracy.between(0.0, 1.0).all() else "reward"
        learned = f"\nHeld-out {kind} (`{accuracy.name}`, sampled as in training): {values}.\n"
    return f"""## Trained where it learns

This model was trained with lze_trl {__version__}: GRPO that spends its updates on the prompts with
the most Learning-Zone Energy ([arXiv 2605.17003](https://arxiv.org/abs/2605.17003)).

{picture}In {summary["generations"]:,} generation batches, {summary["selected"]:,} of {summary["groups"]:,} groups were trained on. Of {sum(prompts.values()):,}
prompts, {prompts["pruned"]:,} were pruned as solved at the end, and {prompts["forgotten"]:,} were forgotten.
{learned}
{_savings(summary["ledger"])}

### Settings

| setting | value |
|---|---|
{shown}"""


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
