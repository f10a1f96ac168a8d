"""One training at a time in an output folder: the second is refused, and one that has died blocks nothing."""

import multiprocessing
import os
import signal
import socket
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from accelerate import PartialState

import tiny
from launches import fork
from lze_trl import claim
from lze_trl.claim import NAME, OutputFolderError, claimed
from lze_trl.record import open_run


def hurry():
    """Signs of life every 0.2 s, and a death after 1 s without."""
    claim.RENEWED_SECONDS, claim.SILENT_SECONDS = 0.2, 1.0


def train(directory: Path, until: Path | None = None, host: str | None = None, **settings):
    """Train until a file is there, on a host."""
    hurry()
    if host is not None:
        socket.gethostname = lambda: host

    def reward(completions, **kwargs):
        (directory / f"{os.getpid()}.trains").touch()
        while until is not None and not until.exists():
            time.sleep(0.02)
        return tiny.even_length_reward(completions)

    own = {"telemetry": True, "save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    tiny.run(directory / "run", reward_funcs=reward, **own | settings)


def begin(directory: Path, *args, env: dict | None = None, **settings) -> multiprocessing.Process:
    return fork(directory / "log.txt", env or {}, partial(train, directory, *args, **settings))


def trains(directory: Path, process: multiprocessing.Process):
    deadline = time.monotonic() + 60
    while not (directory / f"{process.pid}.trains").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert process.is_alive(), (directory / "log.txt").read_text()


def files(folder: Path) -> dict[Path, int]:
    """The files of a run, except its status, which is renewed."""
    return {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file() and p.name not in (NAME, "status.json")}


@pytest.fixture(autouse=True)
def as_usual(monkeypatch):
    """In this process, hurry in these tests only."""
    monkeypatch.setattr(claim, "SILENT_SECONDS", claim.SILENT_SECONDS)
    monkeypatch.setattr(claim, "RENEWED_SECONDS", claim.RENEWED_SECONDS)


@pytest.fixture
def first(tmp_path):
    """A training that waits."""
    process = begin(tmp_path, tmp_path / "go on")
    trains(tmp_path, process)
    yield process
    process.kill()


def test_the_second_is_refused_and_touches_nothing(tmp_path, first):
    before = files(tmp_path / "run")
    for settings in ({}, {"telemetry": False}):
        second = begin(tmp_path, **settings)
        second.join(60)
        assert second.exitcode == 1
    told = f"training that is running: process {first.pid} on {socket.gethostname()}, whose last sign of life is"
    assert (tmp_path / "log.txt").read_text().count(told) == 2
    assert files(tmp_path / "run") == before
    (tmp_path / "go on").touch()
    first.join(60)
    assert first.exitcode == 0 and open_run(tmp_path / "run").status()["state"] == "finished"
    assert not list((tmp_path / "run").glob(f"{NAME}*"))
    train(tmp_path)  # the folder is free again


def test_a_second_of_several_processes_is_refused_on_all(tmp_path, first):
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(tiny.free_port())}
    ranks = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    second = [begin(tmp_path, env=env, per_device_train_batch_size=6) for env in ranks]
    for process in second:
        process.join(60)
        assert process.exitcode == 1
    assert (tmp_path / "log.txt").read_text().count("OutputFolderError: ") == 2


def test_one_that_was_killed_does_not_block(tmp_path, first, monkeypatch):
    first.kill()
    first.join()
    monkeypatch.setattr(claim, "SILENT_SECONDS", 1000.0)  # its process is gone, which is enough
    with claimed(tmp_path / "run"):
        pass
    train(tmp_path)


@pytest.mark.parametrize("dies", [False, True])
def test_one_on_another_host_is_told_by_its_signs_of_life(tmp_path, dies):
    other = begin(tmp_path, tmp_path / "go on", "elsewhere")
    trains(tmp_path, other)
    if dies:
        other.kill()
        train(tmp_path)
    else:
        with pytest.raises(OutputFolderError, match=f"process {other.pid} on elsewhere"):
            train(tmp_path)
    other.kill()


def test_one_that_was_asleep_for_too_long_ends_when_another_has_its_folder(tmp_path, first):
    os.kill(first.pid, signal.SIGSTOP)
    second = begin(tmp_path, tmp_path / "go on")
    trains(tmp_path, second)
    os.kill(first.pid, signal.SIGCONT)
    first.join(30)
    assert first.exitcode not in (0, None) and second.is_alive()
    assert "Another training has `" in (tmp_path / "log.txt").read_text()
    second.kill()


def test_of_trainings_that_start_together_one_goes_on(tmp_path):
    for stale in (False, True):
        folder, begin = tmp_path / f"{stale}", time.time() + 1.0
        folder.mkdir()
        if stale:
            dead = fork(tmp_path / "log.txt", {}, hold, folder, time.time(), True)
            dead.join(30)
            assert (folder / "run" / NAME).exists()
        starts = [fork(tmp_path / "log.txt", {}, hold, folder, begin, False) for _ in range(4)]
        for process in starts:
            process.join(60)
        assert sorted(process.exitcode for process in starts) == [0, 3, 3, 3], (tmp_path / "log.txt").read_text()


def hold(directory: Path, begin: float, dies: bool):
    """Claim a folder at a time, for a while. The status is 3 if it was refused."""
    hurry()
    PartialState(cpu=True)
    time.sleep(max(0.0, begin - time.time()))
    try:
        with claimed(directory / "run"):
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(2.0)
    except OutputFolderError:
        sys.exit(3)


def test_a_folder_that_cannot_be_written_to(tmp_path):
    (run := tmp_path / "run").touch()
    with pytest.raises(OutputFolderError, match=r"cannot be the output folder: .* set another"), claimed(run):
        pass
