"""Scripts and functions in processes of their own: how they are launched, and what they say when they fail."""

import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import yaml

import tiny
from case_runs import run_all


CONFIGS = Path(__file__).parents[1] / "accelerate_configs"
# Forks processes that have imported torch, TRL and the package already, which takes seconds
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["lze_trl.trainer", "lze_trl.job.cli"])


def fork(log: Path, env: dict[str, str], function: Callable, *args) -> multiprocessing.Process:
    """Start `function(*args)`, of a module, in a process with a session of its own, which appends to `log` what it says."""
    process = _forks.Process(target=_forked, args=(log, env, os.getcwd(), function, args))
    process.start()
    return process


def _forked(log: Path, env: dict[str, str], directory: str, function: Callable, args: tuple):
    os.setsid()
    os.chdir(directory)
    os.environ.update(env)
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    gc.freeze()
    function(*args)


def on_processes(count: int, log: Path, function: Callable, *args, timeout: float = 300):
    """Run `function(*args)` on some processes that find each other as under torchrun; fail with what they say if one fails."""
    common = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(tiny.free_port())}
    ranks = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    processes = [fork(log, env, function, *args) for env in ranks]
    deadline = time.monotonic() + timeout
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        if any(process.exitcode for process in processes):
            break  # the others wait for it
        time.sleep(0.05)
    for process in processes:
        process.kill()
        process.join()
    assert [process.exitcode for process in processes] == [0] * count, log.read_text()[-5000:]


def write(directory: Path, cases: dict[str, dict]) -> Path:
    """Write the cases of `case_runs.py`."""
    path = directory / "cases.json"
    path.write_text(json.dumps(cases))
    return path


def launch(directory: Path, processes: int, run: Callable, cases: dict[str, dict]):
    """Run cases on some processes; `directory` gets their records."""
    on_processes(processes, directory / "log.txt", run_all, run, write(directory, cases))


def records(directory: Path, name: str, processes: int) -> list[dict]:
    """What each process has recorded of a case."""
    return [json.loads((directory / f"{name}.{processes}.{rank}.json").read_text()) for rank in range(processes)]


def gap(first: Path, second: Path) -> float:
    """The largest difference between two files of weights."""
    one, other = torch.load(first), torch.load(second)
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def assert_one(directory: Path, name: str, processes: int = 2, single: Path | None = None) -> dict:
    """All processes record what a single one does, here or in the directory `single`, and end with its weights."""
    (one,) = records(single or directory, name, 1)
    assert records(directory, name, processes) == [one] * processes, name
    assert gap((single or directory) / f"{name}.1.pt", directory / f"{name}.{processes}.pt") < 1e-5, name
    return one


def on_two_cpus(name: str) -> dict:
    """A shipped accelerate config, for two processes without a GPU."""
    config = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    config |= {"num_processes": 2, "use_cpu": True, "mixed_precision": "no"}
    config.pop("gpu_ids", None)
    if "deepspeed_config" in config:
        config["deepspeed_config"]["zero3_init_flag"] = False
    if "fsdp_config" in config:
        config["use_cpu"] = False  # or accelerate would not pass its FSDP settings on; the run itself says `use_cpu`
    return config


def by_accelerate(directory: Path, config: dict) -> list[str]:
    """The beginning of a command that starts a script by an accelerate config, which `directory` gets."""
    path, port = directory / "accelerate.yaml", str(tiny.free_port())
    path.write_text(yaml.safe_dump(config))
    launcher = [sys.executable, "-m", "accelerate.commands.launch"]
    return [*launcher, "--config_file", str(path), "--main_process_port", port]


def run_to_end(
    command: list[str | Path], timeout: float = 600, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess:
    """Run a command on one thread a process, and fail with what it says if it fails."""
    own = os.environ | {"OMP_NUM_THREADS": "1"} | (env or {})
    done = subprocess.run([*map(str, command)], env=own, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, told(done)
    return done


def told(result: subprocess.CompletedProcess) -> str:
    """What a failed launch says: its errors and aborts, then the beginning of its first traceback."""
    signs = ("Error: ", "terminate called", "what():")
    errors = [line for line in result.stderr.splitlines() if any(sign in line for sign in signs)]
    return "\n".join([*errors[:8], result.stderr[result.stderr.find("Traceback") :][:5000]])
