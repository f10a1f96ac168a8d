"""Local runs of the trackers hold the metrics that the documentation names."""

import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from lze_trl.telemetry import open_run
from lze_trl.telemetry.tracking import HISTOGRAM, TABLE


TESTS = Path(__file__).parent
DOCUMENTED = TESTS.parent / "docs" / "telemetry.md"

TRAINING = """
import sys
import tiny
from lze_trl import LZEGRPOTrainer
from lze_trl.telemetry.tracking import EnergyTrackingCallback

# A controller that draws prompts logs all metrics that there are
arguments = tiny.config(
    sys.argv[1],
    report_to=[sys.argv[2]],
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
    trainer.add_callback(EnergyTrackingCallback(trainer.prompt_state, lambda: trainer._recorder.writer.flush()))
trainer.train()
"""


def train(tmp_path, tracker):
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]),
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(tmp_path),
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "HF_HOME": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-c", TRAINING, str(tmp_path / "run"), tracker]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def documented_metrics():
    """Names of the table in the documentation."""
    names = re.findall(r"^\| `(lze/[\w/]+)` \|", DOCUMENTED.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert names
    return set(names)


def leveldb_log(content):
    """Records of an offline run: a 7-byte header, then LevelDB's log format in blocks of 32 KiB."""
    position, record = 7, b""
    while position + 7 <= len(content):
        left = 32_768 - position % 32_768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        record += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""


@pytest.mark.slow
def test_wandb_offline_run_has_the_documented_metrics(tmp_path):
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    train(tmp_path, "wandb")
    logged = {}
    for data in leveldb_log(next(tmp_path.rglob("*.wandb")).read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        for item in record.history.item:
            name, *rest = item.nested_key or [item.key]
            logged.setdefault(name.removeprefix("train/"), {})["/".join(rest)] = item.value_json
    assert documented_metrics() - set(logged) == set()
    assert json.loads(logged["lze/energy_histogram"]["_type"]) == "histogram"
    assert json.loads(logged["lze/prompts"]["nrows"]) == 6


@pytest.mark.slow
def test_trackio_run_has_the_documented_metrics(tmp_path):
    pytest.importorskip("trackio")
    train(tmp_path, "trackio")
    code = """
import json
import trackio
from trackio import SQLiteStorage
runs = SQLiteStorage.get_runs("lze")
logs = SQLiteStorage.get_logs("lze", runs[0])
print(json.dumps(sorted({name for log in logs for name in log})))
"""
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HOME": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    logged = {name.removeprefix("train/") for name in json.loads(done.stdout.splitlines()[-1])}
    assert documented_metrics() - logged == set()


@pytest.mark.slow
def test_tensorboard_run_has_the_documented_metrics(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(tmp_path, "tensorboard")
    (events,) = (tmp_path / "run").rglob("events.out.tfevents.*")
    accumulator = EventAccumulator(str(events))
    accumulator.Reload()
    logged = {name.removeprefix("train/") for name in accumulator.Tags()["scalars"]}
    assert {name for name in logged if name.startswith("lze/")} == documented_metrics() - {HISTOGRAM, TABLE}
    recorded = open_run(tmp_path / "run").steps()
    for name in ("lze/pass_rate", "lze/energy", "lze/seen_prompts", "reward"):
        values = {event.step: event.value for event in accumulator.Scalars(f"train/{name}")}
        assert list(values) == [1, 2, 3, 4]
        assert values == pytest.approx(recorded[name].dropna().to_dict()), name
