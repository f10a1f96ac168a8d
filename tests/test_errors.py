"""What cannot work is refused early, with the setting and what to do; nothing that was paid for is lost."""

import shutil
import signal

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model

import tiny
from lze_trl.checkpoint import CheckpointError
from lze_trl.data import PromptStyle
from lze_trl.plan.planners import SolvedPlanner
from lze_trl.record import open_run
from lze_trl.rewards import MajorityReward
from lze_trl.rollout.controllers import Gate
from lze_trl.selfplay.online import Instruction
from lze_trl.selfplay.writer import Seeds
from tiny import make, run


SAVED = {"save_strategy": "steps", "save_steps": 1}


# ---- Settings and parts that do not go together ----

RPP = {"advantage_estimator": "reinforce_plus_plus"}
SERVERS = {"use_vllm": True, "vllm_mode": "http", "vllm_server_urls": ["http://127.0.0.1:9"]}
INSTRUCT = {"self_play": {"instruct": True}, "max_steps": 2}
NORMALIZED = {"multi_objective_aggregation": "normalize_then_sum"}
VOTES = {"reward_funcs": MajorityReward()}
STREAM = {"dataset": tiny.prompts(11).to_iterable_dataset()}
LONG = {"dataset": Dataset.from_dict({"prompt": ["1+1="] * 2200 + [""]})}

# What the error names, the settings, and arguments of the trainer
REFUSED = [
    ("reward_range", {"reward_range": [0.0, 1.0], "pass_threshold": 0.5}, {}),
    ("pass_threshold", {"reward_range": [0.0, 1.0], "strategy": "reinforce_ada", "pass_threshold": None}, {}),
    ("advantage_estimator", {"advantage_estimator": "ppo"}, {}),
    ("scale_rewards", {**RPP, "scale_rewards": "group"}, {}),
    ("`scale_rewards` must be .* Did you mean 'group'", {"scale_rewards": "groups"}, {}),
    ("`importance_sampling_level` must be one of", {"importance_sampling_level": "sentence"}, {}),
    ("multi_objective_aggregation", {**RPP, **NORMALIZED}, {}),
    ("loss_normalizer", {**RPP, "loss_normalizer": "all"}, {}),
    ("loss_normalizer", {**RPP, "strategy": "gate"}, {}),
    ("planner", {"planner": "greso", "pruning": "none"}, {}),
    ("vllm_server_urls", {"use_vllm": True, "vllm_mode": "http"}, {}),
    ("max_completion_length", SERVERS | {"max_completion_length": None}, {}),
    ("sampling_mode", {**SERVERS, "loss_type": "vespo", "vllm_importance_sampling_mode": "sequence_mask"}, {}),
    ("overlap", {"overlap": "one_step"}, {}),
    ("packing", {"packing": True, "top_entropy_quantile": 0.5}, {}),
    ("max_tokens_per_micro_batch", {"packing": False, "max_tokens_per_micro_batch": 64}, {}),
    ("window", {"window": 0}, {}),
    ("`window=2` fills them", {"window": 2, "pruning": "skip"}, {}),
    ("`window=2`.*stream", {**STREAM, "window": 2}, {}),
    ("`window=2` chooses among", {**INSTRUCT, "window": 2}, {}),
    ("pruning", {"pruning": "none"}, {"planner": SolvedPlanner()}),
    ("pruning", {"pruning": "skip", "controller": "dynamic"}, {}),
    ("multi_objective_aggregation", {"controller": "gate", **NORMALIZED}, {}),
    ("max_steps", {"self_play": {"instruct": True}, "max_steps": -1}, {}),
    ("planner", {**INSTRUCT, "planner": "greso"}, {}),
    (r"`instruction`.* Set `self_play=\{'instruct'", {}, {"instruction": Instruction(Seeds(()), PromptStyle())}),
    ("presence_penalty", {**INSTRUCT, "self_play": {"instruct": True, "presence_penalty": 1.0}}, {}),
    ("by 'majority_reward' every group has one", {**VOTES, "controller": "reinforce_ada_positive"}, {}),
    ("for which 'majority_reward' abstains", {**VOTES, **NORMALIZED}, {}),
    ("`pruning='refill'`.*stream", {**STREAM, "pruning": "refill"}, {}),
    ("`planner`.*stream", STREAM, {"planner": SolvedPlanner()}),
    ("`strategy='exact'` .`controller='uniform'`.*stream", {**STREAM, "controller": "dynamic"}, {}),
    ("`self_play={'instruct': True}`.*stream", {**STREAM, **INSTRUCT}, {}),
    (r"training set has .* prompt of row 2200\.", LONG, {}),
    ("`selector` must be an object of your own", {}, {"selector": "energy"}),
    ("`controller` must be an object of your own", {}, {"controller": Gate}),
    ("`MajorityReward` is a class", {"reward_funcs": MajorityReward}, {}),
    ("There is no model folder `runs/none/model`", {}, {"model": "runs/none/model"}),
]


@pytest.mark.parametrize(("named", "settings", "given"), REFUSED)
def test_what_cannot_work_is_refused_before_anything_is_loaded(tmp_path, named, settings, given):
    with pytest.raises((ValueError, TypeError, FileNotFoundError), match=named):
        make(tmp_path, trainer={"model": "me/no-model", **given}, **settings)


def test_a_training_that_would_change_nothing_is_refused(tmp_path):
    def adapted(**kwargs):
        get_peft_model(tiny.model(), LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
        return PeftModel.from_pretrained(tiny.model(), tmp_path / "adapter", **kwargs)

    other, frozen = torch.optim.SGD(tiny.model().parameters(), lr=0.1), tiny.model().requires_grad_(False)
    for message, given in (
        ("Load the adapter with `PeftModel.from_pretrained", {"model": adapted()}),
        ("No weight of the model is trainable, so a training would change nothing. Set", {"model": frozen}),
        ("`optimizers` has no trainable weight", {"optimizers": (other, None)}),
    ):
        trainer = make(tmp_path / "run", trainer=given)
        with pytest.raises(ValueError, match=message):
            trainer.train()
        assert trainer.ledger.rows_rolled_out == 0
    trainer = make(tmp_path / "run", trainer={"model": adapted(is_trainable=True)}, max_steps=1)
    trainer.train()
    trainer.train()  # with the optimizer of the first


# ---- What reward functions return ----


@pytest.mark.parametrize(
    ("returned", "message", "asynchronous"),
    [
        (None, r"returned None \(NoneType\) instead of a list", True),
        (0.5, r"returned 0\.5 \(float\) instead of a list", False),
        (["1.0"] * 12, r"returned '1\.0' \(str\) for completion 0 of 12", True),
        ([1.0] * 11 + [[1.0]], r"returned \[1\.0\] \(list\) for completion 11 of 12", False),
        (np.ones(13), "returned 13 rewards for 12 completions", True),
        ([float("inf")] * 12, r"returned inf \(float\) for completion 0 of 12", False),
    ],
)
def test_what_is_no_list_of_numbers_is_refused(tmp_path, returned, message, asynchronous):
    def wrong(**kwargs):
        return returned

    async def wrong_later(**kwargs):
        return returned

    trainer = make(tmp_path, reward_funcs=wrong_later if asynchronous else wrong)
    with pytest.raises((TypeError, ValueError), match=message) as caught:
        trainer.train()
    assert str(caught.value).startswith("The reward function 'wrong")
    assert "Return a list with one finite number for each completion, or None in it" in str(caught.value)
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("form", [iter, lambda values: torch.tensor(values, dtype=torch.bfloat16).unsqueeze(1)])
def test_numbers_of_any_kind_are_rewards(tmp_path, form):
    plain = run(tmp_path / "plain", max_steps=1)
    other = run(tmp_path / "other", reward_funcs=lambda **kwargs: form(tiny.even_length_reward(**kwargs)), max_steps=1)
    assert other.state.log_history[0]["reward"] == plain.state.log_history[0]["reward"]
    assert torch.equal(other.model.lm_head.weight, plain.model.lm_head.weight)


# ---- Columns that reward functions log ----


def test_a_logged_column_has_a_value_for_each_completion(tmp_path):
    def told(completions, log_extra, **kwargs):
        log_extra("note", ["a"] * 13)
        return [1.0] * len(completions)

    with pytest.raises(ValueError, match="'told' gave `log_extra` 13 values for the column 'note' and 12 completions"):
        run(tmp_path, reward_funcs=told)


def test_a_column_may_be_logged_in_some_rounds_only_and_by_two_functions(tmp_path):
    calls = []

    def sometimes(completions, log_extra, **kwargs):
        calls.append(len(completions))
        log_extra(f"round {len(calls) % 3}", list(completions))
        log_extra("both", ["lost"] * len(completions))
        return tiny.digit_reward(completions)

    def other(completions, log_extra, **kwargs):
        log_extra("both", [f"{text}!" for text in completions])
        return [0.0] * len(completions)

    sometimes.compares_completions = other.compares_completions = False  # else each is called again to find out
    settings = {"controller": "reinforce_ada_positive", "controller_kwargs": {"round_size": 2, "max_rounds": 4}}
    settings |= {"pass_threshold": 0.5, "log_completions": True, "num_completions_to_print": 1}
    run(tmp_path, reward_funcs=[sometimes, other], **settings)
    assert len(calls) > 3  # several rounds in a batch
    tables = [pd.read_parquet(file) for file in sorted((tmp_path / "completions").glob("*.parquet"))]
    assert len(tables) == 3
    for table in tables:
        assert (table["both"] == table["completion"] + "!").all()
        told = table[[name for name in table.columns if name.startswith("round")]]
        assert (told.notna().sum(axis=1) == 1).all()
        assert (told.bfill(axis=1).iloc[:, 0] == table["completion"]).all()
    assert sum(len(table) for table in tables) == sum(calls)


# ---- What a run resumes from ----


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    directory = tmp_path_factory.mktemp("finished")
    run(directory, **SAVED, max_steps=2).save_model(directory)
    return directory


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (shutil.rmtree, r"trainer_state\.json.* such as `.*checkpoint-1`"),
        (lambda path: [file.unlink() for file in path.glob("lze_*")], r"lze_state\.json"),  # one of plain TRL
    ],
)
def test_what_is_no_checkpoint_of_this_run_is_refused(tmp_path, finished, spoil, message):
    shutil.copytree(finished, tmp_path / "run")
    spoil(tmp_path / "run" / "checkpoint-2")
    trainer = make(tmp_path / "run", max_steps=3)
    before = trainer.model.lm_head.weight.clone()
    with pytest.raises(CheckpointError, match=message):
        trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert torch.equal(before, trainer.model.lm_head.weight)


# ---- Ctrl-C ----


def test_an_interrupted_script_says_how_to_go_on(tmp_path, caplog):
    calls = []

    def impatient(completions, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return tiny.even_length_reward(completions)

    trainer = make(tmp_path, reward_funcs=impatient, telemetry=True, **SAVED)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    told = f"Stopped. To go on from `{tmp_path}/checkpoint-2`: `trainer.train(resume_from_checkpoint=True)`."
    assert caplog.messages.count(told) == 1
    assert open_run(tmp_path).summary()["groups"] == 6  # two batches of three, all on disk
    resumed = make(tmp_path, telemetry=True, **SAVED)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 3
