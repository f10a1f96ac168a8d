"""Every metric that a training logs under `lze/` is documented."""

import os
import re
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from transformers import TrainerCallback

import tiny
from launches import run_to_end
from lze_trl.data import PromptStyle
from lze_trl.record import open_run
from lze_trl.selfplay.online import Instruction
from lze_trl.selfplay.writer import Seeds


def test_documented_metrics_are_those_that_are_logged(tmp_path):
    logged = set()
    seeds, style = Seeds(("How many apples are there?", "How many boats?")), PromptStyle(conversational=False)
    writing = Instruction(seeds, style, lambda shown, rng: [f"{rng.integers(10**9)} + 1 ="])
    for controller in (
        {},
        {"controller": "dynamic", "selector": "zero_variance", "selection_ratio": 1.0},
        {"strategy": "gate", "controller_kwargs": {"explore": 0.5}},
        {"self_play": {"instruct": True, "examples": 1, "own": 1, "overlap": 0.99}},
    ):
        own = {"instruction": writing} if "self_play" in controller else None
        trainer = tiny.run(tmp_path, trainer=own, max_steps=4, **controller)
        logged |= {name for entry in trainer.state.log_history for name in entry if name.startswith("lze/")}
    page = (Path(__file__).parents[1] / "docs" / "telemetry.md").read_text()
    documented = set(re.findall(r"^\| `(lze/\w+)` \|", page, re.M))
    # That of environments: see test_agents.py; and of syncs with servers: see test_lora_servers.py
    assert documented - {"lze/failed_episodes", "lze/weights_changed"} == logged


def make(directory, callbacks=(), **settings):
    given = {"eval_dataset": tiny.prompts(3), "callbacks": list(callbacks)}
    return tiny.make(directory, trainer=given, telemetry=True, per_device_eval_batch_size=4, **settings)


def logged(trainer, name):
    return [(entry["step"], entry[name]) for entry in trainer.state.log_history if name in entry]


def recorded(directory, name):
    rows = open_run(directory).sql(f"SELECT step, value FROM steps WHERE name = '{name}' ORDER BY step, time")
    return list(zip(rows.step, rows.value, strict=True))


def test_metrics_before_the_first_rollout_and_after_the_last_are_recorded(tmp_path):
    trainer = make(tmp_path, max_steps=2, eval_on_start=True)
    trainer.train()
    trainer.evaluate()
    assert [step for step, _ in logged(trainer, "eval_reward")] == [0, 2]
    for name in ("eval_reward", "loss", "train_runtime"):
        assert recorded(tmp_path, name) == logged(trainer, name)
    assert open_run(tmp_path).summary()["generations"] == 2


class Stops(TrainerCallback):
    """Raises an error in an event of a step."""

    def __init__(self, error, event="on_step_end", step=1):
        def stop(args, state, control, **kwargs):
            if state.global_step == step:
                raise error

        setattr(self, event, stop)


@pytest.mark.parametrize(
    ("error", "state"),
    [(None, "finished"), (RuntimeError("out of memory"), "failed"), (KeyboardInterrupt(), "interrupted")],
)
def test_status_of_a_training(tmp_path, error, state):
    trainer = make(tmp_path, [Stops(error)] if error else [], max_steps=2)
    with pytest.raises(type(error)) if error else nullcontext():
        trainer.train()
    assert not trainer.is_in_train
    status = open_run(tmp_path).status()
    assert (status["state"], status["steps"], status["max_steps"]) == (state, 1 if error else 2, 2)
    trainer.evaluate()
    assert open_run(tmp_path).status()["state"] == state  # an evaluation since changes nothing in that


def test_a_trainer_that_only_evaluates_leaves_the_telemetry_of_its_folder_alone(tmp_path):
    make(tmp_path, max_steps=1).train()
    before = sorted(tmp_path.glob("telemetry/**/*"))
    make(tmp_path, max_steps=1).evaluate()
    assert sorted(tmp_path.glob("telemetry/**/*")) == before


# Killed after checkpoint-3, before or after step 4, the second step of a generation batch, was recorded
@pytest.mark.parametrize(("event", "step"), [("on_save", 3), ("on_step_begin", 4)])
def test_a_resume_in_the_middle_of_a_generation_batch_records_every_step_once(tmp_path, event, step):
    settings = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6, "steps_per_generation": 2}
    settings["per_device_train_batch_size"] = 6
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, [Stops(KeyboardInterrupt(), event, step)], **settings).train()
    resumed = make(tmp_path, **settings)
    resumed.train(resume_from_checkpoint=True)
    assert [step for step, _ in logged(resumed, "loss")] == [1, 2, 3, 4, 5, 6]
    for name in ("loss", "lze/pass_rate", "learning_rate"):
        assert recorded(tmp_path, name) == logged(resumed, name)


TRACKED = """
import sys
import test_reporting
import trackio

trainer = test_reporting.make(sys.argv[1], max_steps=1, report_to=["trackio"], run_name="tiny", project="lze")
trainer.evaluate()
trainer.train()
trainer.evaluate()
trackio.finish()
print([log["train/global_step"] for log in trackio.SQLiteStorage.get_logs("lze", "tiny") if "eval/reward" in log])
"""


@pytest.mark.slow
def test_trackio_is_open_in_an_evaluation_before_and_after_the_training(tmp_path):
    pytest.importorskip("trackio")
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])])
    environment = {"PYTHONPATH": paths, "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    done = run_to_end([sys.executable, "-c", TRACKED, tmp_path / "run"], env=environment)
    assert "[0, 1]" in done.stdout.splitlines()
