"""The instruments of the benchmark: they measure what is there, and change nothing."""

import json

import numpy as np
import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

import tiny
from bench_samples import settings, task_files
from benchmarks import run as bench_run
from benchmarks.evaluation import Evaluation, exact_tokens
from benchmarks.strategies import NOT_SETTINGS, STRATEGIES
from lze_trl import LZEGRPOConfig, LZEGRPOTrainer
from lze_trl.record import open_run


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
    return task_files(tmp_path)


def small(strategy, **changes):
    return settings(strategy, **{"training": TRAINING, "steps": 2, "eval_every": 1, "learning_rate": 1e-2} | changes)


def trainer_of(own, files, folder, rows=7):
    trainer = bench_run.build_trainer(own, files, tiny.prompts(rows).to_list(), folder)
    trainer.reward_funcs = [tiny.even_length_reward]
    return trainer


@pytest.mark.parametrize(("strategy", "plain_class"), [("grpo", GRPOTrainer), ("lze_pruned", LZEGRPOTrainer)])
def test_instruments_and_evaluations_change_no_weight(files, tmp_path, strategy, plain_class):
    own = small(strategy)
    trainer = trainer_of(own, files, tmp_path / "run")
    evaluation = Evaluation(tiny.prompts(7).to_list(), trainer.processing_class, 5)
    evaluations = {"held_out": evaluation, "train": evaluation}
    recorder = bench_run.Recorder(trainer, own, evaluations, tmp_path / "progress.json")
    trainer.add_callback(recorder)
    trainer.train()
    assert [point["step"] for point in recorder.curve] == [0, 1, 2]

    config_class, own_class = (GRPOConfig, {}) if plain_class is GRPOTrainer else (LZEGRPOConfig, {"strategy": "lze"})
    common = {"learning_rate": 1e-2, "max_steps": 2, "seed": 0, "report_to": "none", "save_strategy": "no"}
    common |= TRAINING | own.overrides | own_class | {"disable_tqdm": True, "output_dir": str(tmp_path / "plain")}
    args = config_class(**common)
    plain = plain_class(str(files.model), tiny.even_length_reward, args, train_dataset=trainer.train_dataset)
    plain.train()
    before = tiny.model().state_dict()
    after, expected = trainer.model.state_dict(), plain.model.state_dict()
    assert any(not torch.equal(after[name], before[name]) for name in after)
    assert all(torch.equal(after[name], expected[name]) for name in expected)


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
    assert [check["step"] for check in result["checks"]] == [2]
    assert result["prompts"] == {"trained on": 7, "held_out": 9, "train": 7}
    assert "host" not in str(result["machine"]) and str(tmp_path) not in json.dumps(result)


OURS = [name for name, own in STRATEGIES.items() if not own.trl]
COUNTED = ("all", "exact_g4", "zero_variance", "lze_pruned", "oracle", "greso")


@pytest.mark.parametrize(
    ("strategy", "changes"), [*((name, {}) for name in COUNTED), ("dapo", {"selection_ratio": 0.3})]
)
def test_meter_and_ledger_agree(files, tmp_path, strategy, changes):
    # Two generation batches of three updates each, so that old log-probabilities are computed
    training = TRAINING | {"generation_batch_size": 24, "per_device_train_batch_size": 4, "beta": 0.1}
    own = small(strategy, training=training, steps=6, overrides=STRATEGIES[strategy].overrides | changes)
    trainer = trainer_of(own, files, tmp_path, 9)
    trainer.train()
    meter, ledger = trainer.meter, trainer.ledger
    assert meter.rows_rolled_out == ledger.rows_rolled_out
    assert meter.rows_trained == ledger.rows_trained > 0
    generations = open_run(tmp_path / "trainer").generations()
    assert meter.live_groups == (generations.groups - generations.dead).sum() > 0
    assert meter.tokens == {name: getattr(ledger, f"{name}_tokens") for name in ("rollout", "logprob", "update")}
    assert all(meter.computed_tokens[phase] >= meter.tokens[phase] for phase in ("logprob", "update"))


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
    asked = [{"prompt": prompt, "solution": answer} for prompt, answer in rows]
    rates = Evaluation(asked, tokenizer, 3).pass_rates(model)
    expected = [brute_force(model, tokenizer, *row, 3) for row in rows]
    np.testing.assert_allclose(rates, expected, rtol=1e-4)
    assert expected[4] == rates[4] == 0.0
    assert (rates[:4] > 0.0).all()


def test_the_reward_is_of_what_the_evaluation_counts():
    tokenizer, golds = tiny.tokenizer(), ["12", "12", "12", "123", "12"]
    answer, long, end = tokenizer("12").input_ids, tokenizer("123").input_ids, tokenizer.eos_token_id
    hidden = tokenizer.pad_token_id
    drawn = [[*answer, end], [*answer, hidden, end], [hidden, *answer], long, answer]
    assert len({text.strip() for text in tokenizer.batch_decode(drawn, skip_special_tokens=True)}) == 2
    assert exact_tokens(tokenizer, 3)(drawn, golds) == [1.0, 0.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("strategy", OURS)
def test_every_strategy_is_a_valid_configuration(strategy, tmp_path):
    own = {name: value for name, value in STRATEGIES[strategy].overrides.items() if name not in NOT_SETTINGS}
    LZEGRPOConfig(**{"output_dir": str(tmp_path)} | TRAINING | own)
