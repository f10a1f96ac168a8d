"""The smaller benchmarks: their tasks and data are what they say, and each runs from its command line to its table."""

import json
import sys
from argparse import Namespace

import httpx2
import numpy as np
import pytest
from datasets import Dataset
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench_samples import task_files
from benchmarks import addition, calculator, demo_llm, guard, self_play, shaped, tasks, unseen
from benchmarks.calculator import CalculatorWarmStart
from benchmarks.environment import TwoSums, called, held_out, make_tokenizer, result
from benchmarks.kept import run_all
from benchmarks.parts import overhead, padding, processes
from benchmarks.parts.shared import Lengths
from benchmarks.sampling import STRATEGIES, SamplingRun
from benchmarks.seconds import least_overlapped
from benchmarks.self_play import ARMS, planned, read_results, report
from benchmarks.skills import HELD_OUT_ROWS, MIXES, TRAIN_ROWS, in_words, make_rows
from benchmarks.tasks import CHECKOUT, OF_SKILLS
from benchmarks.timed_server import Timing, dead_share, on_paper, serving
from launches import run_to_end
from lze_trl import LZEGRPOConfig
from lze_trl.pack.layout import Geometry
from test_bench_gradients import SMALL


def test_the_calculator_task_is_made_from_gsm8k(tmp_path):
    for name, numbers in (("train", range(12)), ("test", range(9, 21))):
        answers = [f"It is <<{i}*2={2 * i}>>{2 * i}.\n#### {2 * i}" for i in numbers]
        Dataset.from_dict({"question": ["How many?"] * 12, "answer": answers}).to_json(tmp_path / f"{name}.jsonl")
    small = CalculatorWarmStart(steps=2, batch_size=4, hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2)
    output = tmp_path / "calculator"
    accuracy = calculator.make(str(tmp_path), output, small)
    assert all(0.0 < value < 0.1 for value in accuracy.values())
    assert AutoModelForCausalLM.from_pretrained(output / "model").config.hidden_size == 16
    assert len(AutoTokenizer.from_pretrained(output / "model")("1+1=").input_ids) == 4
    rows = {name: calculator.read_rows(output / f"{name}.jsonl") for name in ("train", "test")}
    assert len(rows["train"]) == 6
    assert {row["prompt"] for row in rows["test"]} == {f"{i}*2=" for i in range(12, 21)}
    assert json.loads((output / "settings.json").read_text())["accuracy"] == accuracy
    assert not list(tmp_path.glob("*.unfinished*"))


ANSWERS = {
    "extreme": lambda name, *numbers: str({"max": max, "min": min}[name](map(int, numbers))),
    "count": lambda first, to, last: " ".join(str(i) for i in range(int(first), int(last[:-1]) + 1)),
    "add": lambda left, plus, right: str(int(left) + int(right)),
    "reverse": lambda name, letters: letters[::-1],
}
ANSWERS["long_count"] = ANSWERS["count"]


@pytest.mark.parametrize("task", MIXES)
def test_prompts_are_seeded_and_answers_are_true(task):
    assert set(OF_SKILLS) == set(MIXES)
    rows = make_rows(task, TRAIN_ROWS, seed=1)
    assert rows == make_rows(task, TRAIN_ROWS, seed=1) != make_rows(task, TRAIN_ROWS, seed=2)
    prompts = {row["prompt"] for row in rows}
    assert len(prompts) == TRAIN_ROWS
    assert prompts.isdisjoint(row["prompt"] for row in make_rows(task, HELD_OUT_ROWS, 2, frozenset(prompts)))
    counts = {skill: sum(row["skill"] == skill for row in rows) for skill in MIXES[task]}
    assert max(counts.values()) - min(counts.values()) <= 1
    for row in rows:
        question = row["prompt"].splitlines()[-1].removesuffix(" =")
        if row["skill"] == "words":
            assert question == in_words(int(row["solution"]))
        else:
            assert row["solution"] == " " + ANSWERS[row["skill"]](*question.split())


def turn(value):
    call = {"type": "function", "function": {"name": "answer", "arguments": {"value": value}}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def test_the_evaluated_text_is_that_of_the_chat_template():
    tokenizer = make_tokenizer()
    for first, second in zip(*[iter(held_out(5, (1, 2, 3)))] * 2, strict=True):
        sums = first["prompt"][2:-2], second["prompt"].rpartition("t:")[2][:-2]
        messages = [{"role": "user", "content": sums[0]}]
        shown = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert shown == first["prompt"]
        messages += [turn(result(sums[0])), {"role": "tool", "name": "answer", "content": sums[1]}]
        shown = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert shown == second["prompt"]
        assert second["solution"] == called(result(sums[1]))
        assert tokenizer.unk_token_id not in tokenizer(second["prompt"] + second["solution"]).input_ids


@pytest.mark.parametrize(
    ("answers", "told", "reward"),
    [
        (["3", "7"], ["3+4", "!"], 1.0),
        (["3", "8"], ["3+4", "?"], 0.0),
        (["4", "7"], ["?", "?"], 0.0),
        (["3", "7", "7"], ["3+4", "!", "?"], 0.0),
        ([], [], 0.0),
    ],
)
def test_an_episode_of_two_sums(answers, told, reward):
    environment, before = TwoSums(), TwoSums.steps
    environment.reset("1+2", "3+4")
    assert [environment.answer(answer) for answer in answers] == told
    assert environment.get_reward() == reward and TwoSums.steps == before + len(answers)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_rolls_out_32_prompts_for_one_optimizer_step(strategy, tmp_path):
    settings = SamplingRun(strategy, 3, 1000, "x").settings
    args = LZEGRPOConfig(output_dir=str(tmp_path), report_to="none", **settings)
    assert args.generation_batch_size == 32 * args.num_generations
    assert args.steps_per_generation == args.gradient_accumulation_steps


def test_continuous_batching_on_paper():
    timing = Timing(places=2, floor=1.0, per_sequence=0.75)  # one sequence takes 1 s a step, two take 1.5 s
    assert on_paper(timing, [[3]]) == 3.0
    assert on_paper(timing, [[3, 1]]) == 1 * 1.5 + 2 * 1.0
    # The third waits for a place, the second leaves it after one step, and it ends with the first or after it
    assert on_paper(timing, [[3, 1], [2]]) == 3 * 1.5
    assert on_paper(timing, [[3, 1], [4]]) == 3 * 1.5 + 2 * 1.0
    # The same three, the last of which comes when the second has ended; and when the first has
    assert on_paper(timing, [[3], [1]], {1: [2]}) == 3 * 1.5
    assert on_paper(timing, [[3], [1]], {0: [2]}) == 1 * 1.5 + 4 * 1.0


def test_half_of_the_prompts_pass_and_most_groups_are_dead():
    timing = Timing()
    drawn = [timing.completion([prompt], seed, 0) for prompt in range(100) for seed in range(6)]
    assert 0.35 < sum(passed for _, passed, _ in drawn) / len(drawn) < 0.65
    assert all(length >= 1 and logprob <= 0.0 for length, _, logprob in drawn)
    assert dead_share(timing, 8) == pytest.approx(0.79, abs=0.01)
    assert dead_share(timing, 4) > dead_share(timing, 8)


def test_answers_follow_from_prompt_and_seed_and_not_from_their_order():
    def ask(prompt):
        body = {"prompt": [prompt], "n": 3, "seed": 7 * prompt}
        return httpx2.post(f"{url}/v1/completions", json=body).json()["choices"]

    with serving(Timing(scale=1e-6)) as (url, engine):
        assert [ask(prompt) for prompt in range(5)] == [ask(prompt) for prompt in reversed(range(5))][::-1]
        assert engine.tokens == 2 * sum(sum(engine.timing.lengths([p], 7 * p, 3)) for p in range(5))


def test_batches_that_differ_leave_less_to_overlap():
    equal, different = (least_overlapped(Timing(sigma=sigma), 16, 4, 50) for sigma in (0.0, 1.0))
    assert equal == pytest.approx(0.5)
    assert 0.5 < different < 1.0
    assert least_overlapped(Timing(sigma=0.0), 16, 4, 0) == 1.0


def test_a_gate_that_takes_half_the_tokens_for_the_same_accuracies():
    exact = {"accuracy": [0.2, 0.4, 0.6, 0.8], "tokens": [10, 20, 30, 40], "dead_share": [0.5, 0.5]}
    gate = {"tokens": [5, 10, 15, 20], "guard": [0.0, 1.0, 0.0, 1.0], "gate_live_kept": [1.0, 0.9]}
    gate |= {"accuracy": exact["accuracy"], "gate_signal_kept": [1.0, 0.95]}
    found = guard.compared(exact, gate)
    assert (found["price"], found["tokens"], found["difference"]) == (0.5, 0.5, 0.0)
    assert (found["first"], found["stops"], found["decided"]) == (2.0, 1.0, 0.5)
    assert found["at_equal_tokens"] == pytest.approx(100 * (0.6 - 0.3))  # means of three, and `exact` at 20 tokens


@pytest.fixture
def small_model(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "ADDITION_DIR", tmp_path / "warm-start")
    monkeypatch.setattr(addition, "WarmStart", lambda: SMALL)


@pytest.mark.slow
def test_a_shaped_reward_from_the_command_line(tmp_path, small_model):
    shaped.main(["--seeds", "0", "--steps", "10", "--output", str(tmp_path / "out")])
    before = [json.loads(path.read_text())["result"]["before"] for path in (tmp_path / "out").glob("*.json")]
    assert before == before[:1] * len(shaped.ARMS)  # one model for all
    assert all(title in (tmp_path / "out" / "tables.md").read_text() for title in shaped.TITLES.values())


@pytest.mark.slow
def test_situations_from_the_command_line(tmp_path, small_model):
    scenarios = ["long_tail", "scale"]
    guard.main(["--seeds", "0", "--steps", "5", "--output", str(tmp_path / "out"), "--scenarios", *scenarios])
    assert len([*(tmp_path / "out").glob("*.json")]) == 4
    table = (tmp_path / "out" / "tables.md").read_text()
    assert all(guard.SCENARIOS[name].title in table for name in scenarios)


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_trains_and_is_kept(arm, tmp_path, monkeypatch):
    monkeypatch.setattr(self_play, "locate", lambda task: task_files(tmp_path, range(40), range(30, 60)))
    monkeypatch.setattr(self_play, "EVAL_EVERY", 1)
    options = Namespace(steps=2, learning_rate=1e-4, rows=64, seeds=[0, 0], arms=[arm], output=tmp_path / "out")
    (run,) = planned(options)
    run_all([run], options.output / "runs", self_play.train, Console(quiet=True))
    (kept,) = read_results(options.output)
    found = kept["result"]
    assert [point["step"] for point in found["accuracy"]] == [0, 1, 2]
    assert found["problems"] == {"probe": 5, "held_out": 15, "train": 40}  # of 20 that are not trained on
    assert all(len(values) == 2 for values in found["steps"].values())
    assert 0 < sum(count for *_, count in found["labels"][0]) <= 2 * 8
    report(options.output, Console(quiet=True))
    (options.output / "runs" / run.name).unlink()
    assert read_results(options.output) == [kept]
    assert {path.name for path in options.output.iterdir()} == {"runs", "self_play.png", "tables.md", "results.jsonl"}


def test_the_demo_with_a_language_model_tells_what_both_runs_came_to(tmp_path, monkeypatch):
    lines = (CHECKOUT / "benchmarks" / "results" / "words_float32" / "results.jsonl").read_text("utf-8").splitlines()
    of_seed = [result for result in map(json.loads, lines) if result["settings"]["seed"] == 0]
    kept = {result["settings"]["strategy"]: result for result in of_seed}
    monkeypatch.setattr(demo_llm, "read_results", lambda output: list(kept.values()))
    told = demo_llm.told(tmp_path)
    for strategy, name, line in zip(demo_llm.NAMES, ("plain TRL", "gate"), told[1:3], strict=True):
        last = kept[strategy]["curve"][-1]
        assert name in line and f"{last['accuracy']['held_out']['mean']:.3f} ±" in line
        assert f"after 12 steps, {last['flops']['total']:.1e} FLOPs, {last['rows_rolled_out']:,} completions" in line


def test_tokens_that_trl_computes():
    batch = Lengths(np.array([3, 1, 4, 2]), np.array([1, 9, 2, 2]))  # process 0 pads to 3 + 9, process 1 to 4 + 2
    assert padding.trl_tokens(batch, processes=2) == 2 * (3 + 9) + 2 * (4 + 2)
    assert padding.trl_tokens(batch, processes=1) == 4 * (4 + 9)


def test_real_and_computed_tokens_of_all_processes():
    # Two processes with a row of 10 + 2000 and one of 10 + 30 each: micro-batches of rows of the same length, no padding
    batch = Lengths(np.full(4, 10), np.array([2_000, 30, 30, 2_000]))
    geometry = Geometry(2, steps_per_generation=2, chunk_steps=2, micro_batch_rows=2, further_micro_steps=2)
    rows = np.arange(4)
    layout = padding.packed(batch, rows, geometry)
    assert padding.computed(batch, rows, layout, processes=2) == (4_100, 4_100)
    # In a single micro-step, each process computes 2 × 2010
    single = padding.packed(batch, rows, Geometry(2, 1, 1, 2))
    assert padding.computed(batch, rows, single, processes=2) == (4_100, 8_040)
    assert sorted(layout.rows_of(0).tolist()) == [0, 1]  # each row stays on the process that holds it


def test_completions_of_the_gate_on_several_processes():
    # One prompt × 8 that goes on: 8 completions; on 8 processes 8 first ones, and 8 of which 7 are wanted
    assert processes.completions(1, 8, 1, goes_on=1.0) == pytest.approx(1.0)
    assert processes.completions(1, 8, 8, goes_on=1.0) == pytest.approx(2.0)
    # Of two prompts × 4, half the time one goes on: on two processes 2 + 4, and 2 + 6 or 2 where both or none do
    assert processes.completions(2, 4, 2, goes_on=0.5) == pytest.approx((0.5 * 6 + 0.25 * 8 + 0.25 * 2) / 8)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["padding", "processes", "state", "overlap", "overhead", "sharded"])
def test_quick_measurement(part, tmp_path):
    result = run_to_end([sys.executable, "-m", "benchmarks.parts", part, "--quick", "--output", tmp_path])
    content = json.loads((tmp_path / f"{part}.json").read_text())
    assert content["part"] == part
    text = (tmp_path / f"{part}.md").read_text()
    assert content["date"] in text
    assert text.splitlines()[0] in result.stdout
    if part == "overhead":
        assert set(content["milliseconds"]) == {*overhead.PARTS, "background"}
        assert all(value > 0 for values in content["milliseconds"].values() for value in values)
    if part == "padding":
        # The lengths are log-normal, the rows the same: packing computes fewer tokens than TRL in every draw
        assert all(max(case["computed_tokens"]) < case["share"] for case in content["rows"])
    if part == "sharded":
        methods = content["methods"]
        assert max(methods["default"]["passes"]) < min(methods["trl"]["passes"])
        assert max(methods["default"]["computed_tokens"]) < min(methods["trl"]["computed_tokens"])


def test_prompts_whose_column_tells_are_foreseen_and_others_are_not(tmp_path):
    rng = np.random.default_rng(0)
    for task, told in (("mixed", True), ("skills", False)):
        path = tmp_path / task / unseen.GROUPS_FILE
        path.parent.mkdir()
        dead, shown = rng.random((2, 320)) < 0.5
        outcomes = np.where(dead[:, None], 0.0, rng.permuted(np.tile([0.0, 1.0], (320, 4)), axis=1))
        columns = dead if told else shown
        groups = zip(columns.astype(str).tolist(), outcomes.tolist(), strict=True)
        lines = [{"prompt": "the same", "column": column, "outcomes": values} for column, values in groups]
        path.write_text("\n".join(map(json.dumps, lines)))
    rows = [row.split(" | ") for row in unseen.markdown(tmp_path, [0, 1]).splitlines()[-8:]]
    by_column = [float(row[5].split()[0]) for row in rows if row[3] == "text and column"]
    assert len(rows) == 8 and min(by_column[:2]) > 0.97 and max(by_column[2:]) < 0.6
