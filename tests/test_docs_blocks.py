"""Every code block of the documentation is executed: Python runs, YAML is read as a recipe, commands by what they start."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser

import tiny
from lze_trl.evaluation.tasks import find_tasks
from lze_trl.job import cli
from lze_trl.job.recipe import parse_recipe


ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (".", "app", "benchmarks", "docs", "recipes/**")
PAGES = {path.relative_to(ROOT).as_posix(): path for folder in FOLDERS for path in ROOT.glob(f"{folder}/*.md")}
FENCE = re.compile(r"^(?:<!-- not run: (\w+) -->\n)?```(\w*)\n(.*?)^```$", re.M | re.S)
ON_CPU = ["--bf16", "false", "--use_cpu", "true"]

# Pages whose Python has a test of its own, which knows what must come of it
OWN_TESTS = {"README.md", "docs/agents.md", "docs/strategies.md", "docs/migrate.md"}


def blocks_of(page: str, language: str) -> list[str]:
    """The code blocks of a page in a language, without those that are marked as not run."""
    found = FENCE.findall(PAGES[page].read_text(encoding="utf-8"))
    return [text for mark, own, text in found if own == language and not mark]


def pages_in(language: str, without: set[str] = frozenset()) -> pytest.MarkDecorator:
    """Runs a test for each page that has blocks in a language."""
    pages = sorted(page for page in PAGES.keys() - without if blocks_of(page, language))
    return pytest.mark.parametrize("page", pages)


@pytest.fixture(scope="module")
def names(tmp_path_factory) -> dict:
    """What pages take for granted: a model, data, a reward, settings, a trainer; and the run `runs/demo/lze` in this folder."""
    folder = tmp_path_factory.mktemp("docs")
    levels = ["easy", "hard"]
    dataset = tiny.prompts(17).map(lambda row, i: {"level": levels[i % 2]}, with_indices=True)
    given = {"model": tiny.save(folder / "model"), "reward": tiny.even_length_reward, "dataset": dataset}
    own = {"telemetry": True, "telemetry_completions": "all", "trainer": {"model": given["model"]}}
    given["trainer"] = trainer = tiny.run(folder / "runs/demo/lze", dataset=dataset, **own)
    (folder / "probe.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\n')
    return given | {"args": trainer.args, "settings": tiny.COMMON | {"output_dir": "runs/page"}, "folder": folder}


@pages_in("python", without=OWN_TESTS)
def test_python_runs(page, names, monkeypatch, capsys):
    monkeypatch.chdir(names["folder"])
    page_names = dict(names)
    for block in blocks_of(page, "python"):
        exec(block, page_names)


@pages_in("yaml")
def test_yaml_is_a_recipe(page, tmp_path):
    for block in blocks_of(page, "yaml"):
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(block)
        parse_recipe([str(recipe), *ON_CPU])


def check_lze_trl(words: list[str]):
    words = ["recipes/demo/lze.yaml" if word in ("RECIPE", "lora.yaml") else word for word in words]
    if words[-1] == "--help":
        with pytest.raises(SystemExit) as ended:
            cli.build_parser().parse_args(words)
        assert not ended.value.code
        return
    namespace, flags = cli.build_parser().parse_known_args(words)
    if namespace.command is cli._train:
        cli.launch_command(namespace, flags)
        parse_recipe([namespace.recipe, *flags, *ON_CPU])
    else:
        assert flags == []
    find_tasks(vars(namespace).get("tasks") or [])  # refuses unknown ones


def check(command: str):
    """A command line is one that what it starts understands."""
    words = shlex.split(command, comments=True)
    while words and re.match(r"\w+=", words[0]):
        words = words[1:]
    match words:
        case ["lze-trl", *arguments]:
            check_lze_trl(arguments)
        case ["accelerate", "launch", *arguments]:
            launch = launch_command_parser().parse_args(arguments)
            assert Path(launch.config_file).is_file() and launch.module
            if launch.training_script == "lze_trl.job.train":
                parse_recipe([*launch.training_script_args, *ON_CPU])
        case ["make", *targets]:
            makefile = (ROOT / "Makefile").read_text()
            assert all(re.search(rf"^{target}:", makefile, re.M) for target in targets if "=" not in target)
        case ["python", "-m", module, *_]:
            assert importlib.util.find_spec(module)


@pages_in("bash")
def test_commands_are_understood(page, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    for command in "".join(blocks_of(page, "bash")).replace("\\\n", " ").splitlines():
        check(command)
