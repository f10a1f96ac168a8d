"""Tools, environments and images: with nothing left out, the weights are those of TRL's trainer."""

import importlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from base64 import b64decode
from collections import Counter
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from peft import LoraConfig
from PIL import Image
from tenacity import Retrying, stop_after_delay, wait_fixed
from trl import GRPOTrainer

import agents
import tiny
from agents import Counting, Falling, Owner, Scored, odd_answer_reward, odd_total_reward
from case_runs import leave, run_all
from launches import on_processes
from lze_trl import LZEGRPOTrainer
from lze_trl.app.views import prompt_detail
from lze_trl.job.recipe import parse_recipe
from lze_trl.job.train import build_trainer
from lze_trl.record import open_run
from lze_trl.rollout.episodes import EpisodeError
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
CASES = {
    "a tool": Case(BY_ANSWER | {"tools": [agents.add]}, ("add", "none")),
    "an asynchronous tool": Case(BY_ANSWER | {"tools": [agents.add_later]}, ("add_later",)),
    "one call": Case(BY_ANSWER | {"tools": [agents.add]}, ("add",), settings={"max_tool_calling_iterations": 1}),
    "an environment": Case({"environment_factory": Counting, "reward_funcs": odd_total_reward}, ("plus",)),
    "its own reward": Case({"environment_factory": Scored}, ("plus",)),
    "two rewards": Case(BY_ANSWER | {"environment_factory": Scored}, ("plus",)),
    "two environments": Case(
        BY_ANSWER | {"environment_factory": {"odd": Scored, "even": Falling}},
        ("plus", "minus"),
        agents.rows(environments=True),
    ),
    "no prompts": Case({"environment_factory": Scored}, ("plus",), agents.rows().remove_columns("prompt")),
    "no data": Case({"environment_factory": Owner}, ("plus",), None),
    "several updates": Case(BY_ANSWER | {"environment_factory": Scored}, ("plus",), settings=SEVERAL_UPDATES),
    "an image": Case(BY_ANSWER, (), agents.rows(images=1), model=agents.llava),
    "two images": Case(BY_ANSWER, (), agents.rows(images=2), SEVERAL_UPDATES, agents.llava),
    "an image by its grid": Case(BY_ANSWER, (), agents.rows(images=1), SEVERAL_UPDATES, agents.qwen),
    "two images by their grids": Case(BY_ANSWER, (), agents.rows(images=2), model=agents.qwen),
    "a tool that shows": Case(BY_ANSWER | {"tools": [agents.show]}, ("show",), model=agents.llava),
    "a tool that shows by a grid": Case(BY_ANSWER | {"tools": [agents.show]}, ("show",), model=agents.qwen),
}


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
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


@pytest.mark.parametrize("name", CASES)
def test_with_nothing_left_out_the_weights_are_those_of_trl(tmp_path, name):
    theirs = train(GRPOTrainer, tmp_path / "theirs", CASES[name])
    ours = train(LZEGRPOTrainer, tmp_path / "ours", CASES[name], strategy="grpo", packing=False)
    assert moved_from(theirs, CASES[name]) > 1e-4
    assert distance(theirs, ours) == 0.0
    assert logged(theirs) == logged(ours)


def moved_from(trainer, case) -> float:
    before = case.model()[0].state_dict()
    after = trainer.model.state_dict()
    return max(float((after[name] - value).abs().max()) for name, value in before.items())


@pytest.mark.parametrize("name", CASES)
def test_leaving_out_dead_groups_changes_no_weight(tmp_path, name):
    theirs = train(GRPOTrainer, tmp_path / "theirs", CASES[name], max_steps=5)
    ours = train(LZEGRPOTrainer, tmp_path / "ours", CASES[name], max_steps=5)
    assert 0 < ours.ledger.rows_trained < ours.ledger.rows_rolled_out
    assert distance(theirs, ours) < 1e-6


@pytest.mark.parametrize("name", ["an environment", "two environments", "two images", "two images by their grids"])
def test_resumed_is_uninterrupted_bit_for_bit(tmp_path, name):
    # Four optimizer steps a generation batch: the checkpoint falls in the middle of the second one
    settings = SEVERAL_UPDATES | {"max_steps": 8, "save_strategy": "steps", "save_steps": 6}
    case = CASES[name]
    if "images" in name:  # transformers cannot load again what it saves of a whole model that sees
        case = replace(case, given=case.given | {"peft_config": LoraConfig(target_modules=["q_proj", "v_proj"])})
    whole = train(LZEGRPOTrainer, tmp_path, case, **settings)
    shutil.rmtree(tmp_path / "checkpoint-8")
    resumed = make(LZEGRPOTrainer, tmp_path, case, **settings)
    resumed.train(resume_from_checkpoint=True)
    assert whole.ledger.rows_trained > 0 < max(history(whole, "grad_norm"))
    assert distance(whole, resumed) == 0.0


ON_PROCESSES = {
    "a tool": agents.rows(texts=9),
    "two environments": agents.rows(environments=True, texts=9),
    "two rewards": agents.rows(texts=9),
    "two images": agents.rows(images=2, texts=9),
    "two images by their grids": agents.rows(images=2, texts=9),
    "a tool that shows by a grid": agents.rows(texts=9),
}


def run_on_processes(directory, name, settings):
    """Train a case of [`CASES`], whose groups each lie whole with one process: what is written depends on the place there."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    case = replace(CASES[name.partition(", ")[0]], data=ON_PROCESSES[name.partition(", ")[0]])
    trainer = train(
        LZEGRPOTrainer, directory / f"{name}-{world}", case, per_device_train_batch_size=8 // world, **settings
    )
    leave(directory, name, trainer, {"trained": trainer.ledger.rows_trained, "drawn": trainer.ledger.rows_rolled_out})


def test_two_processes_are_one(tmp_path):
    # One optimizer step a generation batch: else TRL draws on each process which rows share one
    shape = {"max_steps": 5, "steps_per_generation": 2, "learning_rate": 0.05}
    cases = dict.fromkeys(ON_PROCESSES, shape)
    cases |= {f"{name}, by the gate": shape | {"strategy": "gate"} for name in ("two rewards", "two images")}
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    for processes in (1, 2):
        on_processes(processes, tmp_path / "log.txt", run_all, run_on_processes, tmp_path / "cases.json")
    left_out = 0
    for name in cases:
        one = json.loads((tmp_path / f"{name}.1.0.json").read_text())
        assert one["trained"] > 0, name
        left_out += one["drawn"] - one["trained"]
        assert [json.loads((tmp_path / f"{name}.2.{rank}.json").read_text()) for rank in range(2)] == [one, one], name
        first, second = (torch.load(tmp_path / f"{name}.{world}.pt") for world in (1, 2))
        assert max(float((first[key] - second[key]).abs().max()) for key in first) < 1e-5, name
    assert left_out > 0


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "gate"},
        {"controller": "reinforce_ada_balanced", "controller_kwargs": {"round_size": 2}, "pass_threshold": 1},
        {"controller": "dynamic", "selection_ratio": 0.7},
    ],
    ids=["gate", "reinforce_ada", "dynamic"],
)
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


@pytest.mark.parametrize("name", ["an image", "two images by their grids"])
def test_images_are_shown_with_their_prompt(tmp_path, name):
    train(LZEGRPOTrainer, tmp_path, CASES[name], max_steps=2, telemetry=True)
    run = open_run(tmp_path)
    for prompt in run.prompts()["prompt_id"].tolist():
        urls = run.images(prompt)
        pictures = [Image.open(BytesIO(b64decode(url.partition(",")[2]))) for url in urls]
        assert [picture.format for picture in pictures] == ["PNG"] * (2 if "two" in name else 1)
        assert {picture.size for picture in pictures} <= {(8, 8), (16, 8), (8, 16)}  # small ones as they are
        assert all(f'src="{url}"' in prompt_detail(run, prompt) for url in urls)
    train(LZEGRPOTrainer, tmp_path / "text", CASES["a tool"], max_steps=1, telemetry=True)
    text = open_run(tmp_path / "text")
    assert text.images(text.prompts()["prompt_id"].tolist()[0]) == []


def test_a_prompt_is_its_row(tmp_path):
    # Three texts, and nine rows that `reset` tells apart
    trainer = train(LZEGRPOTrainer, tmp_path, CASES["an environment"], max_steps=6)
    assert len(trainer.prompt_state) == 9


def test_without_data_nothing_is_remembered_of_prompts(tmp_path, caplog):
    trainer = train(LZEGRPOTrainer, tmp_path, CASES["no data"], strategy="lze", max_steps=6)
    assert len(trainer.prompt_state) == 0
    assert trainer.resolved == {"pruning": "none", "deduplicate": False}
    assert sum("none is recognised when it comes again" in record.message for record in caplog.records) == 1
    for setting in ({"pruning": "refill"}, {"planner": "greso"}):
        with pytest.raises(ValueError, match="need prompts that come again, and there is no `train_dataset`"):
            make(LZEGRPOTrainer, tmp_path, CASES["no data"], **setting)


def test_results_of_tools_are_not_trained_on(tmp_path):
    trainer = train(LZEGRPOTrainer, tmp_path, CASES["a tool"], max_steps=1, per_device_train_batch_size=12)
    drawn = trainer.generation_step.batch
    masked = drawn.rows.completion_tokens > drawn.rows.loss_tokens
    assert masked.any()
    assert (drawn.held["tool_mask"] == 0).any()


# ---- Environments that fail ----


def failing(name: str, how, when=lambda environment: True, base=Scored):
    """An environment of which a method fails in some episodes."""

    class Failing(base):
        def reset(self, **row):
            observation = super().reset(**row)
            return self._fail(observation) if name == "reset" else observation

        def plus(self, a: int) -> str:
            """
            Add a number.

            Args:
                a: The number.
            """
            return self._fail(super().plus(a)) if name == "plus" else super().plus(a)

        def get_reward(self) -> float:
            return self._fail(super().get_reward()) if name == "get_reward" else super().get_reward()

        def _fail(self, otherwise):
            return how() if when(self) else otherwise

    Failing.__name__ = Failing.__qualname__ = "Failing"
    return Failing


def loses(error):
    def how():
        raise error

    return how


FAILURES = {
    "reset raises": ("reset", loses(RuntimeError("no start")), "`Failing.reset` raised RuntimeError: no start"),
    "reset hangs": ("reset", lambda: time.sleep(2), "`Failing.reset` raised TimeoutError: longer than 0.2 s"),
    "reset is a number": ("reset", lambda: 3, "`Failing.reset` returned 3, and not a text"),
    "its server is lost": (
        "plus",
        loses(ConnectionResetError("gone")),
        "`Failing.plus` raised ConnectionResetError: gone",
    ),
    "its reward raises": ("get_reward", loses(KeyError("score")), "`Failing.get_reward` raised KeyError: 'score'"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failed_episode_is_left_out_counted_and_told(tmp_path, caplog, name):
    method, how, message = FAILURES[name]
    seen = Counter()

    def every_fifth(environment):
        seen["calls"] += 1
        return seen["calls"] % 5 == 2

    def total_reward(environments, log_extra, **kwargs):
        totals = [environment.total for environment in environments]  # not there where `reset` has raised first
        log_extra("total", totals)
        return [float(total % 3 == 0) for total in totals]

    case = Case({"environment_factory": failing(method, how, every_fifth), "reward_funcs": total_reward}, ("plus",))
    settings = {
        "environment_timeout": 0.2,
        "max_steps": 2,
        "strategy": "grpo",
        "log_completions": True,
        "telemetry": True,
        "telemetry_completions": "all",
    }
    trainer = train(LZEGRPOTrainer, tmp_path, case, **settings)
    failed = history(trainer, "lze/failed_episodes")
    assert len(failed) == 2 and 0 < sum(failed) < 24
    assert message in caplog.text and "episodes failed and are left out: their reward is None" in caplog.text
    assert open_run(tmp_path).sql("SELECT reward FROM completions")["reward"].isna().sum() == sum(failed)


def test_what_a_tool_raises_is_told_to_the_model(tmp_path):
    case = Case({"environment_factory": failing("plus", loses(ValueError("not so")))}, ("plus",))
    trainer = train(LZEGRPOTrainer, tmp_path, case, max_steps=1)
    assert history(trainer, "lze/failed_episodes") == [0.0]
    assert history(trainer, "tools/failure_frequency") == [1.0]


@pytest.mark.parametrize("strategy", ["exact", "gate"])
def test_a_prompt_whose_episodes_keep_failing_ends_the_run(tmp_path, strategy):
    never = failing("reset", loses(RuntimeError("no such level")), lambda environment: environment.total == 4)
    case = Case({"environment_factory": never}, ("plus",))
    settings = {"max_steps": 60, "save_strategy": "steps", "save_steps": 1, "telemetry": True}
    with pytest.raises(
        EpisodeError, match=r"3 episodes in a row failed for the prompt .*raised RuntimeError: no such level"
    ):
        train(LZEGRPOTrainer, tmp_path, case, strategy=strategy, shuffle_dataset=False, **settings)
    assert open_run(tmp_path).generations()["groups"].sum() > 0


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
    with pytest.raises(
        ValueError, match=r"`tools: agents.ad` is no function or class of a module.* Did you mean 'add'"
    ):
        of_recipe(tools="agents.ad")


@pytest.mark.parametrize("name", ["a tool", "two environments", "two images"])
def test_a_forecast_leaves_no_trace(tmp_path, name):
    alone = train(LZEGRPOTrainer, tmp_path / "alone", CASES[name])
    asked = make(LZEGRPOTrainer, tmp_path / "asked", CASES[name])
    told = asked.forecast(4)
    assert len(told.sample) == 4
    asked.train()
    assert distance(alone, asked) == 0.0
