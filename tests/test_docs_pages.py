"""Pages about migration, errors, papers and gradients: their script runs, and what their tables name exists."""

import ast
import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from trl import GRPOTrainer

import tiny
from lze_trl import LZEGRPOConfig, LZEGRPOTrainer
from lze_trl.evaluation.settings import PRESETS
from lze_trl.job.recipe import KEYS
from lze_trl.rewards import MAJORITY, REWARDS, SOFT_OVERLONG
from lze_trl.strategies import MOVED
from test_docs_choosing import code
from test_laws import distance, moved


ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = ["migrate.md", "troubleshooting.md", "papers.md", "lab/energy-and-gradients.md"]
SITE = {
    path.relative_to(ROOT).as_posix(): path
    for folder in (".", "app", "benchmarks/**", "docs/**", "recipes/**")
    for path in ROOT.glob(f"{folder}/*.md")
}
ARXIV = re.compile(r"\[arXiv ([\d.]+)\]\(https://arxiv\.org/abs/([\d.]+)\)")
NAME = re.compile(r"([a-z][a-z0-9_]*)(?:(?:=|: )(.+))?")
HINTS = get_type_hints(LZEGRPOConfig)
ARGUMENTS = {*inspect.signature(LZEGRPOTrainer).parameters, *inspect.signature(GRPOTrainer).parameters}
IN_BLOCKS = {new for _, new in MOVED.values()}
SETTINGS = {*(field.name for field in fields(LZEGRPOConfig)), *KEYS, *ARGUMENTS, *IN_BLOCKS}
COLUMNS = {"image", "images"}  # of a dataset
METRICS = {"entropy"}


def read(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def rows(page: str) -> list[list[str]]:
    """Cells of all tables of a page, without their headings."""
    tables = re.findall(r"^\|.*\n\|[-:| ]+\|\n((?:\|.*\n)+)", read(page), re.M)
    lines = [line for table in tables for line in table.splitlines()]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def anchors(page: Path) -> set[str]:
    """Anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)", re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def literals(hint) -> tuple:
    """Strings that a setting with choices may have."""
    return tuple(value for value in get_args(hint) if isinstance(value, str))


# ---- All pages ----


@pytest.mark.parametrize("page", SITE)
def test_links_resolve(page):
    text = SITE[page].read_text(encoding="utf-8")
    for link in re.findall(r"\]\(((?!http)[^)\s]*)\)", re.sub(r"```.*?```", "", text, flags=re.S)):
        path, _, anchor = link.partition("#")
        target = SITE[page].parent / path if path else SITE[page]
        assert target.is_file(), link  # a folder would be none in the site
        assert not anchor or anchor in anchors(target), link
    paths = re.findall(r"`((?:tests|lze_trl|docs|recipes|scripts|examples)/[\w./-]+)`", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []
    for link in ARXIV.findall(text):
        assert link[0] == link[1]


@pytest.mark.parametrize("page", PAGES[:3])
def test_settings_of_the_tables_exist(page):
    """What is in backticks outside of messages: a setting, with or without a value, or a value of one."""
    values = {value for hint in HINTS.values() for value in literals(hint)} | {
        "sum_then_normalize",
        "normalize_then_sum",
    }
    values |= (
        {"token_truncate", "token_mask", "group", "None", "True", "False", *REWARDS, SOFT_OVERLONG, MAJORITY, *PRESETS}
        | COLUMNS
        | METRICS
    )
    found = 0
    for cell in (re.sub(r"“[^”]*”", "", cell) for row in rows(page) for cell in row):
        for text in code(cell):
            match = NAME.fullmatch(text)
            if text in values or match is None:  # a command, a class, a metric or a file
                continue
            name, value = match.groups()
            assert name in SETTINGS, text
            found += 1
            if value is not None and (choices := literals(HINTS.get(name))):
                assert value.strip('"') in choices, text
    assert found > 15


def test_metrics_of_the_tables_are_documented():
    documented = set(re.findall(r"^(?:\||-) `(lze/\w+)`", read("telemetry.md"), re.M))
    named = {text for page in PAGES for text in code(read(page)) if re.fullmatch(r"lze/\w+", text)}
    assert {"lze/dead_share", "lze/skipped_update"} <= named <= documented


# ---- Migration ----


def test_the_script_trains_as_trl_does(tmp_path):
    (script,) = re.findall(r"```python\n(.+?)```", read("migrate.md"), re.S)

    def trained(text: str) -> GRPOTrainer:
        settings = {
            "output_dir": str(tmp_path / text[:10]),
            "use_cpu": True,
            "bf16": False,
            "report_to": "none",
            "per_device_train_batch_size": 12,
            "num_generations": 4,
            "max_completion_length": 5,
            "max_steps": 4,
            "optim": "sgd",
            "learning_rate": 0.5,
            "save_strategy": "no",
            "disable_tqdm": True,
        }
        names = {
            "model": tiny.save(tmp_path / "model"),
            "reward": tiny.even_length_reward,
            "dataset": tiny.prompts(17),
            "settings": settings,
        }
        exec(text, names)
        return names["trainer"]

    theirs = trained(script.replace("lze_trl", "trl").replace("LZEGRPO", "GRPO"))
    ours = trained(script)
    assert type(theirs) is GRPOTrainer
    assert isinstance(ours, LZEGRPOTrainer)
    assert 0 < ours.ledger.rows_trained < ours.ledger.rows_rolled_out
    assert moved(theirs) > 1e-3
    assert distance(ours, theirs) < 1e-5


def test_trl_decays_weights_without_a_gradient_and_the_default_does_not(tmp_path):
    def trained(trainer_class) -> GRPOTrainer:
        args = tiny.config(tmp_path, strategy="exact", optim="adamw_torch", weight_decay=0.1)
        trainer = trainer_class(
            model=tiny.model(),
            reward_funcs=lambda completions, **kwargs: [1.0] * len(completions),
            args=args,
            train_dataset=tiny.prompts(17),
            processing_class=tiny.tokenizer(),
        )
        trainer.train()
        return trainer

    assert moved(trained(GRPOTrainer)) > 1e-4
    ours = trained(LZEGRPOTrainer)
    assert moved(ours) == 0.0
    assert ours.ledger.skipped_updates == 3


# ---- Messages ----


def messages() -> list[str]:
    """Strings of the package, with NUL for each value that is put in."""
    found = []
    for path in (ROOT / "lze_trl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%[\d.]*[sdgrf]", "\0", node.value))
    return found


# ---- Papers ----


# ---- Gradients ----
