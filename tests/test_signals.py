"""Signals of schedulers and terminals: a training ends in order, with a checkpoint if it is told to, and leaves nothing running."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import yaml

import tiny
from launches import fork, gap, on_two_cpus
from lze_trl import signals
from lze_trl.checkpoint import checkpoints, is_complete, last_complete_checkpoint
from lze_trl.record import open_run
from lze_trl.signals import SIGNALS


SAVED = {"save_strategy": "steps", "save_steps": 50, "max_steps": 6, "telemetry": True}


def signalled(rank: int, step: int, numbers: list[int], pause: float = 0.0):
    """A reward that sends signals to its own process once, on a rank and in a step."""
    left = list(numbers)

    def reward(completions, trainer_state, **kwargs):
        while left and trainer_state.global_step == step and os.environ.get("RANK", "0") == str(rank):
            try:
                os.kill(os.getpid(), left.pop(0))
                time.sleep(pause)
            except SystemExit:
                if not pause:
                    raise
        return tiny.even_length_reward(completions)

    return reward


def script(directory: Path, settings: dict):
    """Train, from the newest checkpoint if there is one, and write the weights."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under `nohup` it is ignored
    signals._SAME, reward = 0.2, settings.pop("reward", (0, 9, []))
    trainer = tiny.make(directory / "run", reward_funcs=signalled(*reward), **SAVED | settings)
    trainer.train(resume_from_checkpoint=last_complete_checkpoint(directory / "run"))
    torch.save(trainer.model.state_dict(), directory / "weights.pt")


def ended(directory: Path, *ranks: dict[str, str], timeout: float = 120, **settings) -> list[int | None]:
    """Exit statuses of the script on processes with these variables."""
    directory.mkdir(exist_ok=True)
    processes = [fork(directory / "log.txt", env, script, directory, settings) for env in ranks or ({},)]
    for process in processes:
        process.join(timeout)
        process.kill()
    return [process.exitcode for process in processes]


def state(directory: Path) -> str:
    return open_run(directory / "run").status()["state"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_ends_a_script_as_ctrl_c_does(tmp_path, number):
    assert ended(tmp_path, reward=(0, 2, [number]), save_steps=1) == [128 + number]
    told = (tmp_path / "log.txt").read_text()
    assert f"To go on from `{tmp_path}/run/checkpoint-2`" in told and "Traceback" not in told
    assert state(tmp_path) == "interrupted"
    assert open_run(tmp_path / "run").summary()["generations"] == 2
    assert ended(tmp_path) == [0]
    assert state(tmp_path) == "finished"


@pytest.mark.parametrize("saves", [False, True])
def test_what_catches_everything_cannot_keep_a_training_alive(tmp_path, saves):
    assert ended(tmp_path, reward=(0, 2, [signal.SIGTERM], 0.01), enable_jit_checkpoint=saves) == [143]
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["checkpoint-3"] * saves


def test_a_second_signal_ends_at_once(tmp_path):
    settings = {"reward": (0, 2, [signal.SIGTERM] * 2, 0.5), "enable_jit_checkpoint": True}
    assert ended(tmp_path, **settings) == [143]
    assert not checkpoints(tmp_path / "run") and state(tmp_path) == "running"


def test_the_same_signal_twice_is_one(tmp_path):
    """A scheduler sends it to all processes, and the launcher forwards it."""
    settings = {"reward": (0, 2, [signal.SIGTERM] * 2, 0.01), "enable_jit_checkpoint": True}
    assert ended(tmp_path, **settings) == [143]
    assert is_complete(tmp_path / "run" / "checkpoint-3") and state(tmp_path) == "interrupted"


def test_processes_agree_on_the_step_after_which_they_end(tmp_path):
    (tmp_path / "two").mkdir()
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(tiny.free_port())}
    ranks = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    settings = {"enable_jit_checkpoint": True, "per_device_train_batch_size": 6}
    settings |= {"reward": (1, 2, [signal.SIGUSR1])}
    assert ended(tmp_path / "two", *ranks, **settings) == [138, 138], (tmp_path / "two" / "log.txt").read_text()
    assert is_complete(tmp_path / "two" / "run" / "checkpoint-3") and state(tmp_path / "two") == "interrupted"


def test_resumed_after_the_notice_is_uninterrupted(tmp_path):
    assert ended(tmp_path / "whole") == [0]
    assert ended(tmp_path / "noticed", reward=(0, 2, [signal.SIGTERM]), enable_jit_checkpoint=True) == [143]
    assert ended(tmp_path / "noticed") == [0]
    assert gap(*(tmp_path / name / "weights.pt" for name in ("whole", "noticed"))) == 0.0


def test_handlers_of_others_are_left_alone(tmp_path):
    got: list[int] = []
    before = {number: signal.getsignal(number) for number in signals.ENDING}
    try:
        signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # under nohup
        seen = []

        def reward(completions, **kwargs):
            seen.append([signal.getsignal(number) for number in signals.ENDING])
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGHUP)
            return tiny.even_length_reward(completions)

        mine = [signal.getsignal(number) for number in signals.ENDING]
        tiny.run(tmp_path, reward_funcs=reward, max_steps=1, enable_jit_checkpoint=True)
        assert got == [signal.SIGTERM] and not SIGNALS.received
        assert seen[0][:2] == mine[:2] and seen[0][2] != mine[2]
        assert [signal.getsignal(number) for number in signals.ENDING] == mine  # as before the training
        thread = threading.Thread(target=tiny.run, args=(tmp_path,), kwargs={"reward_funcs": reward, "max_steps": 1})
        thread.start()
        thread.join()
        assert seen[1] == mine  # Python handles signals in the main thread
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


PATIENT = """
import os, time
from pathlib import Path
import tiny

def patient(completions, trainer_state, **kwargs):
    if trainer_state.global_step == 2:
        Path("trains").touch()
        time.sleep(600)
    return tiny.even_length_reward(completions)
"""


def launched(directory: Path, way: str, reward: str) -> subprocess.Popen:
    """Start the job in one of its ways, in a session of its own. All of its processes have the variable `OF_TEST`."""
    (directory / "stopping.py").write_text(PATIENT)
    own = {"reward_funcs": [reward], "output_dir": "run"}
    recipe, job = (
        tiny.recipe(directory, **tiny.job(directory, train=12) | own),
        ["-m", "lze_trl.job.train", "--config"],
    )
    command = ["-m", "accelerate.commands.launch", *job, recipe] if way == "accelerate" else ["-m", "lze_trl.job.cli"]
    command += [] if way == "accelerate" else ["train", recipe]
    if way == "two processes":
        (directory / "two.yaml").write_text(yaml.safe_dump(on_two_cpus("ddp")))
        command += ["--accelerate_config", "two.yaml", "--main_process_port", str(tiny.free_port())]
        command += ["--per_device_train_batch_size", "6"]
    paths = [
        os.environ.get("PYTHONPATH", ""),
        str(Path(__file__).parents[1]),
        str(Path(__file__).parent),
        str(directory),
    ]
    env = os.environ | {"PYTHONPATH": ":".join(paths), "OF_TEST": str(directory), "OMP_NUM_THREADS": "1"}
    with open(directory / "log.txt", "w") as log:
        return subprocess.Popen(
            [sys.executable, *command], cwd=directory, env=env, stdout=log, stderr=log, start_new_session=True
        )


def processes_of(directory: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("OF_TEST") == str(directory) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_for(condition, seconds: float = 240):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert condition()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "number", "status"),
    [
        ("one process", signal.SIGTERM, 143),
        ("one process", signal.SIGINT, 130),
        ("two processes", signal.SIGTERM, 143),
        ("two processes", signal.SIGUSR1, 138),
        ("accelerate", signal.SIGHUP, -signal.SIGHUP),  # its own launcher ends at once, and the training after it
        ("accelerate", signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_a_signal_to_the_launcher_leaves_nothing_running(tmp_path, way, number, status):
    launcher = launched(tmp_path, way, "stopping.patient")
    try:
        wait_for((tmp_path / "trains").exists)
        launcher.send_signal(number)
        assert launcher.wait(timeout=120) == status
        wait_for(lambda: not processes_of(tmp_path))
    finally:
        for process in processes_of(tmp_path):
            process.kill()
    assert state(tmp_path) == "interrupted"
    told = (tmp_path / "log.txt").read_text()
    assert told.count("Stopped. ") == 1 and "Traceback" not in told
    assert "the same command with `--resume_from_checkpoint auto`" in told


@pytest.mark.slow
@pytest.mark.parametrize("module", ["lze_trl.job.cli", "lze_trl.job.train"])
def test_ctrl_c_while_importing_shows_nothing(tmp_path, module):
    process = launched(tmp_path, "one process", "stopping.patient")
    of_it = psutil.Process(process.pid)
    wait_for(lambda: module in of_it.cmdline() and any("libtorch" in file.path for file in of_it.memory_maps()))
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert "Traceback" not in (tmp_path / "log.txt").read_text()
