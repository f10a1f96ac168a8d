"""The console command: what it starts, and what it says when it cannot."""

import json
import re
import sys
from pathlib import Path

import pytest

import tiny
from launches import run_to_end
from lze_trl.job import cli
from lze_trl.job.recipe import KEYS, parse_recipe


ROOT = Path(__file__).resolve().parents[1]


def command_of(*arguments):
    namespace, flags = cli.build_parser().parse_known_args(arguments)
    return cli.launch_command(namespace, flags)


def test_train_hands_everything_else_to_the_job(monkeypatch, tmp_path):
    command, config = command_of("train", "r.yaml", "--learning_rate", "1e-5", "--packing=false", "--no_bf16")
    job = ["-m", "lze_trl.job.train", "--config", "r.yaml"]
    assert command == ["--quiet", *job, "--learning_rate", "1e-5", "--packing=false", "--no_bf16"]
    assert config == {}
    monkeypatch.chdir(tmp_path)
    command, config = command_of("train", "r.yaml", "--accelerate_config", "zero3", "--num_processes", "4")
    path = ROOT / "accelerate_configs" / "zero3.yaml"
    assert command == ["--quiet", "--config_file", str(path), "--num_processes", "4", *job]
    assert config["distributed_type"] == "DEEPSPEED"
    assert command_of("train", "r.yaml", "--accelerate_config", str(path))[1] == config


def test_help_is_shown_for_nothing_and_a_missing_demo_says_how_to_make_it(monkeypatch, capsys, tmp_path):
    cli.main([])
    assert "usage: lze-trl" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="run `make demo` first"):
        cli.main(["eval", "runs/demo/warm-start/model", "--tasks", "gsm8k"])


def test_data_counts_duplicates_and_unreadable_answers(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    answers = ["Two. #### 2", "Two. #### 2", None, "None. #### }", "Five. #### 5"]
    rows = [{"question": f"{answer}?", "answer": answer} for answer in answers]
    Path("sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    Path("one.jsonl").write_text(f"{json.dumps(rows[0])}\n")
    cli.main(["data", "sums.jsonl", "one.jsonl", "--limit", "4"])
    heading, first, second, *lines = capsys.readouterr().out.splitlines()
    assert heading.split() == ["dataset", "rows", "repeated", "shared", "none", "unread", "stand-in", "prompt"]
    assert first.split() == ["sums.jsonl", "4", "1", "0", "1", "1", "0", "5/12/13/13"]
    assert second.split()[:7] == ["one.jsonl", "1", "0", "1", "0", "0", "0"]
    assert "sums.jsonl: cannot be read: '}'" in lines


def test_data_counts_what_no_completion_can_answer_or_no_model_can_read(monkeypatch, tmp_path, capsys, caplog):
    monkeypatch.chdir(tmp_path)
    golds = ["5", "See figure.", "???", "see figure", "a graph"]
    rows = [{"problem": "How? " * (20 if gold == "5" else 1), "answer": gold} for gold in golds]
    Path("some.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    cli.main(["data", "some.jsonl", "--model", tiny.save("model")])
    _, counts, *lines = capsys.readouterr().out.splitlines()
    assert counts.split()[:7] == ["some.jsonl", "5", "0", "0", "0", "0", "3"]
    assert "some.jsonl: is no answer: '???'" in lines
    assert "some.jsonl: 1 prompts leave no room in a context of 64 tokens, such as rows [0]" in lines
    assert "3 gold answers only stand where one should be" in caplog.text


def test_data_shows_what_a_source_holds_or_what_is_wrong(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    row = {"task": "Which?", "facts": "Two.", "list": ["1", "2"], "meta": {"gold": "2"}}
    Path("good.jsonl").write_text(json.dumps(row) + "\n")
    columns = ["--prompt_column", "task", "--answer_column", "meta.gold", "--context_columns", "facts"]
    cli.main(["data", "good.jsonl", *columns, "--option_column", "list"])
    out = capsys.readouterr().out
    assert "problem from facts + task, options from list, gold answer from meta.gold" in out
    with pytest.raises(SystemExit, match=r"error: .*`prompt_column` \(in a recipe, `dataset_prompt_column`\)"):
        cli.main(["data", "good.jsonl"])


def test_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lze_trl.app.report", None)
    with pytest.raises(SystemExit, match=r"needs `lze_trl.app.report`.*pip install 'lze-trl\[app\]'"):
        cli.main(["report", "run"])


WRONG = {
    "train none.yaml": "There is no recipe `none.yaml`",
    "data none.jsonl": "There is no file or folder 'none.jsonl'",
    "app none": "`none` is neither a directory nor",
    "forecast none": "There is no recipe `none`",
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


def test_help_and_wrong_paths_need_no_library_that_takes_seconds_to_import():
    names = "train", "data", "app", "forecast", "eval", "report"
    commands = ["--version", "--help", *(f"{name} --help" for name in names), *WRONG]
    env = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    ended = run_to_end([sys.executable, "-c", IMPORTING, *commands], env=env)
    for command, message in WRONG.items():
        assert re.search(rf"^{re.escape(command)}: error: .*{re.escape(message)}", ended.stderr, re.M), ended.stderr


def test_the_keys_of_a_recipe_are_listed_ours_first_with_true_defaults(capsys):
    with pytest.raises(SystemExit) as end:
        parse_recipe(["--help"])
    assert not end.value.code
    shown = capsys.readouterr().out
    keys = re.findall(r"^  --(\w+)", shown, re.M)
    assert set(keys) >= KEYS
    assert max(map(keys.index, ("datasets", "strategy", "summary"))) < keys.index("learning_rate")
    assert not re.search(r"\(default:\s+None\)", shown) and len(shown.splitlines()[0]) < 80
