"""The console command: what it starts, and how it tells what is wrong."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import tiny
from benchmarks.synthetic import SyntheticTraining, record_synthetic_run
from lze_trl import __version__
from lze_trl.job import cli
from lze_trl.job.recipe import KEYS, parse_recipe


ROOT = Path(__file__).resolve().parents[1]


def command_of(*arguments):
    namespace, flags = cli.build_parser().parse_known_args(arguments)
    return cli.launch_command(namespace, flags)


def test_train_hands_everything_else_to_the_job():
    command, environment = command_of("train", "r.yaml", "--learning_rate", "1e-5", "--packing=false", "--no_bf16")
    assert command[:4] == [sys.executable, "-m", "lze_trl.job.launcher", "--quiet"]
    assert command[-8:] == [
        *("-m", "lze_trl.job.train", "--config", "r.yaml"),
        *("--learning_rate", "1e-5", "--packing=false", "--no_bf16"),
    ]
    assert environment == {}


def test_train_finds_accelerate_configs_by_name_and_path(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    command, environment = command_of("train", "r.yaml", "--accelerate_config", "zero3", "--num_processes", "4")
    assert command[4:6] == ["--config_file", str(ROOT / "accelerate_configs" / "zero3.yaml")]
    assert command[6:8] == ["--num_processes", "4"]
    assert environment == {}
    command, environment = command_of(
        "train", "r.yaml", "--accelerate-config", str(ROOT / "accelerate_configs" / "zero3_cpu.yaml")
    )
    assert environment == {"DS_ACCELERATOR": "cpu"}


def test_unknown_accelerate_config_names_the_known_ones():
    with pytest.raises(cli.CommandError, match=r"no accelerate configuration `zero4`\. Use one of \['ddp', .*'zero3'"):
        cli.find_accelerate_config("zero4")


def test_train_replaces_this_process(monkeypatch):
    started = {}
    monkeypatch.setattr(os, "execve", lambda path, command, environment: started.update(command=command))
    monkeypatch.chdir(ROOT)
    cli.main(["train", "recipes/demo/lze.yaml", "--max_steps", "3"])
    assert started["command"][-4:] == ["--config", "recipes/demo/lze.yaml", "--max_steps", "3"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "recipes/demo/lzee.yaml"], "error: There is no recipe `recipes/demo/lzee.yaml`. Did you mean"),
        (["train", "recipes/demo/lze.yaml", "--pakcing", "false"], "error: Unknown flag `--pakcing`. Did you mean"),
        (["train", "recipes/demo/lze.yaml", "--accelerate_config", "x"], "error: There is no accelerate config"),
        (["train", "train.py"], "error: `train.py` is a Python script, and a recipe is a YAML file. Start a script"),
        (["train", "accelerate_configs/zero3.yaml"], "error: `accelerate_configs/zero3.yaml` is a configuration of"),
        (
            ["train", "recipes/demo/lze.yaml", "--accelerate_config", "recipes/demo/lze.yaml"],
            "error: `recipes/demo/lze.yaml` is no configuration of accelerate",
        ),
        (["demo", "--max_stepz", "3"], "error: Unknown flag `--max_stepz`. Did you mean `--max_steps`"),
    ],
)
def test_errors_have_no_traceback(monkeypatch, arguments, message):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as error:
        cli.main(arguments)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data", "x.jsonl", "--limit", "0"], "--limit: must be at least 1, got 0"),
        (["data", "x.jsonl", "--limit", "many"], "--limit: invalid int value: 'many'"),
        (["data", "x.jsonl", "--near", "1.5"], "--near: must be in (0, 1], got 1.5"),
        (["app", "--port", "99999"], "--port: must be between 1 and 65535, got 99999"),
        (["analyze", "run", "--selection_ratio", "2"], "--selection_ratio: must be in (0, 1], got 2"),
        (["analyze", "run", "--selection_ratio", "-1"], "--selection_ratio: must be in (0, 1], got -1"),
        (["analyze", "run", "--selection_ratio", "nan"], "--selection_ratio: must be in (0, 1], got nan"),
    ],
)
def test_numbers_out_of_range_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        cli.main(arguments)
    assert error.value.code == 2
    assert capsys.readouterr().err.endswith(f"error: argument {message}\n")


def test_data_counts_duplicates_and_unreadable_answers(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    answers = ["Two. #### 2", "Two. #### 2", None, "None. #### }", "Five. #### 5"]
    rows = [{"question": f"{answer}?", "answer": answer} for answer in answers]
    Path("sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    cli.main(["data", "sums.jsonl", "--limit", "4"])
    lines = capsys.readouterr().out.splitlines()
    heading = next(line.split() for line in lines if "repeated" in line)
    counts = dict(zip(heading, next(line.split() for line in lines if "sums.jsonl" in line), strict=True))
    wanted = {"rows": "4", "repeated": "1", "conflicts": "0", "value": "2", "text": "0", "none": "1", "unread": "1"}
    assert {name: counts[name] for name in wanted} == wanted
    assert "sums.jsonl: unreadable: '}'" in lines


def test_data_lists_problems_that_resemble_a_task(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    ours = ["Ann has 3 red apples and 4 green apples. How many has she?", "What is the square of 12?"]
    ours += ["Ann has 5 red apples and 4 green apples. How many has she?", "How far is it to the moon?"]
    theirs = ["Ann has 3 red apples and 4 green apples. How many has she?", "Factor 1001 into primes."]
    for name, texts in (("train", ours), ("more", ours[3:]), ("held_out", theirs)):
        rows = [{"question": text, "answer": "7", "set": name} for text in texts]
        Path(f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    against = ["--against", "held_out.jsonl"]
    cli.main(["data", "train.jsonl", "more.jsonl", *against])
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "held_out" in line]
    assert rows == [["train.jsonl", "held_out", "4", "1", "1"], ["more.jsonl", "held_out", "1", "0", "0"]]
    lines = [json.loads(line) for line in Path("contamination.jsonl").read_text().splitlines()]
    common = {"dataset": "train.jsonl", "task": "held_out", "problem": theirs[0]}
    # One of 15 tokens differs
    assert [line.pop("similarity") for line in lines] == [1.0, pytest.approx(14 / 15)]
    assert lines == [common | {"training": ours[0]}, common | {"training": ours[2]}]
    cli.main(["data", "train.jsonl", *against, "--near", "0.95", "--prompt_column", "question"])
    (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if "held_out" in line]
    assert row[2:] == ["4", "1", "0"]
    # What cannot be read does not hide the others
    with pytest.raises(SystemExit, match=r"1 of 2 data sets cannot be read"):
        cli.main(["data", "none.jsonl", "train.jsonl", *against])
    assert ["train.jsonl", "held_out", "4", "1", "1"] in [
        line.split() for line in capsys.readouterr().out.splitlines()
    ]
    with pytest.raises(SystemExit, match=r"2 of 2 data sets cannot be read"):
        cli.main(["data", "none.jsonl", "neither.jsonl", *against])
    with pytest.raises(SystemExit, match=r"error: Unknown task 'gsm8'\. Did you mean 'gsm8k'"):
        cli.main(["data", "train.jsonl", "--against", "gsm8"])
    with pytest.raises(SystemExit, match=r"error: `--near` says what resembles the tasks of `--against`, and none is"):
        cli.main(["data", "train.jsonl", "--near", "0.9"])


def test_data_tells_what_it_cannot_read(tmp_path):
    with pytest.raises(SystemExit, match=r"error: .*none\.jsonl"):
        cli.main(["data", str(tmp_path / "none.jsonl")])


def test_data_tells_of_each_source_what_it_holds_or_what_is_wrong(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    Path("good.jsonl").write_text('{"body": "Two and two.", "question": "Sum?", "answer": "4"}\n')
    Path("cut.jsonl").write_text('{"question": "Sum?", "ans')
    Path("more.jsonl").write_text('{"question": "Product?", "answer": "4"}\n')
    with pytest.raises(SystemExit) as error:
        cli.main(["data", "cut.jsonl", "good.jsonl", "none.jsonl", "more.jsonl"])
    assert error.value.code == "error: 2 of 4 data sets cannot be read; see above."
    lines = capsys.readouterr().out.splitlines()
    words = [line.split() for line in lines if ".jsonl" in line]
    assert {row[0]: row[1] for row in words if not row[0].endswith(":")} == {
        "cut.jsonl": "error",
        "good.jsonl": "1",
        "none.jsonl": "error",
        "more.jsonl": "1",
    }
    assert "good.jsonl: problem from body + question, gold answer from answer" in lines
    assert any(line.startswith("cut.jsonl: error: 'cut.jsonl' cannot be read") for line in lines)
    assert any(line.startswith("none.jsonl: error: There is no file or folder") for line in lines)


@pytest.mark.parametrize("prefix", ["--", "--dataset_"])
def test_the_columns_that_an_error_of_data_advises_to_name_can_be_named(prefix, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    row = {"task": "Which?", "facts": "Two.", "x": "1", "y": "2", "meta": {"gold": "2"}, "options": "none"}
    Path("own.jsonl").write_text(json.dumps(row) + "\n")
    flags, advised = [], []
    values = {
        "prompt_column": ["task"],
        "answer_column": ["meta.gold"],
        "option_columns": ["x", "y"],
    }
    for _ in values:
        with pytest.raises(SystemExit) as error:
            cli.main(["data", "own.jsonl", *flags])
        (setting,) = {name for name in values if f"`{name}` (in a recipe, `dataset_{name}`)" in error.value.code}
        advised.append(setting)
        flags += [f"{prefix}{setting}", *values[setting]]
    assert sorted(advised) == sorted(values)
    cli.main(["data", "own.jsonl", *flags, f"{prefix}context_columns", "facts"])
    out = capsys.readouterr().out
    assert "problem from facts + task, options from x + y, gold answer from meta.gold (texts of options" in out
    cli.main(["data", "own.jsonl", *flags[:-3], f"{prefix}option_columns"])
    assert "own.jsonl: problem from task, gold answer from meta.gold\n" in capsys.readouterr().out


def test_report_of_a_run_is_written(tmp_path, capsys):
    record_synthetic_run(tmp_path / "run", SyntheticTraining(num_prompts=8, groups_per_batch=3), generations=2)
    cli.main(["report", str(tmp_path / "run")])
    path = tmp_path / "run" / "report" / "report.html"
    assert capsys.readouterr().out == f"{path}\n"
    assert "6 groups trained on" in path.read_text(encoding="utf-8")


def test_report_of_no_run_is_an_error(tmp_path):
    with pytest.raises(SystemExit, match="error: "):
        cli.main(["report", str(tmp_path)])


def test_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lze_trl.app.report", None)
    with pytest.raises(SystemExit, match=r"needs `lze_trl.app.report`.*pip install -e '\.\[app\]'"):
        cli.main(["report", "run"])


def test_a_defect_keeps_its_traceback(monkeypatch):
    def fail(references, **settings):
        raise KeyError("a defect")

    monkeypatch.setattr("lze_trl.data.audit.audit", fail)
    with pytest.raises(KeyError, match="a defect"):
        cli.main(["data", "x.jsonl"])


def test_commands_that_take_no_flags_refuse_them(capsys):
    with pytest.raises(SystemExit) as error:
        cli.main(["report", "run", "--max_steps", "3"])
    assert error.value.code == 2
    assert "unrecognized arguments: --max_steps 3" in capsys.readouterr().err


def test_a_recipe_in_the_place_of_a_command_is_told(capsys):
    with pytest.raises(SystemExit) as error:
        cli.main(["recipes/demo/lze.yaml", "--max_steps", "3"])
    assert error.value.code == 2
    assert (
        "is a recipe, not a command. Train by it with `lze-trl train recipes/demo/lze.yaml`" in capsys.readouterr().err
    )


COMMANDS = ("train", "demo", "data", "self-instruct", "app", "analyze", "eval", "report")
WRONG = {
    "train none.yaml": "There is no recipe `none.yaml`",
    "train none.yaml --learning_rate -1e-5 --dry_run": "There is no recipe `none.yaml`",
    "self-instruct none.yaml --count 1 --output o.jsonl": "There is no recipe `none.yaml`",
    "data none.jsonl --against gsm8k": "There is no file or folder 'none.jsonl'",
    "app none": "`none` is neither a directory nor",
    "analyze none": "There are no TRL logs in `none`",
    "eval ./none --tasks gsm8k": "There is no model folder `./none`",
    "eval . --compare runs/none/x --tasks gsm8k": "There is no model folder `runs/none/x`",
    "eval . --tasks none.jsonl": "There is no file or folder 'none.jsonl'",
    "eval . --tasks gsm8k --contamination none.jsonl": "There is no file or folder 'none.jsonl'",
    "report none": "There is no run at `none`",
}
# Runs commands one after the other, and says which of them has imported what takes seconds
IMPORTING = """
import contextlib, io, sys
from lze_trl.job.cli import main
for command in sys.argv[1:]:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        try:
            main(command.split())
        except SystemExit as end:
            sys.stderr.write(f"{command}: {end.code or ''}\\n")
    found = sorted({"torch", "transformers", "gradio"} & set(sys.modules))
    if found or (command.endswith("--help") and not shown.getvalue().startswith("usage: ")):
        sys.exit(f"`{command}` has imported {found}, or shows no help")
"""


def test_help_and_wrong_paths_need_no_library_that_takes_seconds_to_import(tmp_path):
    commands = ["--help", *(f"{command} --help" for command in COMMANDS), *WRONG]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", IMPORTING, *commands],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    for command, message in WRONG.items():
        assert re.search(rf"^{re.escape(command)}: error: .*{re.escape(message)}", ended.stderr, re.M), ended.stderr


def test_version_and_help_are_complete():
    text = cli.build_parser().format_help()
    assert all(name in text for name in COMMANDS)
    shown = subprocess.run(
        [sys.executable, "-m", "lze_trl.job.cli", "--version"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == f"lze-trl {__version__}"


def test_a_port_in_use_is_told():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            SystemExit, match=rf"^error: Cannot listen on port {port} of 127\.0\.0\.1 .*Give another `--port`"
        ):
            cli.main(["app", "--port", str(port)])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--learning_rate", "-1e-5"], r"`learning_rate` must be in \[0, inf\), got -1e-05\."),
        (["--learning_rate=-1e-5"], r"`learning_rate` must be in \[0, inf\), got -1e-05\."),
        (["--temperature", "-1"], r"`temperature` must be in \(0, inf\), got -1\.0\."),
        (["--top_p", "1.5"], r"`top_p` must be in \(0, 1\], got 1\.5\."),
        (["--max_completion_length", "0"], r"`max_completion_length` must be in \[1, inf\), got 0"),
        (["--model_name_or_path", "./none"], r"There is no model folder `\./none`"),
    ],
)
def test_flags_out_of_range_are_refused_before_anything_is_loaded(tmp_path, flags, message):
    keys = {"model_name_or_path": "me/no-model", "datasets": ["none.jsonl"], "output_dir": str(tmp_path / "run")}
    with pytest.raises(SystemExit, match=f"^error: {message}"):
        cli.main(["train", tiny.recipe(tmp_path, **keys), "--dry_run", *flags])


def test_a_dry_run_needs_no_accelerator(tmp_path, capsys):
    """As on the login node of a cluster, which has none."""
    keys = tiny.job(tmp_path, train=12) | {"use_cpu": False, "bf16": True, "tf32": True}
    cli.main(["train", tiny.recipe(tmp_path, **keys), "--dry_run"])
    shown = capsys.readouterr().out
    assert re.search(r"^bf16 +True ", shown, re.M)
    assert re.search(r"^tf32 +True ", shown, re.M)
    assert "use_cpu" not in shown
    assert re.search(r"^optimizer steps +4$", shown, re.M)


def test_the_keys_of_a_recipe_are_listed(capsys):
    with pytest.raises(SystemExit) as end:
        parse_recipe(["--help"])
    assert not end.value.code
    assert {f"--{key}" for key in KEYS} <= set(re.findall(r"--\w+", capsys.readouterr().out))
