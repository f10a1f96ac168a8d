"""Every code block of the documentation is executed: Python runs, YAML is read as a recipe, commands by what they start."""

import argparse
import contextlib
import importlib.util
import re
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from accelerate.commands.launch import launch_command_parser

import tiny
from benchmarks.strategies import STRATEGIES as BENCHMARKED
from lze_trl.config import SELECTORS
from lze_trl.evaluation.tasks import find_tasks
from lze_trl.job import cli
from lze_trl.job.recipe import KEYS, parse_recipe


ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (".", "app", "benchmarks", "docs", "recipes/**")
PAGES = {path.relative_to(ROOT).as_posix(): path for folder in FOLDERS for path in ROOT.glob(f"{folder}/*.md")}
FENCE = re.compile(r"^(?:<!-- not run: (\w+) -->\n)?```(\w*)\n(.*?)^```$", re.M | re.S)
ON_CPU = ["--bf16", "false", "--use_cpu", "true"]

# Blocks that a comment marks as not run, which no reader sees, and why
NOT_RUN = {"hub": "uploads to the Hub; tests/test_hub.py runs it against a stand-in"}
# Pages whose Python has a test of its own, which knows what must come of it
OWN_TESTS = {"README.md", "docs/agents.md", "docs/choosing.md", "docs/migrate.md"}


class Block(NamedTuple):
    """A code block."""

    page: str
    number: int
    mark: str | None
    language: str
    text: str


def blocks_of(page: str) -> list[Block]:
    found = FENCE.findall(PAGES[page].read_text(encoding="utf-8"))
    return [Block(page, i, mark or None, language, text) for i, (mark, language, text) in enumerate(found)]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def written_in(language: str) -> list:
    """The blocks of a language, as parameters of a test."""
    return [pytest.param(block, id=f"{block.page}-{block.number}") for block in BLOCKS if block.language == language]


def test_every_block_says_what_it_is():
    assert len(BLOCKS) > 50
    assert {block.language for block in BLOCKS} == {"bash", "mermaid", "python", "text", "yaml"}
    for page, path in PAGES.items():
        text = path.read_text(encoding="utf-8")
        assert text.count("```") == 2 * len(blocks_of(page)), page
    assert {block.mark for block in BLOCKS} - {None} == set(NOT_RUN)
    assert all(block.language == "python" for block in BLOCKS if block.mark)


# ---- Python: the blocks of a page one after the other, in a folder with a recorded run ----


@pytest.fixture(scope="module")
def names(tmp_path_factory) -> dict:
    """What pages take for granted: a model, data, a reward, settings, a trainer; and the run `runs/demo/lze` in this folder."""
    folder = tmp_path_factory.mktemp("docs")
    levels = ["easy", "hard"]
    dataset = tiny.prompts(17).map(lambda row, i: {"level": levels[i % 2]}, with_indices=True)
    given = {"model": tiny.save(folder / "model"), "reward": tiny.even_length_reward, "dataset": dataset}
    own = {"telemetry": True, "telemetry_completions": "all"}
    trainer = tiny.run(folder / "runs/demo/lze", dataset=dataset, trainer={"model": given["model"]}, **own)
    (folder / "probe.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\n')
    given |= {"trainer": trainer}
    settings = {"output_dir": "runs/page", "use_cpu": True, "bf16": False, "report_to": "none", "num_generations": 4}
    return given | {"args": trainer.args, "settings": settings | {"per_device_train_batch_size": 12}, "folder": folder}


CAME_OF_IT = {
    "docs/forecast.md": lambda names: len(names["forecast"].sample) == 16,
    "docs/replay.md": lambda names: 0 < names["result"].choices[1].shared <= 1,
    "docs/rewards.md": lambda names: names["trainer"].args.reward_weights == [1.0, 0.0],
    "docs/self-play.md": lambda names: names["Probe"] in map(type, names["trainer"].callback_handler.callbacks),
    "docs/telemetry.md": lambda names: names["totals"]["groups_rolled_out"] == 9,
}
PYTHON = sorted({block.page for block in BLOCKS if block.language == "python"} - OWN_TESTS)


@pytest.mark.parametrize("page", PYTHON)
def test_python_runs(page, names, monkeypatch, capsys):
    monkeypatch.chdir(names["folder"])
    page_names = dict(names)
    for block in blocks_of(page):
        if block.language == "python" and block.mark is None:
            exec(block.text, page_names)
    assert CAME_OF_IT[page](page_names)


# ---- YAML: keys of a recipe ----


@pytest.mark.parametrize("block", written_in("yaml"))
def test_yaml_is_a_recipe(block, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(block.text)
    parse_recipe([str(recipe), *ON_CPU])


# ---- Commands ----


class Parsed(Exception):  # noqa: N818 - no error
    """Raised where a program has read its command line."""


@contextlib.contextmanager
def stopping_after_parsing():
    """Programs end with `Parsed` when they have read their command line, and with an error if they do not know it."""
    parse, depth = argparse.ArgumentParser.parse_known_args, 0

    def parse_known_args(self, args=None, namespace=None):
        nonlocal depth
        depth += 1
        try:
            known, unknown = parse(self, args, namespace)
        finally:
            depth -= 1
        if depth:  # the parser of a subcommand
            return known, unknown
        assert unknown == []
        raise Parsed(known)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_known_args", parse_known_args)
        with pytest.raises(Parsed) as parsed:
            yield (found := {})
        found |= vars(parsed.value.args[0])


def check_module(module: str, arguments: list[str]):
    """A module of `benchmarks` or `recipes` knows these arguments."""
    assert module.partition(".")[0] in ("benchmarks", "recipes")
    is_package = (ROOT / module.replace(".", "/")).is_dir()
    with pytest.MonkeyPatch.context() as patch, stopping_after_parsing() as found:
        patch.setattr(sys, "argv", [module, *arguments])
        importlib.import_module(f"{module}.__main__" if is_package else module).main()
    assert set(found.get("strategies") or []) <= set(BENCHMARKED)


def check_recipe(arguments: list[str]):
    parse_recipe([*arguments, *ON_CPU])


PLACEHOLDERS = {"RECIPE": "recipes/demo/lze.yaml", "KEY": "strategy"}


def check_lze_trl(words: list[str]):
    words = [PLACEHOLDERS.get(word, word) for word in words[1:]]
    if words[-1] == "--help":
        with pytest.raises(SystemExit) as ended:
            cli.build_parser().parse_args(words)
        assert not ended.value.code
        return
    namespace, flags = cli.build_parser().parse_known_args(words)
    if namespace.command is cli._train:
        cli.launch_command(namespace, flags)
        check_recipe(["--config", namespace.recipe, *flags])
    else:
        assert flags == []
    given = vars(namespace)
    assert given.get("key", "strategy") in KEYS
    find_tasks(given.get("tasks") or [])  # refuses unknown ones
    assert set(given.get("selector") or []) <= set(SELECTORS)


def check_accelerate(words: list[str]):
    assert words[1] == "launch"
    launch = launch_command_parser().parse_args(words[2:])
    assert Path(launch.config_file).is_file()
    assert launch.module
    if launch.training_script == "lze_trl.job.train":
        check_recipe(launch.training_script_args)
    else:
        check_module(launch.training_script, launch.training_script_args)


def check_make(words: list[str]):
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in words[1:] if "=" not in target)


CHECKS = {
    "accelerate": check_accelerate,
    "lze-trl": check_lze_trl,
    "make": check_make,
    "python": lambda words: check_module(words[2], words[3:]),
}


def check(command: str):
    """A command line is one that what it starts understands."""
    words = shlex.split(command, comments=True)
    while words and re.match(r"\w+=", words[0]):
        words = words[1:]
    if words and words[0] in CHECKS:
        CHECKS[words[0]](words)


@pytest.mark.parametrize("block", written_in("bash"))
def test_commands_are_understood(block, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    for command in block.text.replace("\\\n", " ").splitlines():
        check(command)
