"""What cannot work is told early, with the value, what is allowed and what to do; nothing that was paid for is lost."""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from datasets import Dataset, IterableDataset
from peft import LoraConfig
from transformers import Qwen2Config, Qwen2ForSequenceClassification, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward as accuracy_of_trl

import tiny
from launches import fork, on_two_cpus
from lze_trl import LZEGRPOTrainer
from lze_trl.checkpoint import CheckpointError, explain_full_disk, is_complete
from lze_trl.job import cli
from lze_trl.job.train import main as job
from lze_trl.record import TelemetryError, open_run
from lze_trl.remote import resolve_run
from lze_trl.rewards import accuracy_reward
from lze_trl.rollout.controllers import Gate
from lze_trl.select.selectors import EnergySelector


ROOT = Path(__file__).resolve().parents[1]
SAVED = {"save_strategy": "steps", "save_steps": 1}


def make(directory, reward_funcs=tiny.even_length_reward, dataset=None, trainer=None, **kwargs):
    arguments = {"model": tiny.model(), "processing_class": tiny.tokenizer(), **(trainer or {})}
    return LZEGRPOTrainer(
        reward_funcs=reward_funcs,
        args=tiny.config(directory, **kwargs),
        train_dataset=tiny.prompts(11) if dataset is None else dataset,
        **arguments,
    )


def run(directory, **kwargs):
    trainer = make(directory, **kwargs)
    trainer.train()
    return trainer


# ---- Reward functions and the columns they are called with ----


class Judge:
    def __call__(self, prompts, completions, grade, **kwargs):
        return [1.0] * len(completions)


def graded_by(scale, completions, grade, **kwargs):
    return [scale] * len(completions)


async def later(completions, grade, **kwargs):
    return [1.0] * len(completions)


def narrow(prompts, completions):
    return [1.0] * len(completions)


def with_default(completions, grade=None, *, trainer_state, log_extra, log_metric, completion_ids, **kwargs):
    return [float(len(text) % 2) for text in completions]


UNFIT = {
    "our accuracy": (accuracy_reward, r"'accuracy_reward' needs `solution`, and the training set has no such column"),
    "TRL's accuracy": (accuracy_of_trl, r"needs `solution`.* it has \['prompt', 'task'\]\. Rename the column .*"),
    "an object": (Judge(), r"'Judge' needs `grade`.* or give the parameter a default value"),
    "a partial": (functools.partial(graded_by, 2.0), "'graded_by' needs `grade`"),
    "async": (later, "'later' needs `grade`"),
    "among others": ([with_default, Judge()], "'Judge' needs `grade`"),
    "no place for the rest": (
        narrow,
        r"'narrow' has no parameter for \['completion_ids', 'trainer_state', 'log_extra', 'log_metric', 'task'\]"
        r".* Add `\*\*kwargs`",
    ),
}


def tasks():
    return tiny.prompts(11).rename_column("solution", "task")


@pytest.mark.parametrize("name", UNFIT)
@pytest.mark.parametrize("streamed", [False, True])
def test_a_reward_without_its_column_is_refused_before_anything_is_loaded(tmp_path, name, streamed):
    func, message = UNFIT[name]
    data, settings = tasks(), {}
    if streamed:  # its columns are not known before the first row
        rows = data.to_list()
        data, settings = IterableDataset.from_generator(lambda: iter(rows)), {"pruning": "none", "deduplicate": False}
    with pytest.raises(ValueError, match=message):
        make(tmp_path, func, data, {"model": str(tmp_path / "no model")}, **settings)


def test_evaluation_sets_need_the_columns_too(tmp_path):
    with pytest.raises(
        ValueError, match="'accuracy_reward' needs `solution`, and the evaluation set has no such column"
    ):
        make(tmp_path, accuracy_reward, trainer={"eval_dataset": tasks()})
    with pytest.raises(ValueError, match="and the evaluation set 'hard' has no such column"):
        make(tmp_path, accuracy_reward, trainer={"eval_dataset": {"easy": tiny.prompts(4), "hard": tasks()}})


def test_columns_that_are_dropped_are_no_columns(tmp_path):
    with pytest.raises(ValueError, match=r"needs the column `solution`, and `remove_unused_columns=True` drops it"):
        make(tmp_path, accuracy_reward, remove_unused_columns=True)


def test_rewards_that_can_be_called_train(tmp_path):
    trainer = run(tmp_path, reward_funcs=[with_default, accuracy_reward], max_steps=1)
    assert trainer.ledger.rows_rolled_out == 12


def test_a_rollout_function_can_bring_the_column(tmp_path):
    def rollouts(prompts, trainer):
        return {**tiny.fixed_rollouts(prompts, trainer), "grade": [1.0] * len(prompts)}

    def echo(completions, grade, **kwargs):
        return grade

    trainer = run(tmp_path, reward_funcs=echo, trainer={"rollout_func": rollouts}, max_steps=1)
    assert trainer.state.log_history[0]["reward"] == 1.0


def test_a_class_is_no_reward_function(tmp_path):
    with pytest.raises(
        TypeError, match=r"The reward function 'Judge' is a class\. Pass an object of it, `Judge\(…\)`"
    ):
        make(tmp_path, Judge, trainer={"model": "me/no-model"})


# ---- Prompts ----

TEXTS = [f"{i}+{i}=" for i in range(11)]
TALKS = [[{"role": "user", "content": text}] for text in TEXTS]


@pytest.mark.parametrize(
    ("prompts", "shown", "row"),
    [
        ([*TEXTS, None], "None", 11),
        ([*TEXTS, "", *TEXTS], "''", 11),
        (list(range(11)), "0", 0),
        ([[], *TALKS], r"\[\]", 0),
        ([*TALKS, None], "None", 11),
        ([*TALKS, [{"role": "user", "content": None}]], r"\[\{'role': 'user', 'content': None\}\]", 11),
        ([[1, 2]] * 11, r"\[1, 2\]", 0),
        ([*TEXTS] * 200 + [""], "''", 2200),
    ],
)
@pytest.mark.parametrize("held_out", [False, True])
def test_a_row_without_a_prompt_is_named_before_anything_is_loaded(tmp_path, prompts, shown, row, held_out):
    wrong, place = Dataset.from_dict({"prompt": prompts}), "evaluation" if held_out else "training"
    dataset, more = (tiny.prompts(11), {"eval_dataset": wrong}) if held_out else (wrong, {})
    with pytest.raises(
        ValueError, match=rf"The {place} set has {shown} as the prompt of row {row}\. A prompt is a text"
    ):
        make(tmp_path, dataset=dataset, trainer={"model": "me/no-model", **more})


@pytest.mark.parametrize("prompt", ["1" * 64, "1" * 32_000, [{"role": "user", "content": "1" * 64}]])
@pytest.mark.parametrize("held_out", [False, True])
def test_a_prompt_beyond_the_context_is_refused_before_anything_is_generated(tmp_path, prompt, held_out):
    wrong = Dataset.from_dict({"prompt": [*(TEXTS if isinstance(prompt, str) else TALKS), prompt]})
    dataset, more = (tiny.prompts(11), {"eval_dataset": wrong}) if held_out else (wrong, {})
    with pytest.raises(
        ValueError, match=r"a prompt of (64|32,000) tokens in row 11 \('1111.* has a context of 64 tokens"
    ):
        make(tmp_path, dataset=dataset, trainer=more)


def test_prompts_within_the_context_or_of_a_rollout_function_are_taken(tmp_path):
    dataset = Dataset.from_dict({"prompt": [*TEXTS, "1" * 50]})
    assert run(tmp_path / "fits", dataset=dataset, max_steps=1).state.global_step == 1
    # Many characters, few tokens
    words = without()
    words.add_tokens(["wonderful"])
    dataset = Dataset.from_dict({"prompt": [*TEXTS, "wonderful" * 40]})
    make(tmp_path / "words", dataset=dataset, trainer={"processing_class": words})
    dataset = Dataset.from_dict({"prompt": list(range(11))})

    def rollouts(prompts, trainer):
        return tiny.fixed_rollouts([str(prompt) for prompt in prompts], trainer)

    assert (
        run(tmp_path / "own", dataset=dataset, trainer={"rollout_func": rollouts}, max_steps=1).state.global_step == 1
    )


# ---- What the trainer is given ----


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"selector": "energy"}, r"a `Selector`, got 'energy'\..*: `LZEGRPOConfig\(selector='energy'\)`"),
        ({"controller": "gate"}, r"a `RolloutController`, got 'gate'\..*: `LZEGRPOConfig\(controller='gate'\)`"),
        ({"planner": "greso"}, r"a `Planner`, got 'greso'\..*: `LZEGRPOConfig\(planner='greso'\)`"),
        (
            {"selector": EnergySelector},
            r"a `Selector`, got <class .*Pass an object of the class, `EnergySelector\(…\)`",
        ),
        ({"controller": Gate}, r"Pass an object of the class, `Gate\(…\)`"),
        ({"selector": 3}, r"got 3\. Derive your own from `Selector`"),
    ],
)
def test_a_name_or_a_class_is_no_strategy(tmp_path, given, message):
    with pytest.raises(TypeError, match=rf"`{next(iter(given))}` must be an object of your own, .*{message}"):
        make(tmp_path, trainer={"model": "me/no-model", **given})


@pytest.mark.parametrize("path", ["/none/model", "./none", "~/none/model", "runs/none/model"])
def test_a_model_folder_that_is_not_there_is_told(tmp_path, path):
    with pytest.raises(
        FileNotFoundError, match=rf"There is no model folder `{path}`\. Give a folder with a saved model"
    ):
        make(tmp_path, trainer={"model": path})
    folder = tmp_path / "modell"
    folder.mkdir()
    with pytest.raises(FileNotFoundError, match=rf"no model folder `{tmp_path}/model`\. Did you mean `{folder}`\?"):
        make(tmp_path / "run", trainer={"model": str(tmp_path / "model")})


@pytest.mark.parametrize(
    "setting",
    [{"learning_rate": -1e-5}, {"temperature": 0.0}, {"top_p": 1.5}, {"max_steps": 0}, {"max_completion_length": 0}],
)
def test_values_of_fields_of_trl_are_checked(tmp_path, setting):
    ((name, value),) = setting.items()
    with pytest.raises(ValueError, match=rf"`{name}` must be .*, got {value}\. "):
        tiny.config(tmp_path, **setting)


@pytest.mark.parametrize("mode", [{}, {"use_vllm": True, "vllm_mode": "server"}])
def test_servers_that_are_not_used_are_told(tmp_path, caplog, mode):
    tiny.config(tmp_path, vllm_server_urls=["http://127.0.0.1:9"], **mode)
    assert "`vllm_server_urls=['http://127.0.0.1:9']` is ignored" in caplog.text


# ---- What reward functions return ----

RETURNED = {
    "nothing": (lambda count: None, "returned None instead of a list"),
    "a number": (lambda count: 0.5, r"returned 0\.5 \(float\) instead of a list"),
    "a tensor of one number": (lambda count: torch.tensor(0.5), r"\(Tensor\) instead of a list"),
    "a text": (lambda count: "1" * count, r"returned '111111111111' \(str\) instead of a list"),
    "a dictionary": (lambda count: dict.fromkeys(range(count), 1.0), r"\(dict\) instead of a list"),
    "texts": (lambda count: ["1.0"] * count, r"returned '1\.0' \(str\) for completion 0 of 12"),
    "lists": (lambda count: [1.0] * (count - 1) + [[1.0]], r"returned \[1\.0\] \(list\) for completion 11 of 12"),
    "too few": (lambda count: [1.0] * (count - 1), "returned 11 rewards for 12 completions"),
    "too many": (lambda count: np.ones(count + 1), "returned 13 rewards for 12 completions"),
}


@pytest.mark.parametrize(("name", "asynchronous"), [(name, index % 2 == 0) for index, name in enumerate(RETURNED)])
def test_what_is_no_list_of_numbers_is_refused(tmp_path, name, asynchronous):
    returned, message = RETURNED[name]

    def wrong(completions, **kwargs):
        return returned(len(completions))

    async def wrong_later(completions, **kwargs):
        return returned(len(completions))

    trainer = make(tmp_path, reward_funcs=wrong_later if asynchronous else wrong)
    with pytest.raises((TypeError, ValueError), match=message) as caught:
        trainer.train()
    assert str(caught.value).startswith("The reward function 'wrong")
    assert str(caught.value).endswith(
        "Return a list with one number for each completion, or None in it where the reward does not apply."
    )
    assert trainer.state.global_step == 0


@pytest.mark.parametrize(
    "form",
    [
        np.array,
        torch.tensor,
        tuple,
        iter,
        lambda values: [np.float32(value) for value in values],
        lambda values: torch.tensor(values, dtype=torch.bfloat16).unsqueeze(1),
        lambda values: [bool(value) for value in values],
    ],
)
def test_numbers_of_any_kind_are_rewards(tmp_path, form):
    plain = run(tmp_path / "plain", max_steps=1)
    other = run(tmp_path / "other", reward_funcs=lambda **kwargs: form(tiny.even_length_reward(**kwargs)), max_steps=1)
    assert other.state.log_history[0]["reward"] == plain.state.log_history[0]["reward"]
    assert torch.equal(other.model.lm_head.weight, plain.model.lm_head.weight)


# ---- Columns that reward functions log ----


@pytest.mark.parametrize("values", [["a"], ["a"] * 13, "twelve chars"])
def test_a_logged_column_has_a_value_for_each_completion(tmp_path, values):
    def told(completions, log_extra, **kwargs):
        log_extra("note", values)
        return [1.0] * len(completions)

    count = 1 if isinstance(values, str) else len(values)
    with pytest.raises(
        ValueError, match=rf"'told' gave `log_extra` {count} values for the column 'note' and 12 completions"
    ):
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

    run(
        tmp_path,
        reward_funcs=[sometimes, other],
        controller="reinforce_ada_positive",
        pass_threshold=0.5,
        controller_kwargs={"round_size": 2, "max_rounds": 4},
        log_completions=True,
        num_completions_to_print=1,
    )
    assert len(calls) > 3  # several rounds in a batch
    tables = [pd.read_parquet(file) for file in sorted((tmp_path / "completions").glob("*.parquet"))]
    assert len(tables) == 3
    for table in tables:
        assert (table["both"] == table["completion"] + "!").all()
        told = table[[name for name in table.columns if name.startswith("round")]]
        assert (told.notna().sum(axis=1) == 1).all()
        assert (told.bfill(axis=1).iloc[:, 0] == table["completion"]).all()
    assert sum(len(table) for table in tables) == sum(calls)


# ---- Tokenizers ----


def without(**missing):
    tokenizer = tiny.tokenizer()
    for name, value in missing.items():
        setattr(tokenizer, name, value)
    return tokenizer


def judge(tokenizer):
    """A reward model, and the tokenizer it is given."""
    torch.manual_seed(0)
    config = Qwen2Config(**tiny.model().config.to_diff_dict() | {"num_labels": 1, "architectures": None})
    model = Qwen2ForSequenceClassification(config)
    model.config._name_or_path = "org/judge"
    return {"reward_funcs": model, "trainer": {"reward_processing_classes": tokenizer}}


NO_TOKENS = {"pad_token": None, "eos_token": None}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"trainer": {"processing_class": without(**NO_TOKENS)}},
            r"The tokenizer of the model has neither a pad token nor an end token.* Set `tokenizer\.pad_token`",
        ),
        (
            {"trainer": {"processing_class": without(eos_token=None)}},
            r"The tokenizer of the model has no end token.* Set `tokenizer\.eos_token`",
        ),
        (judge(without(**NO_TOKENS)), "The tokenizer of the reward model 'judge' has neither a pad token"),
        (
            {
                "trainer": {"processing_class": without(chat_template=None)},
                "dataset": tiny.prompts(11, conversational=True),
            },
            "The tokenizer of the model has no chat template, and the prompts are conversations. Set `tokenizer.chat_temp",
        ),
        (
            {**judge(without(chat_template=None)), "dataset": tiny.prompts(11, conversational=True)},
            "The tokenizer of the reward model 'judge' has no chat template",
        ),
        (
            {
                "trainer": {
                    "processing_class": without(chat_template=None),
                    "eval_dataset": tiny.prompts(4, conversational=True),
                }
            },
            "has no chat template",
        ),
    ],
)
def test_tokenizers_that_lack_something_are_refused(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        make(tmp_path, **arguments)


def test_tokenizers_that_lack_nothing_needed_are_taken(tmp_path):
    run(tmp_path / "plain", trainer={"processing_class": without(chat_template=None, pad_token=None)}, max_steps=1)
    run(tmp_path / "judged", **judge(without(chat_template=None, pad_token=None)), max_steps=1)


# ---- Where a run writes ----


@pytest.mark.parametrize("where", ["a file/run", "/proc/run", "a file"])
def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_loaded(tmp_path, where):
    (tmp_path / "a file").write_text("")
    path = tmp_path / where
    with pytest.raises(OSError, match=rf"`output_dir='{path}'` cannot be written to \(.+\)\. Name a folder"):
        make(path, trainer={"model": str(tmp_path / "no model")})


@pytest.fixture
def small_disk(tmp_path):
    """A disk of two megabytes."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a disk can be mounted by root alone")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


class Ballast(TrainerCallback):
    """Leaves little of a disk free once the first checkpoint is written."""

    def __init__(self, disk: Path, left: int):
        self.disk, self.left = disk, left

    def on_save(self, args, state, control, **kwargs):
        if state.global_step == 1:
            free = shutil.disk_usage(self.disk).free
            (self.disk / "ballast").write_bytes(b"0" * (free - self.left))


@pytest.mark.parametrize("left", [0, 16_384, 65_536, 131_072])
def test_a_full_disk_costs_the_checkpoint_and_nothing_before(small_disk, left):
    """Whichever file finds no room: the last checkpoint stays, and the run goes on from it once there is room."""
    run_dir = small_disk / "run"
    settings = SAVED | {"max_steps": 4, "telemetry": False}
    trainer = make(run_dir, trainer={"callbacks": [Ballast(small_disk, left)]}, **settings)
    with pytest.raises(CheckpointError) as caught:
        trainer.train()
    message = str(caught.value)
    size = sum(file.stat().st_size for file in (run_dir / "checkpoint-1").rglob("*") if file.is_file())
    assert message.startswith(
        f"The disk is full: the checkpoint `{run_dir}/checkpoint-2` needs about {size:,} bytes, and "
    )
    assert f"`{run_dir}/checkpoint-1` is complete: nothing before it is lost" in message
    free = int(message.split("bytes, and ")[1].split()[0].replace(",", ""))
    assert free <= left
    assert is_complete(run_dir / "checkpoint-1")
    assert not (run_dir / "checkpoint-2").exists()
    (small_disk / "ballast").unlink()
    resumed = make(run_dir, **settings | {"save_total_limit": 1})
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4


def test_the_first_checkpoint_may_be_too_large(tmp_path):
    with (
        pytest.raises(CheckpointError, match=r"needs more than 3 bytes, and [\d,]+ are free\. There is no earlier"),
        explain_full_disk(tmp_path / "checkpoint-1"),
    ):
        (tmp_path / "checkpoint-1").mkdir()
        (tmp_path / "checkpoint-1" / "part").write_text("abc")
        with open("/dev/full", "w") as full:
            full.write("d")
    assert not (tmp_path / "checkpoint-1").exists()


def test_errors_of_another_kind_stay_what_they_are(tmp_path):
    with pytest.raises(RuntimeError, match="the network is away"), explain_full_disk(tmp_path / "checkpoint-1"):
        (tmp_path / "checkpoint-1").mkdir()
        raise RuntimeError("the network is away")
    assert (tmp_path / "checkpoint-1").exists()


# ---- What a run resumes from ----


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    directory = tmp_path_factory.mktemp("finished")
    run(directory, **SAVED, max_steps=2).save_model(directory)
    return directory


def cut_off(path):
    (path / "trainer_state.json").unlink()


def damaged(path):
    (path / "trainer_state.json").write_text("{")


def of_plain_trl(path):
    for file in path.glob("lze_*"):
        file.unlink()


def of_llama(path):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (shutil.rmtree, r"is no folder.* such as `.*checkpoint-1`"),
        (
            cut_off,
            r"is no complete checkpoint of `LZEGRPOTrainer`: it has no `trainer_state\.json`.* as `.*checkpoint-1`",
        ),
        (damaged, r"trainer_state\.json` is damaged"),
        (of_plain_trl, r"it has no `lze_state\.json`"),
        (of_llama, r"another model: it has `model_type=llama`, and this run qwen2\. Resume with the model"),
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


def test_the_folder_of_a_run_is_no_checkpoint(tmp_path, finished):
    shutil.copytree(finished, tmp_path / "run")
    shutil.copy(finished / "checkpoint-2" / "trainer_state.json", tmp_path / "run")
    trainer = make(tmp_path / "run", max_steps=3)
    with pytest.raises(CheckpointError, match=r"without its optimizer.* such as `.*checkpoint-2`"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "run"))


LORA = {"peft_config": LoraConfig(r=2, target_modules=["q_proj"])}


@pytest.mark.parametrize(
    ("written", "resumed", "message"),
    [
        ({}, {"model": tiny.model(layers=2)}, r"it has `num_hidden_layers=1`, and this run 2"),
        (
            {},
            LORA,
            "is a checkpoint of all weights, and this run trains an adapter. Resume with the same `peft_config`",
        ),
        (LORA, {}, "is a checkpoint of an adapter, and this run trains all weights"),
        (LORA, {"peft_config": LoraConfig(r=3, target_modules=["q_proj"])}, "it has `r=2`, and this run 3"),
        (LORA, {"peft_config": LoraConfig(r=2, target_modules=["v_proj"])}, r"`target_modules=\['q_proj'\]`"),
    ],
)
def test_another_model_cannot_go_on(tmp_path, written, resumed, message):
    run(tmp_path, trainer=dict(written), **SAVED, max_steps=1)
    with pytest.raises(CheckpointError, match=message):
        make(tmp_path, trainer=dict(resumed), max_steps=2).train(resume_from_checkpoint=True)


@pytest.mark.parametrize(("schedule", "shares"), [("linear", (75, 50)), ("constant", None)])
def test_another_number_of_steps_is_another_learning_rate(tmp_path, caplog, schedule, shares):
    run(tmp_path, **SAVED, max_steps=2, lr_scheduler_type=schedule)
    resumed = make(tmp_path, **SAVED, max_steps=4, lr_scheduler_type=schedule)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    told = [record.getMessage() for record in caplog.records if "The run had 2 steps and has 4" in record.getMessage()]
    assert len(told) == (shares is not None)
    if shares is not None:
        said = "after step 1 it is {} % of its highest value, where it was {} %.".format(*shares)
        assert said in told[0] and "resume with `max_steps=2`" in told[0]
        # The last step is taken with a quarter of the learning rate of 1e-2
        rates = {
            entry["step"]: entry["learning_rate"] for entry in resumed.state.log_history if "learning_rate" in entry
        }
        assert rates[4] == pytest.approx(0.25e-2)


@pytest.mark.parametrize("trainer", [{}, LORA])
def test_the_same_model_goes_on(tmp_path, trainer):
    run(tmp_path, trainer=dict(trainer), **SAVED, max_steps=1)
    resumed = make(tmp_path, trainer=dict(trainer), max_steps=2)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 2


def test_the_source_of_the_state_is_not_needed_to_resume(tmp_path):
    run(tmp_path / "first", max_steps=3)
    settings = SAVED | {"state_from": str(tmp_path / "first")}
    second = run(tmp_path / "second", **settings, max_steps=1)
    assert len(second.prompt_state) > 3
    shutil.rmtree(tmp_path / "first")
    resumed = make(tmp_path / "second", **settings, max_steps=2)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 2
    fresh = make(tmp_path / "third", **settings)
    with pytest.raises(FileNotFoundError, match="neither a directory nor"):
        fresh.train()
    assert fresh.ledger.rows_rolled_out == 0


# ---- Ctrl-C ----


def test_an_interrupted_script_says_how_to_go_on(tmp_path):
    calls = []

    def impatient(completions, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return tiny.even_length_reward(completions)

    trainer = make(tmp_path, reward_funcs=impatient, telemetry=True, **SAVED)
    with pytest.raises(KeyboardInterrupt) as caught:
        trainer.train()
    assert caught.value.__notes__ == [
        f"Stopped. To go on from `{tmp_path}/checkpoint-2`: `trainer.train(resume_from_checkpoint=True)`."
    ]
    assert open_run(tmp_path).summary()["groups"] == 6  # two batches of three, all on disk
    resumed = make(tmp_path, telemetry=True, **SAVED)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 3


def test_before_the_first_checkpoint_there_is_none_to_go_on_from(tmp_path):
    def impatient(completions, **kwargs):
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as caught:
        run(tmp_path, reward_funcs=impatient)
    assert caught.value.__notes__[0].endswith("holds no checkpoint yet, so the run starts again from its beginning.")


WORTHLESS = "def none(completions, **kwargs):\n    return None\n"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"reward_funcs": ["worthless.none"]},
            "The reward function 'none' returned None instead of a list. Return a list",
        ),
        ({"report_to": "wandb"}, "No API key configured. Use `wandb login` to log in."),
    ],
)
def test_a_job_that_cannot_go_on_ends_with_one_line(tmp_path, monkeypatch, more, message):
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "worthless.py").write_text(WORTHLESS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        job(["--config", tiny.recipe(tmp_path, **tiny.job(tmp_path, train=12) | more)])
    assert str(ended.value).startswith(f"error: {message}")
    assert len(str(ended.value).splitlines()) == 1


STOPPING = """
import os, signal
from pathlib import Path
import tiny

def impatient(completions, trainer_state, **kwargs):
    if trainer_state.global_step == 2 and not Path("stopped").exists():
        Path("stopped").touch()
        {signal}
    return tiny.even_length_reward(completions)
"""
# A terminal signals the whole foreground; the workers of torchrun are in sessions of their own
SIGNALS = {1: "os.killpg(0, signal.SIGINT)", 2: "os.kill(os.getppid(), signal.SIGINT)"}


def stopping_job(directory: Path, processes: int):
    """A recipe whose reward function interrupts it in the third step, once."""
    (directory / "stopping.py").write_text(STOPPING.format(signal=SIGNALS[processes]))
    tiny.save(directory / "model")
    tiny.prompts(12).to_json(directory / "train.jsonl")
    tiny.recipe(
        directory,
        output_dir="run",
        model_name_or_path="model",
        datasets=["train.jsonl"],
        reward_funcs=["stopping.impatient"],
        per_device_train_batch_size=12 // processes,
        save_steps=1,
        telemetry=True,
        dataloader_num_workers=0,
    )


def assert_stopped(directory: Path, said: str):
    assert "Traceback" not in said
    lines = [line for line in said.splitlines() if "Stopped" in line]
    assert len(lines) == 1
    assert lines[0].endswith(
        "To go on from `run/checkpoint-2`: the same command with `--resume_from_checkpoint auto`."
    )
    assert open_run(directory / "run").summary()["groups"] == 6


def test_ctrl_c_ends_the_job_with_one_line(tmp_path, monkeypatch):
    stopping_job(tmp_path, 1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for more, status in (([], 130), (["--resume_from_checkpoint", "auto"], 0)):
        log = tmp_path / f"{status}.txt"
        process = fork(log, {}, job, ["--config", "recipe.yaml", *more])
        process.join(timeout=300)
        assert process.exitcode == status, log.read_text()
        if status == 130:
            assert_stopped(tmp_path, log.read_text())
    assert json.loads((tmp_path / "run" / "trainer_state.json").read_text())["global_step"] == 4


@pytest.mark.slow
def test_ctrl_c_ends_the_command_on_two_processes_with_one_line(tmp_path):
    stopping_job(tmp_path, 2)
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(on_two_cpus("ddp")))
    command = [sys.executable, "-m", "lze_trl.job.cli", "train", "recipe.yaml"]
    command += ["--accelerate_config", "two.yaml", "--main_process_port", str(tiny.free_port())]
    environment = os.environ | {
        "PYTHONPATH": f"{tmp_path}:{ROOT / 'tests'}:{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "OMP_NUM_THREADS": "1",
    }
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": 300}
    stopped = subprocess.run(command, **options, start_new_session=True, check=False)
    assert stopped.returncode == 130, stopped.stderr
    assert_stopped(tmp_path, stopped.stderr)


# ---- The app ----


def test_the_app_does_not_start_for_a_run_that_is_not_there(tmp_path):
    with pytest.raises(SystemExit, match=f"^error: `{tmp_path / 'nothing'}` is neither a directory nor"):
        cli.main(["app", str(tmp_path / "nothing")])
    with pytest.raises(TelemetryError):
        resolve_run(tmp_path / "nothing")


# ---- Objects made without `__init__` ----


def bare(trainer):
    """The trainer of TRL in our class, without what our constructor would have added."""
    ours = object.__new__(LZEGRPOTrainer)
    vars(ours).update(vars(trainer))
    return ours


def test_an_object_made_without_init_works_as_that_of_trl(tmp_path):
    settings = {"use_cpu": True, "bf16": False, "report_to": "none", "num_generations": 4, "max_completion_length": 5}
    trainer = GRPOTrainer(
        model=tiny.model(),
        reward_funcs=tiny.even_length_reward,
        args=GRPOConfig(str(tmp_path), per_device_train_batch_size=12, per_device_eval_batch_size=4, **settings),
        train_dataset=tiny.prompts(11),
        eval_dataset=tiny.prompts(2),
        processing_class=tiny.tokenizer(),
        rollout_func=tiny.fixed_rollouts,
    )
    rows = [row for row in trainer.train_dataset.select(range(3)) for _ in range(4)]
    prompts = [row["prompt"] for row in rows]

    def results(trainer):
        trainer.model.train()
        generated = trainer._generate(prompts)
        rewards = trainer._calculate_rewards(rows, prompts, generated[3], generated[1])
        ids = torch.tensor([[5, 6, 7, 8, 9]])
        logps, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, torch.ones_like(ids), 2)
        inputs = trainer._generate_and_score_completions(rows)
        trainer.current_gradient_accumulation_steps = 1
        loss = trainer.compute_loss(trainer.model, inputs)
        trainer._set_signature_columns_if_needed()
        sampled = list(trainer._get_train_sampler())
        trainer.log({"loss": 1.0})
        evaluated = {name: value for name, value in trainer.evaluate().items() if "reward" in name}
        return generated[:5], rewards.tolist(), logps.tolist(), loss.item(), sampled, evaluated

    ours = results(bare(trainer))
    assert ours == results(trainer)
    assert ours[1] != [[0.0]] * 12
    assert ours[-1]["eval_reward"] is not None


def test_a_missing_training_set_is_refused_before_the_model_is_loaded(tmp_path):
    with pytest.raises(ValueError, match="`train_dataset` is required"):
        LZEGRPOTrainer("me/does-not-exist", tiny.even_length_reward, tiny.config(tmp_path))
