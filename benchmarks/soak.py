"""
A training among failures, compared with the same one left alone.

    python -m benchmarks.soak [--minutes 60] [--seed 0] [--output DIRECTORY]

Two stand-ins for vLLM servers (`tests/seeded_vllm.py`, each in a process of its own) restart, slow down, cut connections, and answer
429, 500, null and garbage at random. The training gets SIGTERM and kill -9 at random, and goes on with `--resume_from_checkpoint auto`.
When the minutes are over it is left alone to its end. It must then be the quiet run, bit for bit; else the status is 1. Needs no GPU.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file


ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import tiny  # noqa: E402
from lze_trl.claim import NAME  # noqa: E402
from lze_trl.record import open_run  # noqa: E402
from seeded_vllm import SeededVLLM  # noqa: E402


STEPS_A_MINUTE, SHARE = 20, 0.1  # of the training; of the requests that fail
KINDS = ("restart", "slow", "cut", "429", "500", "null", "garbage")


class Faulty(SeededVLLM):
    """Fails at random until the time in the directory's file `deadline`, and counts its failures there."""

    def __init__(self, directory: Path, port: int, seed: int):
        self.directory, self.counts, self.chance = directory, Counter(), random.Random(f"{seed}/{port}")
        super().__init__(port=port)

    def answer(self, handler: Any, body: dict):
        """Answer, or fail instead."""
        soaks = time.time() < float((self.directory / "deadline").read_text())
        hit = soaks and handler.path.startswith("/v1/completions") and self.chance.random() < SHARE
        kind = self.chance.choice(KINDS) if hit else ""
        if hit:
            self.counts[kind] += 1
            (self.directory / f"{self._port}.json").write_text(json.dumps(self.counts))
        if kind in ("", "slow"):
            time.sleep(1.5 * hit)
            return super().answer(handler, body)
        if kind in ("restart", "cut"):
            handler.close_connection = True
            return kind == "cut" or threading.Thread(target=self.restart).start()
        content = {"null": b"null", "garbage": b"\x00{]garbage"}.get(kind, b"{}")
        head = f"{kind if kind.isdigit() else 200} -\r\nretry-after: 1\r\ncontent-length: {len(content)}"
        return handler.wfile.write(f"HTTP/1.1 {head}\r\n\r\n".encode() + content)

    def restart(self):
        """Be away for a moment, and return without weights."""
        self.stop()
        time.sleep(0.5)
        self.weights = ""
        self.start()


def begin(log: Path, *arguments: str) -> subprocess.Popen:
    """Start a command of Python, whose output goes to a file."""
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with open(log, "a") as file:
        return subprocess.Popen([sys.executable, *arguments], env=env, stdout=file, stderr=file)


def train(directory: Path, keys: dict[str, Any], deadline: float, seed: int) -> Counter:
    """Train to the end, with signals until the deadline. Returns how the training was ended, and how often."""
    directory.mkdir(parents=True)
    run, endings, chance = directory / "run", Counter(), random.Random(seed)
    recipe = tiny.recipe(directory, **keys | {"output_dir": str(run)})
    while endings["by itself, left alone"] < 5:
        before, number = set(run.glob("checkpoint-*")), chance.choice([signal.SIGTERM, signal.SIGKILL])
        command = ("-m", "lze_trl.job.cli", "train", recipe, "--resume_from_checkpoint", "auto")
        process, end, wait = begin(directory / "log.txt", *command), deadline, chance.uniform(0.0, 20.0)
        while process.poll() is None and time.time() < end:
            if end == deadline and set(run.glob("checkpoint-*")) != before:  # it trains
                end = min(deadline, time.time() + wait)
            time.sleep(0.05)
        if process.poll() is None and time.time() < deadline:
            process.send_signal(number)
            endings[f"{number.name}, status {process.wait(timeout=120)}"] += 1
        elif process.wait() == 0:
            return endings
        else:
            endings[f"by itself{', left alone' if time.time() > deadline else ''}"] += 1
    raise RuntimeError(f"The training does not come to an end: `{directory / 'log.txt'}`.")


def differences(quiet: Path, other: Path) -> list[str]:
    """Say what differs between two runs: weights, completions, groups, prompts, and how they ended."""
    first, second = (load_file(run / "model.safetensors") for run in (quiet, other))
    found = [f"weights of {name}" for name in first if not (first[name] == second[name]).all()]
    for table in ("completions", "groups", "prompts"):
        one, two = (open_run(run).arrow(f"SELECT * FROM {table} ORDER BY ALL").to_pylist() for run in (quiet, other))
        found += [] if repr(one) == repr(two) else [f"{table}: {len(one)} and {len(two)} rows"]
    found += [f"{run} is not finished" for run in (quiet, other) if open_run(run).status()["state"] != "finished"]
    return found + [f"{path} is left" for path in other.glob(f"{NAME}*")]


def main():
    """Run both trainings, and compare them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__.splitlines()[1])
    parser.add_argument("--minutes", type=float, default=60.0, help="time among failures")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/soak"))
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    output = args.output.resolve()
    if args.serve:
        raise SystemExit(Faulty(output, args.serve, args.seed) and threading.Event().wait())
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    own = ("-m", "benchmarks.soak", "--output", str(output), "--seed", str(args.seed), "--serve")
    servers = {p: begin(output / "servers.txt", *own, str(p)) for p in (tiny.free_port(), tiny.free_port())}
    try:
        keys = tiny.job(output, train=64) | {"max_steps": max(20, int(STEPS_A_MINUTE * args.minutes)), "save_steps": 1}
        keys |= {"learning_rate": 1e-3, "save_total_limit": 3, "telemetry_completions": "all", "logging_steps": 50}
        keys |= {"use_vllm": True, "vllm_mode": "http", "vllm_server_urls": [f"http://127.0.0.1:{p}" for p in servers]}
        keys |= {"vllm_server_kwargs": {"sync_tolerance": 100.0, "request_timeout": 10.0, "sync_dir": str(output)}}
        for name, minutes in (("quiet", 0.0), ("soaked", args.minutes)):
            deadline = time.time() + 60 * minutes
            (output / "deadline").write_text(str(deadline))
            endings = train(output / name, keys, deadline, args.seed)
    finally:
        for server in servers.values():
            server.kill()
    counts = sum((Counter(json.loads(path.read_text())) for path in output.glob("[0-9]*.json")), Counter())
    found = differences(output / "quiet" / "run", output / "soaked" / "run")
    told = found or ["The run is that of a quiet one, bit for bit."]
    sys.stdout.write("\n".join([f"faults of servers: {dict(counts)}\nends: {dict(endings)}", *told, ""]))
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
