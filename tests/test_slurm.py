"""The Slurm scripts and the script that starts servers on GPUs."""

import os
import shlex
import subprocess
import time
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted((ROOT / "scripts").rglob("*.s*h"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_valid_bash(script):
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def program(folder: Path, name: str, body: str):
    (folder / name).write_text(f"#!/bin/bash\n{body}\n")
    (folder / name).chmod(0o755)


def test_servers_on_gpus_start_together_and_end_together(tmp_path):
    seen = 'echo "$CUDA_VISIBLE_DEVICES $*" >part.$$ && mv part.$$ seen.$$'
    program(tmp_path, "vllm", f"{seen}\nexec sleep 60")
    process = subprocess.Popen(
        ["bash", ROOT / "scripts" / "vllm_gpus.sh", "1,3", "some/model", "--max-model-len", "99"],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOST": "192.0.2.1"},  # HOST opens nothing
        stdout=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 30
    while len(started := list(tmp_path.glob("seen.*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    calls = sorted(shlex.split(path.read_text()) for path in started)
    common = ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1", "--max-model-len", "99"]
    assert calls == [
        [gpu, "serve", "some/model", "--host", "127.0.0.1", "--port", port, *common]
        for gpu, port in (("1", "8000"), ("3", "8001"))
    ]
    process.terminate()
    assert "http://127.0.0.1:8001: GPU 3, log in vllm-127.0.0.1-8001.log" in process.communicate(timeout=30)[0]
    servers = [int(path.suffix[1:]) for path in started]
    while any(is_alive(pid) for pid in servers) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(is_alive(pid) for pid in servers)


def is_alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"
