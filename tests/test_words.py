"""What pages say: numbers stand in kept tables, terms are linked, commands and flags exist, links lead somewhere."""

import argparse
import json
import re
import statistics
from dataclasses import fields
from pathlib import Path

import pytest
from trl import ModelConfig

from benchmarks.strategies import STRATEGIES as MEASURED
from lze_trl import LZEGRPOConfig
from lze_trl.job import cli
from lze_trl.job.parts import LZEScriptArguments
from lze_trl.strategies import STRATEGIES
from test_docs_blocks import PAGES, ROOT


LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")
BELOW = ("0.0 (below 0.05 in every seed)", "+0.0 (−0.0 to +0.0)")  # in words, and as the kept tables write it
BASELINE = re.compile(r"\]\((\S+tables\.md)\), (\d+) steps[^:|]*: (0\.\d+) → (0\.\d+)")
TITLES = {name: MEASURED[name].title.split(",")[0].split(":")[0] for name in STRATEGIES} | {"gate": "gate"}


def prose(page: str) -> str:
    """A page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", PAGES[page].read_text(encoding="utf-8"), flags=re.M | re.S)


def rows(page: str) -> list[list[str]]:
    """The rows of all tables of a page. A first or second cell that is empty repeats the one above."""
    found: list[list[str]] = []
    for line in prose(page).splitlines():
        if line.startswith("|"):
            row = [cell.strip() for cell in line.split("|")[1:-1]]
            above = found[-1] if found and len(found[-1]) == len(row) else row
            found.append([above[i] if i < 2 and not cell else cell for i, cell in enumerate(row)])
    return found


def numbers(text: str) -> list[str]:
    """All numbers; a difference that rounds to 0 has no sign."""
    return [re.sub(r"^[-+](?=0\.0+$)", "", number) for number in re.findall(r"[-+]?\d[\d,.]*", text.replace("−", "-"))]


def kept(page: str, link: str) -> Path:
    return PAGES[page].parent / link


@pytest.mark.parametrize(("page", "least"), [("README.md", 7), ("docs/results.md", 33), ("docs/choose.md", 10)])
def test_numbers_of_a_row_stand_together_in_the_kept_table_that_the_row_links(page, least):
    checked = 0
    for row in rows(page):
        linked = LINK.search(" ".join(row))
        named = {name for name in re.findall(r"`(?:strategy: )?(\w+)", row[1]) if name in STRATEGIES}
        if linked is None or not linked[2].endswith("tables.md") or not named:
            continue
        lines = kept(page, linked[2]).read_text(encoding="utf-8").splitlines()
        cells = [LINK.sub("", cell).replace(*BELOW) for cell in row[2:]]
        shown = {number for cell in cells for number in numbers(cell)}
        (strategy,) = named
        title = TITLES[strategy].lower()
        assert any(shown <= set(numbers(line)) and title in line.lower() for line in lines), row
        checked += 1
    assert checked >= least


@pytest.mark.parametrize(("page", "least"), [("README.md", 5), ("docs/results.md", 5)])
def test_accuracies_of_plain_grpo_before_and_after_are_those_of_the_kept_runs(page, least):
    shown = {
        (kept(page, link), int(steps), before, after)
        for line in prose(page).splitlines()
        for link, steps, before, after in BASELINE.findall(line)
    }
    for path, steps, before, after in shown:
        runs = [json.loads(line) for line in path.with_name("results.jsonl").read_text(encoding="utf-8").splitlines()]
        plain = [run for run in runs if run["settings"]["strategy"] == "grpo" and run["settings"]["steps"] == steps]
        first = [run["curve"][0]["accuracy"]["held_out"]["mean"] for run in plain if run["settings"]["seed"] < 100]
        assert f"{statistics.mean(first):.3f}" == before
        lines = path.read_text(encoding="utf-8").splitlines()
        rows_of_plain = [line for line in lines if re.search(r"\| GRPO \(TRL\)( \[.*\])? \|", line)]
        assert any({str(steps), after} <= set(numbers(line)) for line in rows_of_plain), path
    assert len(shown) >= least


def test_every_strategy_of_choose_has_been_measured():
    named = set(re.findall(r"`(?:strategy: )?(\w+)`", prose("docs/choose.md"))) & STRATEGIES.keys()
    kept = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("benchmarks/results/*/tables.md"))
    assert named >= {"exact", "gate", "lze", "dapo"}
    assert {name for name in named if f"| {MEASURED[name].title}" not in kept} == set()


def test_terms_of_the_glossary_that_the_readme_uses_are_linked():
    terms = re.findall(r"^## (.+)$", prose("docs/glossary.md"), re.M)
    common = {"group", "cost"}  # the first is GRPO's, the second an everyday word
    text = prose("README.md")
    used = re.sub(r"`[^`]*`", "", LINK.sub(r"\1", text)).lower()
    linked = {words.lower() for words, target in LINK.findall(text) if "glossary.md#" in target}
    assert linked
    for term in {name.strip().lower() for heading in terms for name in heading.split(",")} - common:
        assert not re.search(rf"(?<![\w`-]){term}s?(?![\w`-])", used) or {term, f"{term}s"} & linked, term


def test_commands_and_flags_that_pages_name_exist():
    actions = cli.build_parser()._actions
    (commands,) = [action.choices for action in actions if isinstance(action, argparse._SubParsersAction)]
    settings = {field.name for kind in (LZEGRPOConfig, LZEScriptArguments, ModelConfig) for field in fields(kind)}
    for page in PAGES.keys() - {"CHANGELOG.md"}:
        for command, rest in re.findall(r"`lze-trl ([\w-]+)([^`]*)`", prose(page)):
            assert command in commands, f"{page}: lze-trl {command}"
            for flag in re.findall(r"--([\w-]+)", rest):
                assert f"--{flag}" in commands[command]._option_string_actions or flag in settings, f"{page}: --{flag}"


def anchors(page: Path) -> set[str]:
    """Anchors of the headings of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", LINK.sub(r"\1", title).lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", sorted(PAGES))
def test_links_lead_to_files_and_headings(page):
    for text, target in LINK.findall(prose(page)):
        if not target.startswith(("http", "mailto")):
            name, _, anchor = target.partition("#")
            path = (PAGES[page].parent / name).resolve() if name else PAGES[page]
            assert path.exists(), f"[{text}]({target})"
            assert not anchor or path.suffix != ".md" or anchor in anchors(path), f"[{text}]({target})"
