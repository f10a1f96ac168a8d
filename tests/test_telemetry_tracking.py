"""Local runs of the trackers hold the metrics that the documentation names."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from lze_trl.record import open_run
from lze_trl.record.tracking import HISTOGRAM


TESTS = Path(__file__).parent
TRACKERS = [name for name in ("trackio", "tensorboard") if find_spec(name)]
DOCUMENTED = TESTS.parent / "docs" / "telemetry.md"

TRAINING = """
import sys
import tiny
from lze_trl import LZEGRPOTrainer
from lze_trl.record.tracking import EnergyTrackingCallback

# A controller that draws prompts logs all metrics that there are
arguments = tiny.config(
    sys.argv[1],
    report_to=sys.argv[2].split(","),
    telemetry=True,
    max_steps=4,
    run_name="tiny",
    project="lze",
    controller="dynamic",
    selector="zero_variance",
    selection_ratio=1.0,
)
trainer = LZEGRPOTrainer(
    model=tiny.model(),
    reward_funcs=tiny.even_length_reward,
    args=arguments,
    train_dataset=tiny.prompts(6),
    processing_class=tiny.tokenizer(),
)
if not any(isinstance(callback, EnergyTrackingCallback) for callback in trainer.callback_handler.callbacks):
    trainer.add_callback(EnergyTrackingCallback(trainer.prompt_state))
trainer.train()
"""


def train(tmp_path, trackers, program=TRAINING):
    """Run a program with some trackers, by default the training."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]),
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "HF_HOME": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-c", program, str(tmp_path / "run"), ",".join(trackers)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def documented_metrics():
    """Names of the table in the documentation, except those of the gate, of self-instruction and of environments, which are not at work here."""
    row = r"^\| `(lze/(?!gate_|guard|instruct_|failed_)[\w/]+)` \|"
    names = re.findall(row, DOCUMENTED.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert names
    return set(names)


def trackio_logs(tmp_path):
    """Every entry of the local runs, by run."""
    code = """
import json
from trackio import SQLiteStorage
print(json.dumps({run: SQLiteStorage.get_logs("lze", run) for run in SQLiteStorage.get_runs("lze")}))
"""
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HOME": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def tensorboard_scalars(tmp_path):
    """Events of all local runs, by name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    scalars = {}
    for events in sorted((tmp_path / "run").rglob("events.out.tfevents.*")):
        accumulator = EventAccumulator(str(events))
        accumulator.Reload()
        for name in accumulator.Tags()["scalars"]:
            scalars.setdefault(name, []).extend(accumulator.Scalars(name))
    return scalars


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    """The folder of a training that every tracker has followed."""
    folder = tmp_path_factory.mktemp("tracked")
    train(folder, TRACKERS)
    return folder


@pytest.mark.slow
def test_trackio_run_has_the_documented_metrics(tracked):
    pytest.importorskip("trackio")
    (logs,) = trackio_logs(tracked).values()
    assert documented_metrics() - {name.removeprefix("train/") for log in logs for name in log} == set()


@pytest.mark.slow
def test_tensorboard_run_has_the_documented_metrics(tracked):
    pytest.importorskip("tensorboard")
    scalars = {name.removeprefix("train/"): events for name, events in tensorboard_scalars(tracked).items()}
    assert {name for name in scalars if name.startswith("lze/")} == documented_metrics() - {HISTOGRAM}
    recorded = open_run(tracked / "run").steps()
    for name in ("lze/pass_rate", "lze/energy", "lze/seen_prompts", "reward"):
        values = {event.step: event.value for event in scalars[name]}
        assert list(values) == [1, 2, 3, 4]
        assert values == pytest.approx(recorded[name].dropna().to_dict()), name


@pytest.mark.slow
def test_trackio_is_open_in_an_evaluation_before_and_after_the_training(tmp_path):
    pytest.importorskip("trackio")
    program = TRAINING.replace("trainer.train()", "trainer.evaluate()\ntrainer.train()\ntrainer.evaluate()").replace(
        "train_dataset=", "eval_dataset=tiny.prompts(2), train_dataset="
    )
    assert program != TRAINING
    train(tmp_path, ["trackio"], program)
    (logs,) = trackio_logs(tmp_path).values()
    assert [log["train/global_step"] for log in logs if "eval/reward" in log] == [0, 4]
