"""Pages about migration, errors, papers and gradients: their script runs, and what their tables name exists."""

import ast
import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import yaml
from trl import GRPOTrainer

import tiny
from lze_trl import LZEGRPOConfig, LZEGRPOTrainer
from lze_trl.config import CONTROLLERS, SELECTORS
from lze_trl.evaluation.settings import PRESETS
from lze_trl.job.recipe import KEYS
from lze_trl.rewards.named import MAJORITY, REWARDS, SOFT_OVERLONG
from lze_trl.strategies import DEFAULT, MOVED, STRATEGIES, settings_of
from test_docs_choosing import code
from test_laws import distance, moved


ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = ["migrate.md", "troubleshooting.md", "papers.md", "energy-and-gradients.md"]
SITE = {
    path.relative_to(ROOT).as_posix(): path
    for folder in (".", "app", "benchmarks/**", "docs", "recipes/**")
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


@pytest.mark.parametrize("page", SITE)
def test_rows_of_a_table_have_the_cells_of_its_heading(page):
    text = re.sub(r"```.*?```", "", SITE[page].read_text(encoding="utf-8"), flags=re.S)
    for heading, body in re.findall(r"^(\|.*)\n\|[-:| ]+\|\n((?:.+\n)*)", text, re.M):
        cells = {len(re.split(r"(?<!\\)\|", line)) for line in (heading, *body.splitlines())}
        assert len(cells) == 1, heading


@pytest.mark.parametrize("page", [page for page in SITE if page.startswith("docs/")])
def test_the_readme_lists_the_page(page):
    assert f"]({page})" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_site_has_every_page_once():
    def entries(nav) -> list[str]:
        if isinstance(nav, str):
            return [nav]
        return [page for entry in (nav.values() if isinstance(nav, dict) else nav) for page in entries(entry)]

    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(entries(settings["nav"])) == sorted(SITE)


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


def test_the_default_is_the_one_described():
    assert DEFAULT == "exact"
    assert settings_of(DEFAULT)["loss_normalizer"] == "all"
    assert settings_of("lze")["selection_ratio"] == 0.4
    assert settings_of("reinforce_ada")["scale_rewards"] == "none"


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


def quoted(page: str) -> list[str]:
    """Messages that a page quotes; … stands for a value."""
    return [text for row in rows(page) for cell in row for text in re.findall(r"“([^”]+)”", cell)]


@pytest.mark.parametrize(("page", "at_least"), [("migrate.md", 10), ("troubleshooting.md", 20)])
def test_messages_are_those_of_the_package(page, at_least):
    known = "\n".join(messages())
    quotes = quoted(page)
    assert len(quotes) >= at_least
    missing = [quote for quote in quotes if quote.replace("…", "\0") not in known]
    assert missing == []


def test_every_row_of_troubleshooting_says_what_to_do():
    table = rows("troubleshooting.md")
    assert 12 <= len(table) <= 30
    for row in table:
        assert len(row) == 4
        assert all(row[1:]), row


# ---- Papers ----


def test_every_method_is_among_the_papers():
    page = read("papers.md")
    assert set(re.findall(r"`strategy: (\w+)`", page)) == set(STRATEGIES)
    assert set(re.findall(r"`selector: (\w+)`", page)) == set(SELECTORS) - {"all"}
    assert set(re.findall(r"`controller: (\w+)`", page)) == set(CONTROLLERS) - {"uniform"}
    assert set(re.findall(r"`planner: (\w+)`", page)) == set(literals(HINTS["planner"]))
    assert set(re.findall(r"`advantage_estimator: (\w+)`", page)) == set(literals(HINTS["advantage_estimator"]))


def test_every_paper_is_among_the_papers():
    page = {arxiv for arxiv, _ in ARXIV.findall(read("papers.md"))}
    others = {arxiv for path in DOCS.glob("*.md") for arxiv, _ in ARXIV.findall(path.read_text(encoding="utf-8"))}
    assert page == others
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["references"]
    assert {reference["url"].rpartition("/")[2] for reference in cited} <= page


def test_a_method_was_measured_or_not():
    methods = [row for row in rows("papers.md") if len(row) == 4]
    assert len(methods) > 20
    for _, paper, _, measured in methods:
        assert ARXIV.fullmatch(paper) or paper in ("ours", "ours, the control", "the same", "a variation of the same")
        assert measured in ("not measured", "–") or ".md" in measured


# ---- Gradients ----


def test_correlations_are_those_that_were_kept():
    kept = (ROOT / "benchmarks" / "results" / "gradients" / "results.md").read_text(encoding="utf-8")

    def correlations(size: int) -> dict[str, list[str]]:
        """Means of the columns of the page, by score."""
        (body,) = re.findall(rf"### Over the training: live groups, G = {size}\n\n\|.*\n\|.*\n((?:\|.*\n)+)", kept)
        cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in body.splitlines()]
        return {row[0].strip(): [row[i].split()[0] for i in (2, 4, 5)] for row in cells}

    by_size = [correlations(size) for size in (4, 8, 16)]
    table = [row for row in rows("energy-and-gradients.md") if len(row) == 4]
    assert len(table) == 8
    for score, *cells in table:
        assert [cell.split(" / ") for cell in cells] == [
            list(column) for column in zip(*(of[score] for of in by_size), strict=True)
        ]
