"""Tools, environments and images: with nothing left out, the weights are those of TRL's trainer."""

import functools
import importlib
import itertools
import os
import re
import socket
import subprocess
import sys
import time
from base64 import b64decode
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import Accelerator
from packaging.version import Version
from peft import LoraConfig
from PIL import Image
from tenacity import Retrying, stop_after_delay, wait_fixed
from trl import GRPOTrainer
from trl.distributed import DistributedBackend

import agents
import tiny
from agents import Counting, Falling, Owner, Scored, odd_answer_reward, odd_total_reward
from case_runs import leave
from launches import assert_one, launch, records
from lze_trl import LZEGRPOConfig, LZEGRPOTrainer
from lze_trl.app.views import prompt_detail
from lze_trl.job.recipe import parse_recipe
from lze_trl.job.train import build_trainer
from lze_trl.record import open_run
from lze_trl.rollout.episodes import EpisodeError, Episodes, guarded
from lze_trl.rollout.reward_checks import checked
from test_laws import distance
from tiny import history


pytestmark = pytest.mark.skipif(
    Version(version("transformers")) < Version("5.13"), reason="what calls tools here is described in the form of 5.13"
)


@dataclass
class Case:
    """A TRL script, by its arguments."""

    given: dict[str, Any]  # of the trainer
    tools: tuple[str, ...] = ()  # that the model calls; "none" is not there
    data: Any = field(default_factory=agents.rows)
    settings: dict[str, Any] = field(default_factory=dict)
    model: Any = agents.words


BY_ANSWER = {"reward_funcs": odd_answer_reward}
SEVERAL_UPDATES = {"num_iterations": 2, "steps_per_generation": 4}  # with old log-probabilities
AS_ARRAYS = agents.rows(images=1).with_transform(agents.shown_as_arrays)
CASES = {
    "a tool": Case(BY_ANSWER | {"tools": [agents.add]}, ("add", "none")),
    "an asynchronous tool": Case(BY_ANSWER | {"tools": [agents.add_later]}, ("add_later",)),
    "one call": Case(BY_ANSWER | {"tools": [agents.add]}, ("add",), settings={"max_tool_calling_iterations": 1}),
    "an environment": Case({"environment_factory": Counting, "reward_funcs": odd_total_reward}, ("plus",)),
    "its own reward": Case({"environment_factory": Scored}, ("plus",)),
    "two rewards": Case(BY_ANSWER | {"environment_factory": Scored}, ("plus",)),
    "two environments": Case(
        BY_ANSWER | {"environment_factory": {"odd": Scored, "even": Falling}},
        ("plus", "minus", "double"),
        agents.rows(environments=True),
    ),
    "no prompts": Case({"environment_factory": Scored}, ("plus",), agents.rows().remove_columns("prompt")),
    "no data": Case({"environment_factory": Owner}, ("plus",), None),
    "several updates": Case(BY_ANSWER | {"environment_factory": Scored}, ("plus",), settings=SEVERAL_UPDATES),
    "an image": Case(BY_ANSWER, (), agents.rows(images=1), model=agents.llava),
    "an image as an array": Case(BY_ANSWER, (), AS_ARRAYS, model=agents.qwen),
    "two images": Case(BY_ANSWER, (), agents.rows(images=2), SEVERAL_UPDATES, agents.llava),
    "an image by its grid": Case(BY_ANSWER, (), agents.rows(images=1), SEVERAL_UPDATES, agents.qwen),
    "two images by their grids": Case(BY_ANSWER, (), agents.rows(images=2), model=agents.qwen),
    "a tool that shows": Case(BY_ANSWER | {"tools": [agents.show]}, ("show",), model=agents.llava),
    "a tool that shows by a grid": Case(BY_ANSWER | {"tools": [agents.show]}, ("show",), model=agents.qwen),
}


@pytest.fixture(autouse=True)
def unused():
    for environment in (Counting, Scored, Falling, Owner):
        environment.resets = 0


def make(cls, directory, case: Case, **settings):
    shape = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2, "max_completion_length": 300}
    shape |= {"optim": "sgd", "learning_rate": 0.3, "strategy": "exact"}
    args = tiny.config(directory, **shape | case.settings | settings)
    model, processing_class = case.model()
    given = {name: list(value) if isinstance(value, list) else value for name, value in case.given.items()}
    Owner.resets = 0
    return agents.scripted(cls, case.tools)(
        model=model, args=args, train_dataset=case.data, processing_class=processing_class, **given
    )


def train(cls, directory, case, **settings):
    trainer = make(cls, directory, case, **settings)
    trainer.train()
    return trainer


def logged(trainer) -> list[dict]:
    """What TRL logs, without times."""
    return [
        {name: value for name, value in entry.items() if "time" not in name and not name.startswith("lze/")}
        for entry in trainer.state.log_history[:-1]
    ]


def moved_from(trainer, case) -> float:
    before, after = case.model()[0].state_dict(), trainer.model.state_dict()
    return max(float((after[name] - value).abs().max()) for name, value in before.items())


@pytest.mark.parametrize("name", CASES)
def test_the_weights_are_those_of_trl_with_and_without_dead_groups(tmp_path, name):
    theirs = train(GRPOTrainer, tmp_path / "theirs", CASES[name], max_steps=5)
    everything = {"strategy": "grpo", "packing": False, "max_steps": 5}
    ours = train(LZEGRPOTrainer, tmp_path / "ours", CASES[name], **everything)
    assert moved_from(theirs, CASES[name]) > 1e-4
    assert distance(theirs, ours) == 0.0
    assert logged(theirs) == logged(ours)
    fewer = train(LZEGRPOTrainer, tmp_path / "fewer", CASES[name], max_steps=5)
    assert 0 < fewer.ledger.rows_trained < fewer.ledger.rows_rolled_out
    assert distance(theirs, fewer) < 1e-6


@pytest.mark.parametrize("name", ["a tool", "two images", "a tool that shows by a grid"])
def test_steps_without_a_live_group_are_those_of_trl(tmp_path, name):
    own = {"optim": "adamw_torch", "learning_rate": 1e-2, "adam_epsilon": 1e-3, "weight_decay": 0.1, "max_steps": 8}
    own |= {"per_device_train_batch_size": 2, "num_generations": 2, "gradient_accumulation_steps": 1}
    case = replace(CASES[name], settings={})
    ours, theirs = (train(cls, tmp_path / cls.__name__, case, **own) for cls in (LZEGRPOTrainer, GRPOTrainer))
    assert 2 <= ours.ledger.empty_updates <= 6
    assert distance(theirs, ours) < 1e-6 < 1e-2 < moved_from(ours, case)


@pytest.mark.parametrize("name", ["an environment", "two environments", "two images", "two images by their grids"])
def test_resumed_is_uninterrupted_bit_for_bit(tmp_path, name):
    # Four optimizer steps a generation batch: the checkpoint falls in the middle of the second one
    settings = SEVERAL_UPDATES | {"max_steps": 8, "save_strategy": "steps", "save_steps": 6}
    case = CASES[name]
    if "images" in name:  # transformers cannot load again what it saves of a whole model that sees
        case = replace(case, given=case.given | {"peft_config": LoraConfig(target_modules=["q_proj", "v_proj"])})
    whole = train(LZEGRPOTrainer, tmp_path, case, **settings)
    resumed = make(LZEGRPOTrainer, tmp_path, case, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert whole.ledger.rows_trained > 0 < max(history(whole, "grad_norm"))
    assert distance(whole, resumed) == 0.0


def run_on_processes(directory, name, settings):
    """Train a case of [`CASES`], whose groups each lie whole with one process: what is written depends on the place there."""
    world, case = int(os.environ.get("WORLD_SIZE", "1")), CASES[name.partition(", ")[0]]
    texts = agents.rows(texts=9)["prompt"]
    data = case.data.remove_columns("prompt").add_column("prompt", list(texts))
    settings = settings | {"per_device_train_batch_size": 8 // world}
    trainer = train(LZEGRPOTrainer, directory / f"{name}-{world}", replace(case, data=data), **settings)
    leave(directory, name, trainer, {"trained": trainer.ledger.rows_trained, "drawn": trainer.ledger.rows_rolled_out})


def test_two_processes_are_one(tmp_path):
    # One optimizer step a generation batch: else TRL draws on each process which rows share one
    shape = {"max_steps": 5, "steps_per_generation": 2, "learning_rate": 0.05}
    names = ("a tool", "two environments", "two rewards", "two images", "two images by their grids")
    cases = dict.fromkeys([*names, "a tool that shows by a grid"], shape)
    gate = shape | {"strategy": "gate", "controller_kwargs": {"hold": "nothing"}, "window": 1}  # else places differ
    cases |= {f"{name}, by the gate": gate for name in ("two rewards", "two images")}
    for processes in (1, 2):
        launch(tmp_path, processes, run_on_processes, cases)
    found = [assert_one(tmp_path, name) for name in cases]
    assert all(one["trained"] > 0 for one in found)
    assert any(one["trained"] < one["drawn"] for one in found)


class OneShows(LZEGRPOTrainer):
    """The first process calls a tool that shows a picture for every row, the second one for its first group alone, which is dead."""

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        encoder, written = self.processing_class.tokenizer, []
        for place, ids in enumerate(prompt_ids):
            shows = "t:" not in encoder.decode(ids) and (self.is_world_process_zero() or place < 4)
            text = '<tool_call>{"name": "show", "arguments": {"a": 0}}</tool_call>' if shows else str(place)
            written.append([*encoder(text)["input_ids"], 1])
        return written, None


def show_on_one(directory, name, settings):
    model, processor = agents.qwen()
    trainer = OneShows(
        model=model,
        args=tiny.config(directory, per_device_train_batch_size=8, max_completion_length=300, **settings),
        train_dataset=agents.rows(texts=9),
        processing_class=processor,
        tools=[agents.show],
        reward_funcs=lambda completions, **kwargs: [float(i > 3 and i % 2) for i in range(len(completions))],
    )
    trainer.train()
    leave(directory, name, trainer, {"trained": trainer.ledger.rows_trained})


def test_a_process_may_have_no_picture_to_train_on(tmp_path):
    launch(tmp_path, 2, show_on_one, {"one": {"strategy": "exact", "max_steps": 2}})
    assert [record["trained"] > 0 for record in records(tmp_path, "one", 2)] == [True, True]


def test_processes_with_different_turns_need_an_engine_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(LZEGRPOConfig, "world_size", 2)
    servers = {"use_vllm": True, "vllm_mode": "http", "vllm_server_urls": ["http://127.0.0.1:9"]}
    with pytest.raises(ValueError, match="With `tools`, processes need different numbers of turns"):
        make(LZEGRPOTrainer, tmp_path, CASES["a tool"], **servers)


@pytest.mark.parametrize("sharded", ["is_zero3", "is_fsdp"])
@pytest.mark.parametrize("name", ["a tool", "two environments"])
def test_tools_are_refused_where_processes_have_to_take_turns_together(tmp_path, monkeypatch, sharded, name):
    make(LZEGRPOTrainer, tmp_path, CASES[name])
    monkeypatch.setattr(DistributedBackend, sharded, True)
    make(LZEGRPOTrainer, tmp_path, CASES[name])  # one process
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    message = r"different numbers of turns, and .* gathers weights .*`vllm_mode='colocate'`"
    with pytest.raises(ValueError, match=message):
        make(LZEGRPOTrainer, tmp_path, CASES[name])


ROUNDS = {
    "gate": {"strategy": "gate"},
    "ada": {"controller": "reinforce_ada_balanced", "controller_kwargs": {"round_size": 2}, "pass_threshold": 1},
    "dynamic": {"controller": "dynamic", "selection_ratio": 0.7},
}


@pytest.mark.parametrize("settings", ROUNDS.values(), ids=ROUNDS)
@pytest.mark.parametrize("name", ["two environments", "no data", "a tool that shows by a grid"])
def test_controllers_of_several_rounds(tmp_path, name, settings):
    trainer = train(LZEGRPOTrainer, tmp_path, CASES[name], max_steps=6, telemetry=True, **settings)
    resets = sum(environment.resets for environment in (Scored, Falling, Owner))
    episodes = 0 if "environment_factory" not in CASES[name].given else trainer.ledger.rows_rolled_out
    assert resets == episodes
    assert trainer.ledger.rows_trained > 0
    assert moved_from(trainer, CASES[name]) > 1e-4
    texts = open_run(tmp_path).sql("SELECT completion FROM completions")["completion"].dropna()
    assert texts.str.contains("[tool]", regex=False).any()


@pytest.mark.parametrize(("name", "count"), [("an image", 1), ("two images by their grids", 2), ("a tool", 0)])
def test_images_are_shown_with_their_prompt(tmp_path, name, count):
    train(LZEGRPOTrainer, tmp_path, CASES[name], max_steps=2, telemetry=True)
    run = open_run(tmp_path)
    for prompt in run.prompts()["prompt_id"].tolist():
        urls = run.images(prompt)
        pictures = [Image.open(BytesIO(b64decode(url.partition(",")[2]))) for url in urls]
        assert [picture.format for picture in pictures] == ["PNG"] * count
        assert {picture.size for picture in pictures} <= {(8, 8), (16, 8), (8, 16)}  # small ones as they are
        assert all(f'src="{url}"' in prompt_detail(run, prompt) for url in urls)


def test_other_rows_may_be_assigned_that_have_no_prompt_either(tmp_path):
    case = CASES["no prompts"]
    trainer = train(LZEGRPOTrainer, tmp_path, case, max_steps=2)
    trainer.train_dataset = agents.rows().remove_columns("prompt").select(range(6))
    trainer.train()
    with pytest.raises(ValueError, match="`train_dataset` is required"):
        trainer.train_dataset = None


def test_without_data_nothing_is_remembered_of_prompts(tmp_path, caplog):
    trainer = train(LZEGRPOTrainer, tmp_path, CASES["no data"], strategy="lze", max_steps=6)
    assert len(trainer.prompt_state) == 0
    assert trainer.resolved == {"pruning": "none", "deduplicate": False, "window": 1}
    assert sum("none is recognised when it comes again" in record.message for record in caplog.records) == 1
    for setting in ({"pruning": "refill"}, {"planner": "greso"}):
        with pytest.raises(ValueError, match="need prompts that come again, and there is no `train_dataset`"):
            make(LZEGRPOTrainer, tmp_path, CASES["no data"], **setting)


def failing(name: str, how, when=lambda environment: True):
    """An environment with a method that raises, or does something else instead, in some episodes."""
    method = getattr(Scored, name)

    @functools.wraps(method)
    def fail(self, *args, **kwargs):
        usual = method(self, *args, **kwargs)
        if not when(self):
            return usual
        if isinstance(how, Exception):
            raise how
        return how()

    return type("Failing", (Scored,), {name: fail})


FAILURES = {
    "reset raises": ("reset", RuntimeError("no start"), "raised RuntimeError: no start"),
    "reset hangs": ("reset", lambda: time.sleep(2), "raised TimeoutError: longer than 0.2 s"),
    "reset is a number": ("reset", lambda: 3, "returned 3, and not a text"),
    "its server is lost": ("plus", ConnectionResetError("gone"), "raised ConnectionResetError: gone"),
    "its reward raises": ("get_reward", KeyError("score"), "raised KeyError: 'score'"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failed_episode_is_left_out_counted_and_told(tmp_path, caplog, name):
    method, how, message = FAILURES[name]
    calls = itertools.count()

    def every_fifth(environment):
        return next(calls) % 5 == 1

    def total_reward(environments, log_extra, **kwargs):
        totals = [environment.total for environment in environments]  # not there where `reset` has raised first
        log_extra("total", totals)
        return [float(total % 3 == 0) for total in totals]

    case = Case({"environment_factory": failing(method, how, every_fifth), "reward_funcs": total_reward}, ("plus",))
    settings = {"environment_timeout": 0.2, "max_steps": 2, "strategy": "grpo", "log_completions": True}
    trainer = train(LZEGRPOTrainer, tmp_path, case, telemetry=True, telemetry_completions="all", **settings)
    failed = history(trainer, "lze/failed_episodes")
    assert len(failed) == 2 and 0 < sum(failed) < 24
    assert f"`Failing.{method}` {message}" in caplog.text
    assert "episodes failed and are left out: their reward is None" in caplog.text
    assert open_run(tmp_path).sql("SELECT reward FROM completions")["reward"].isna().sum() == sum(failed)


def test_an_episode_is_rewarded_once(tmp_path):
    class Once(Scored):
        rewards = 0

        def get_reward(self) -> float:
            type(self).rewards += 1
            return super().get_reward()

    trainer = train(LZEGRPOTrainer, tmp_path, Case({"environment_factory": Once}, ("plus",)), strategy="gate")
    assert trainer.ledger.rows_given_up == 0 and Once.rewards == Once.resets > 0


def test_an_episode_that_fails_while_it_is_rewarded_moves_no_other_reward():
    environment = guarded(failing("get_reward", KeyError("score"), lambda one: one.total == 1), None)
    environments = [environment() for _ in range(4)]
    for total, one in enumerate(environments):
        one.total = total
    reward = checked(lambda completions, environments, log_extra: [one.get_reward() for one in environments], "own")
    given = {"completions": [""] * 4, "environments": environments, "log_extra": print}
    assert reward(**given, thinking_prefix=["<think>"] * 4) == [0.0, None, 0.0, 1.0]


class Vote:  # of whole groups; a ballot says of which prompt it is
    def read(self, completions, truncated, start, **columns):
        return start

    def score_group(self, ballots, final=True):
        assert len(set(ballots)) == 1
        return SimpleNamespace(rewards=[1.0] * len(ballots), metrics={"votes": len(ballots)})


@pytest.mark.parametrize("method", ["reset", "get_reward"])  # before the vote, and after it was read
def test_a_failed_episode_has_no_vote(tmp_path, method):
    calls = itertools.count()
    flaky = failing(method, OSError("gone"), lambda environment: next(calls) % 5 == 1)
    case = Case({"environment_factory": flaky, "reward_funcs": Vote()})
    trainer = train(LZEGRPOTrainer, tmp_path, case, max_steps=2)
    failed, votes = history(trainer, "lze/failed_episodes"), history(trainer, "Vote/votes")
    assert min(failed) > 0 and votes == [(12 - count) / 3 for count in failed]


def test_where_all_episodes_have_failed_no_reward_function_is_called():
    environment = guarded(failing("reset", RuntimeError("gone")), None)
    lost = environment()
    lost.reset(start=1, seen=[])
    longest = checked(lambda completions, **kwargs: [max(map(len, completions))], "longest")
    assert longest(completions=["a"], environments=[lost], log_extra=print) == [None]


@pytest.mark.parametrize("strategy", ["exact", "gate"])
def test_a_prompt_whose_episodes_keep_failing_ends_the_run(tmp_path, strategy):
    never = failing("reset", RuntimeError("no such level"), lambda environment: environment.total == 4)
    case = Case({"environment_factory": never}, ("plus",))
    settings = {"max_steps": 60, "save_strategy": "steps", "save_steps": 1, "telemetry": True}
    with pytest.raises(EpisodeError, match=r"[34] episodes in a row failed .*raised RuntimeError: no such level"):
        train(LZEGRPOTrainer, tmp_path, case, strategy=strategy, shuffle_dataset=False, **settings)
    assert open_run(tmp_path).generations()["groups"].sum() > 0


def test_an_episode_that_succeeds_beside_failed_ones_resets_their_count():
    episodes = Episodes()
    episodes.observe([5] * 10, ["p"] * 10, ["lost"] * 9 + [None])
    with pytest.raises(EpisodeError, match="3 episodes in a row"):
        episodes.observe([5] * 3, ["p"] * 3, ["lost"] * 3)


def test_the_environment_of_the_page_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[1] / "docs" / "agents.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.+?)```", page, re.S)
    small = "environment_timeout=60, use_cpu=True, bf16=False, max_steps=1, max_completion_length=4, report_to='none'"
    names: dict[str, Any] = {}
    exec(example.replace("environment_timeout=60", small), names)
    model = agents.save(tmp_path / "model")
    trainer = names["make_trainer"](model, agents.rows(12))
    trainer.train()
    assert trainer.reward_func_names == ["Counter"]
    assert history(trainer, "lze/failed_episodes") == [0.0]


def test_the_calculator_of_the_example_trains(tmp_path, monkeypatch):
    pytest.importorskip("reasoning_gym")
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "examples")
    example = importlib.import_module("calculator_tool")
    sums = {"(3 + 4) * -2": "-14", " 7/2 ": "3.5", "12": "12"}
    assert {text: example.calculate(text) for text in sums} == sums
    for text in ("__import__('os')", "2 ** 9", "'a' * 9", "True + 1", "1" * 201, "(" * 150, "f(1)"):
        with pytest.raises((ValueError, SyntaxError)):
            example.calculate(text)
    model = agents.save(tmp_path / "model")
    monkeypatch.setattr(example, "LZEGRPOTrainer", agents.scripted(LZEGRPOTrainer, ("calculate",)))
    script = example.tools.Script(model, "reasoning_gym:chain_sum?size=9", shots=1)
    (trainer := example.make_trainer(script, tiny.config(tmp_path, max_completion_length=300, max_steps=1))).train()
    assert history(trainer, "tools/call_frequency")[0] > 0


@pytest.mark.slow
def test_the_openenv_agent_of_the_example_trains(tmp_path, monkeypatch):
    pytest.importorskip("openenv")
    examples = Path(__file__).parents[1] / "examples"
    monkeypatch.syspath_prepend(examples)
    problems, port = "reasoning_gym:chain_sum?size=9&min_terms=2&max_terms=2&max_digits=1", tiny.free_port()
    monkeypatch.setenv("OPENENV_URL", f"http://127.0.0.1:{port}")
    example = importlib.import_module("openenv_agent")
    model = agents.save(tmp_path / "model")
    monkeypatch.setattr(example, "LZEGRPOTrainer", agents.scripted(LZEGRPOTrainer, ("answer",), "text"))
    server = subprocess.Popen([sys.executable, examples / "openenv_server.py", problems, "--port", str(port)])
    try:
        for attempt in Retrying(stop=stop_after_delay(120), wait=wait_fixed(0.5), reraise=True):
            with attempt:
                socket.create_connection(("127.0.0.1", port), 1).close()

        def make(problems, folder, **settings):
            script = example.tools.Script(model, problems)
            return example.make_trainer(script, tiny.config(folder, max_completion_length=300, **settings))

        trainer = make(problems, tmp_path, max_steps=4, environment_timeout=30)
        trainer.train()
        assert history(trainer, "lze/failed_episodes") == [0.0] * 4
        assert max(history(trainer, "rewards/Problem/mean")) > 0
        assert sum(history(trainer, "tools/call_frequency")) > 0
        with pytest.raises(EpisodeError, match="none of the 9 problems of this server has the question"):
            make(f"{problems}&seed=1", tmp_path / "other", max_steps=20).train()
    finally:
        server.kill()
        server.wait()


def test_a_recipe_names_tools_and_environments(tmp_path):
    pytest.importorskip("reasoning_gym")
    model = agents.save(tmp_path / "model")
    flags = {"model_name_or_path": model, "output_dir": tmp_path, "report_to": "none", "use_cpu": True}
    flags |= {"bf16": False, "max_completion_length": 4, "max_steps": 1, "datasets": "reasoning_gym:chain_sum?size=9"}
    flags |= {"num_generations": 4, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}

    def of_recipe(**keys):
        given = [text for name, value in (flags | keys).items() for text in (f"--{name}", str(value))]
        return build_trainer(*parse_recipe(given))

    trainer = of_recipe(tools="agents.add", reward_funcs="reasoning_gym")
    trainer.train()
    assert trainer.tools == [agents.add]
    trainer = of_recipe(environment_factory="agents.Scored")
    assert trainer.reward_func_names == ["accuracy_reward", "Scored"]
    with pytest.raises(ValueError, match=r"`tools: agents.ad` is no function or class .* Did you mean 'add'"):
        of_recipe(tools="agents.ad")


@pytest.mark.parametrize("name", ["a tool", "two environments", "two images"])
def test_a_forecast_leaves_no_trace(tmp_path, name):
    alone = train(LZEGRPOTrainer, tmp_path / "alone", CASES[name])
    asked = make(LZEGRPOTrainer, tmp_path / "asked", CASES[name])
    assert len(asked.forecast(4).sample) == 4
    asked.train()
    assert distance(alone, asked) == 0.0


def test_a_prompt_is_its_row(tmp_path):
    # Three texts, and nine rows that `reset` tells apart
    trainer = train(LZEGRPOTrainer, tmp_path, CASES["an environment"], max_steps=6)
    assert len(trainer.prompt_state) == 9


def test_what_a_tool_raises_is_told_to_the_model(tmp_path):
    case = Case({"environment_factory": failing("plus", ValueError("not so"))}, ("plus",))
    trainer = train(LZEGRPOTrainer, tmp_path, case, max_steps=1)
    assert history(trainer, "lze/failed_episodes") == [0.0]
    assert history(trainer, "tools/failure_frequency") == [1.0]
