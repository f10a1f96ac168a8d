"""The demo: its task, its cache, and what it must reach."""

import json

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from lze_trl.job import demo
from lze_trl.job.demo import (
    WarmStart,
    build_tokenizer,
    difficulty_class,
    noisy_examples,
    problems,
    run_demo,
    warm_start,
)


SMALL = WarmStart(steps=2, batch_size=8, hidden_size=16, intermediate_size=32, num_layers=1)


@pytest.mark.parametrize(
    ("a", "b", "expected"), [(12, 34, 0), (17, 25, 1), (60, 45, 2), (55, 45, 3), (99, 99, 3), (10, 10, 0), (50, 50, 2)]
)
def test_difficulty_is_the_number_and_place_of_carries(a, b, expected):
    assert difficulty_class(a, b) == expected


def test_held_out_problems_are_never_trained_on():
    train, held_out = problems(SMALL)
    assert len(train) + len(held_out) == 90 * 90
    assert len(held_out) == SMALL.num_held_out
    assert not set(train) & set(held_out)
    prompts = {example["prompt"] for example in noisy_examples(train, SMALL)}
    assert not prompts & {f"{a}+{b}=" for a, b in held_out}


def test_answers_are_right_first_and_then_wrong_at_the_rate_of_the_class():
    settings = WarmStart(steps=100, batch_size=200)
    examples = noisy_examples(problems(settings)[0], settings)
    assert len(examples) == 20_000
    wrong = {i: [] for i in range(4)}
    for i, example in enumerate(examples):
        a, b = map(int, example["prompt"].rstrip("=").split("+"))
        error = abs(int(example["completion"]) - a - b)
        assert error <= settings.max_error
        if i < 14_000:
            assert error == 0
        else:
            wrong[difficulty_class(a, b)].append(error > 0)
    for i, rate in enumerate(settings.error_rates):
        assert sum(wrong[i]) / len(wrong[i]) == pytest.approx(rate, abs=0.05)


def test_tokenizer_round_trip():
    tokenizer = build_tokenizer()
    ids = tokenizer("47+38=").input_ids
    assert len(ids) == 6
    assert tokenizer.decode(ids) == "47+38="


def test_warm_start_is_cached_and_rebuilt_when_settings_change(tmp_path):
    directory = tmp_path / "demo" / "warm-start"
    assert warm_start(directory, SMALL)
    assert not warm_start(directory, SMALL)
    assert AutoModelForCausalLM.from_pretrained(directory / demo.MODEL_DIR).config.hidden_size == 16
    assert AutoTokenizer.from_pretrained(directory / demo.MODEL_DIR).decode([4, 5]) == "12"
    rows = [json.loads(line) for line in (directory / demo.TRAIN_FILE).read_text().splitlines()]
    assert len(rows) == 90 * 90 - SMALL.num_held_out
    assert all(sum(map(int, row["prompt"].rstrip("=").split("+"))) == int(row["solution"]) for row in rows)

    other = WarmStart(steps=1, batch_size=8, hidden_size=32, intermediate_size=32, num_layers=1)
    assert warm_start(directory, other)
    assert AutoModelForCausalLM.from_pretrained(directory / demo.MODEL_DIR).config.hidden_size == 32
    assert list(directory.parent.iterdir()) == [directory]  # nothing unfinished is left


def test_killed_warm_start_leaves_no_cache(tmp_path, monkeypatch):
    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "train_supervised", killed)
    with pytest.raises(KeyboardInterrupt):
        warm_start(tmp_path / "warm-start", SMALL)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_demo_reaches_its_promise(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "HOME", tmp_path)  # so that no earlier warm start is found
    monkeypatch.setattr(demo, "WARM_START_DIR", tmp_path / "runs" / "demo" / "warm-start")
    monkeypatch.chdir(tmp_path)
    run_demo()
    run = tmp_path / "runs" / "demo" / "lze"
    log = json.loads((run / "trainer_state.json").read_text())["log_history"]
    before, after = [logs["eval_reward"] for logs in log if "eval_reward" in logs]
    ledger = json.loads((run / "lze_state.json").read_text())["parts"]["ledger"]
    assert after - before >= 0.25
    assert ledger["rows_trained"] <= 0.45 * ledger["rows_rolled_out"]
    assert (run / "report" / "summary.png").is_file()
