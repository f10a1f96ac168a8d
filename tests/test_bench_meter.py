"""The instruments of the benchmark: they measure what is there, and change nothing."""

import json
import math
from itertools import chain

import numpy as np
import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

import tiny
from bench_samples import settings
from benchmarks import run as bench_run
from benchmarks.evaluation import Evaluation, GreedyEvaluation
from benchmarks.meter import Clock, Meter
from benchmarks.strategies import BASELINE, STRATEGIES
from benchmarks.tasks import TaskFiles
from lze_trl import LZEGRPOConfig, LZEGRPOTrainer
from lze_trl.record import open_run
from lze_trl.record.ledger import TokenCost


TRAINING = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "num_generations": 4,
    "generation_batch_size": 12,  # P = 3
    "per_device_train_batch_size": 6,
    "gradient_accumulation_steps": 2,
    "max_completion_length": 5,
    "loss_type": "dapo",
    "scale_rewards": "none",
    "beta": 0.0,
    "lr_scheduler_type": "constant",
}


@pytest.fixture
def files(tmp_path):
    tiny.save(tmp_path / "model")
    for name, rows in (("train", range(7)), ("test", range(20, 31))):
        lines = (json.dumps({"prompt": f"{i}+{i * i}=", "solution": str(i % 10)}) + "\n" for i in rows)
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    return TaskFiles(tmp_path / "model", tmp_path / "train.jsonl", tmp_path / "test.jsonl")


def small(strategy, **changes):
    return settings(strategy, **({"training": TRAINING, "steps": 2, "eval_every": 1, "learning_rate": 1e-2} | changes))


def test_clock_is_in_one_phase_at_a_time(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("benchmarks.meter.time.perf_counter", lambda: now[0])
    clock = Clock()
    for phase, seconds in (("other", 1.0), ("update", 2.0), ("rollout", 4.0)):
        now[0] += 100.0 if clock.phase == "evaluation" else 0.0
        clock.switch(phase)
        now[0] += seconds
    with pytest.raises(KeyError), clock.within("preparation"):
        now[0] += 8.0
        with clock.paused():
            now[0] += 16.0
        raise KeyError
    assert clock.phase == "rollout"
    now[0] += 32.0
    clock.switch("other")
    assert clock.seconds == {
        "rollout": 36.0,
        "logprob": 0.0,
        "update": 2.0,
        "preparation": 8.0,
        "other": 1.0,
        "evaluation": 116.0,
    }


@pytest.mark.parametrize(("strategy", "plain_class"), [("grpo", GRPOTrainer), ("lze_pruned", LZEGRPOTrainer)])
def test_instruments_and_evaluations_change_no_weight(files, tmp_path, strategy, plain_class):
    own = small(strategy)
    rows = [{"prompt": f"{i}+{i * i}=", "solution": str(i % 10)} for i in range(7)]
    trainer = bench_run.build_trainer(own, files, rows, tmp_path / "run")
    trainer.reward_funcs = [tiny.even_length_reward]
    evaluations = {name: Evaluation(rows, trainer.processing_class, 5) for name in ("held_out", "train")}
    recorder = bench_run.Recorder(trainer, own, evaluations, tmp_path / "progress.json")
    trainer.add_callback(recorder)
    trainer.train()
    assert [point["step"] for point in recorder.curve] == [0, 1, 2]

    config_class = GRPOConfig if plain_class is GRPOTrainer else LZEGRPOConfig
    plain = plain_class(
        model=str(files.model),
        reward_funcs=tiny.even_length_reward,
        args=config_class(
            output_dir=str(tmp_path / "plain"),
            learning_rate=1e-2,
            max_steps=2,
            seed=0,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            **TRAINING,
            **own.overrides,
            **({} if plain_class is GRPOTrainer else {"strategy": "lze"}),
        ),
        train_dataset=trainer.train_dataset,
    )
    plain.train()
    before = tiny.model().state_dict()
    after, expected = trainer.model.state_dict(), plain.model.state_dict()
    assert any(not torch.equal(after[name], before[name]) for name in after)
    assert all(torch.equal(after[name], expected[name]) for name in expected)


def test_a_run_on_chat_prompts(files, tmp_path):
    """Messages are trained and evaluated on, and completions are scored by what they work out."""
    own = small("lze", task="word_problems", training=TRAINING | {"generation_batch_size": 12})
    result = bench_run.run(own, files, tmp_path)
    assert [point["step"] for point in result["curve"]] == [0, 1, 2]
    assert result["checks"] == []
    assert all(0.0 <= point["accuracy"]["held_out"]["mean"] <= 1.0 for point in result["curve"])
    trainer = bench_run.build_trainer(own, files, [{"prompt": "1+1=", "solution": "2"}] * 3, tmp_path / "again")
    assert trainer.train_dataset[0]["prompt"] == [{"role": "user", "content": "1+1="}]
    assert trainer.reward_func_names == ["accuracy_reward"]


@pytest.mark.parametrize("answers", [("7", "8"), ("8", "8")])
def test_greedy_accuracy(monkeypatch, answers):
    """The share of the prompts whose greedy completion gives the gold answer, however they are batched."""
    model, tokenizer = tiny.model(), tiny.tokenizer()
    rows = [{"prompt": "2+5=", "solution": "7"}, {"prompt": "what is 4+4 ?", "solution": "8"}]
    completions = iter([tokenizer(text).input_ids for text in answers])

    def generate(input_ids, do_sample, **kwargs):
        assert not do_sample
        return torch.cat([input_ids, torch.tensor([next(completions) for _ in input_ids])], dim=1)

    monkeypatch.setattr(model, "generate", generate)
    found = GreedyEvaluation(rows, tokenizer, 5).accuracy(model)
    assert found["mean"] == sum(a == row["solution"] for a, row in zip(answers, rows, strict=True)) / 2


def test_greedy_accuracy_does_not_depend_on_the_batches(monkeypatch):
    model, tokenizer = tiny.model(), tiny.tokenizer()
    model.generation_config.eos_token_id = None
    rows = [{"prompt": f"{i}+{i * i}=", "solution": ""} for i in range(9)]
    seen = []
    monkeypatch.setattr(
        "benchmarks.evaluation.accuracy_reward", lambda texts, golds: seen.append(texts) or [0.0] * len(texts)
    )
    for batch in (1, 4, 9):
        monkeypatch.setattr("benchmarks.evaluation._BATCH", batch)
        GreedyEvaluation(rows, tokenizer, 5).accuracy(model)
    one, four, nine = (list(chain.from_iterable(part)) for part in (seen[:9], seen[9:12], seen[12:]))
    assert one == four == nine


def test_plain_trl_by_hand(files, tmp_path):
    """Every completion is rolled out and trained on once, and nothing else is computed."""
    result = bench_run.run(small("grpo"), files, tmp_path)
    assert json.loads((tmp_path / "result.json").read_text()) == json.loads(json.dumps(result))
    first, middle, last = result["curve"]
    assert (first["step"], middle["step"], last["step"]) == (0, 1, 2)
    assert first["flops"]["total"] == first["rollout_tokens"] == 0
    assert (middle["rows_rolled_out"], last["rows_rolled_out"], last["rows_trained"]) == (12, 24, 24)
    # Prompts have at least 4 characters, completions at least a token
    assert last["rollout_tokens"] == last["update_tokens"] >= 24 * 5
    assert last["logprob_tokens"] == last["computed_tokens"]["logprob"] == 0
    # The last token of a completion is not fed back when generating, but padding is
    assert last["computed_tokens"]["update"] >= last["update_tokens"]
    cost = result["flops_per_token"]
    assert last["flops"] == {
        "rollout": cost["forward"] * last["rollout_tokens"],
        "logprob": 0.0,
        "update": cost["train"] * last["update_tokens"],
        "total": (cost["forward"] + cost["train"]) * last["update_tokens"],
    }
    seconds = last["seconds"]
    assert min(seconds["rollout"], seconds["update"], seconds["preparation"]) > 0.0
    assert seconds["logprob"] == 0.0
    assert seconds["total"] == pytest.approx(sum(value for name, value in seconds.items() if name != "total"))
    assert [check["step"] for check in result["checks"]] == [0, 2]
    assert result["prompts"] == {"trained on": 7, "held_out": 9, "train": 7}
    assert "host" not in str(result["machine"]) and str(tmp_path) not in json.dumps(result)


@pytest.mark.parametrize(
    ("strategy", "changes"),
    [
        *((name, {}) for name in [name for name in STRATEGIES if name != BASELINE][::3]),
        ("dapo", {"selection_ratio": 0.3}),
    ],
)
def test_meter_and_ledger_agree(files, tmp_path, strategy, changes):
    # Two generation batches of three updates each, so that old log-probabilities are computed
    training = TRAINING | {"generation_batch_size": 24, "per_device_train_batch_size": 4, "beta": 0.1}
    rows = [{"prompt": f"{i}+1=", "solution": "1"} for i in range(9)]
    own = small(strategy, training=training, steps=6, overrides=STRATEGIES[strategy].overrides | changes)
    trainer = bench_run.build_trainer(own, files, rows, tmp_path)
    trainer.reward_funcs = [tiny.even_length_reward]
    trainer.train()
    meter, ledger = trainer.meter, trainer.ledger
    assert ledger.rows_trained > 0
    assert meter.rows_rolled_out == ledger.rows_rolled_out
    assert meter.rows_trained == ledger.rows_trained
    generations = open_run(tmp_path / "trainer").generations()
    assert meter.live_groups == (generations.groups - generations.dead).sum() > 0
    assert meter.tokens == {
        "rollout": ledger.rollout_tokens,
        "logprob": ledger.logprob_tokens,
        "update": ledger.update_tokens,
    }
    assert all(meter.computed_tokens[phase] >= meter.tokens[phase] for phase in ("logprob", "update"))


def test_a_run_goes_on_until_it_has_cost_as_much_as_the_baseline():
    # The baseline: 2 steps of 12 completions of 10 tokens, 8 FLOPs each: 1920
    meter, cost = Meter(), TokenCost(forward=2.0, train=6.0)
    meter.rows_rolled_out, meter.tokens["rollout"], meter.tokens["update"] = 36, 360, 199
    assert meter.flops(cost)["total"] == 720 + 1194
    assert not bench_run.has_spent_the_budget(meter, cost, small("lze"))
    meter.tokens["update"] = 200
    assert bench_run.has_spent_the_budget(meter, cost, small("lze"))


def test_a_cheap_run_goes_on_and_a_dear_one_does_not(files, tmp_path):
    cheap = bench_run.run(small("lze", stretch=2.0), files, tmp_path)  # every group is dead: nothing is trained on
    assert [point["step"] for point in cheap["curve"]] == [0, 1, 2, 3, 4]
    assert cheap["curve"][-1]["rows_trained"] == 0
    dear = bench_run.run(small("all", stretch=2.0), files, tmp_path)
    assert [point["step"] for point in dear["curve"]] == [0, 1, 2]


# ---- Evaluation ----


def brute_force(model, tokenizer, prompt, answer, limit):
    """Probability of the answer, one token at a time."""
    ids, probability = tokenizer(prompt).input_ids, 1.0
    wanted = tokenizer(answer).input_ids
    if len(wanted) > limit:
        return 0.0
    for token in wanted if len(wanted) == limit else [*wanted, tokenizer.eos_token_id]:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
        probability *= logits.double().softmax(dim=-1)[token].item()
        ids = [*ids, token]
    return probability


def test_expected_pass_rate_is_the_probability_of_the_answer(monkeypatch):
    monkeypatch.setattr("benchmarks.evaluation._BATCH", 2)  # five rows in three batches
    model, tokenizer = tiny.model().eval(), tiny.tokenizer()
    rows = [("1+1=", "2"), ("1234567+1=", "x"), ("3=", "12"), ("3=", "123"), ("9*9=", "1234")]
    rows = [{"prompt": prompt, "solution": answer} for prompt, answer in rows]
    rates = Evaluation(rows, tokenizer, 3).pass_rates(model)
    expected = [brute_force(model, tokenizer, row["prompt"], row["solution"], 3) for row in rows]
    np.testing.assert_allclose(rates, expected, rtol=1e-4)
    assert expected[4] == rates[4] == 0.0
    assert (rates[:4] > 0.0).all()


def test_sampling_agrees_with_the_expectation_and_leaves_the_random_numbers_alone():
    tokenizer, model = tiny.tokenizer(), tiny.model().eval()
    with torch.no_grad():  # a model that answers "a", "b" or with the end of the text, each about one time in three
        model.lm_head.weight.zero_()
        model.lm_head.bias = torch.nn.Parameter(torch.full((len(tokenizer),), -20.0))
        model.lm_head.bias[tokenizer("ab").input_ids] = 0.0
        model.lm_head.bias[tokenizer.eos_token_id] = 0.0
    rows = [{"prompt": "1" * (1 + i % 5), "solution": ("a", "ab", "ba", "aab", "c")[i % 5]} for i in range(150)]
    evaluation = Evaluation(rows, tokenizer, 3)
    expected = evaluation.accuracy(model)["mean"]
    assert expected == pytest.approx((1 / 9 + 1 / 27 + 1 / 27 + 1 / 27 + 0) / 5, rel=1e-4)
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    sampled = evaluation.sampled(model, samples=8, seed=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert abs(sampled["mean"] - expected) < 4 * sampled["standard_error"]
    # Binomial noise of 150 × 8 draws
    variance = sum(p * (1 - p) for p in (1 / 9, 1 / 27, 1 / 27, 1 / 27, 0)) * 30 / 8 / 150**2
    assert sampled["standard_error"] == pytest.approx(math.sqrt(variance), rel=0.3)


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "grpo"])
def test_every_strategy_is_a_valid_configuration(strategy, tmp_path):
    own = {name: value for name, value in STRATEGIES[strategy].overrides.items() if name not in ("oracle", "prompts")}
    LZEGRPOConfig(**{"output_dir": str(tmp_path)} | TRAINING | own)
