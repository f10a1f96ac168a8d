"""The Slurm scripts and the script that starts servers on GPUs."""

import os
import shlex
import subprocess
import time
from pathlib import Path

import pytest
from transformers import TrainingArguments

from lze_trl.job.recipe import parse_recipe, read_recipe


ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted((ROOT / "scripts").rglob("*.s*h"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_valid_bash(script):
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def program(folder: Path, name: str, body: str):
    (folder / name).write_text(f"#!/bin/bash\n{body}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize("script", ["one_node", "multi_node"])
def test_the_job_trains_by_the_recipe_on_the_gpus_that_are_left(script, tmp_path, monkeypatch):
    nodes = {"one_node": 1, "multi_node": 3}[script]
    program(tmp_path, "accelerate", 'printf "%s\\n" "$@" >arguments')
    program(tmp_path, "vllm", "exit 0")
    program(tmp_path, "scontrol", 'tr , "\\n" <<<"$3"')
    program(tmp_path, "srun", 'while [[ $1 == --* ]]; do shift; done; SLURM_PROCID=0 "$@"')
    for name in ("recipes", "accelerate_configs", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    recipe = "recipes/Qwen2.5-Math-1.5B/math/lze.yaml"
    given = {"MODEL": "some/model", "RECIPE": recipe, "SYNC_DIR": "/shared/lze"}
    given["SLURM_JOB_NODELIST"] = ",".join(f"node{i}" for i in range(nodes))
    command = ["bash", ROOT / "scripts" / "slurm" / f"{script}.sbatch"]
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **given}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    arguments = (tmp_path / "arguments").read_text().splitlines()
    assert (ROOT / arguments[arguments.index("--config_file") + 1]).is_file()
    processes = int(arguments[arguments.index("--num_processes") + 1])
    monkeypatch.setattr(TrainingArguments, "world_size", property(lambda self: processes))
    monkeypatch.chdir(ROOT)
    flags = arguments[arguments.index("lze_trl.job.train") + 1 :]
    args = parse_recipe([*flags, "--bf16", "false", "--use_cpu", "true"])[1]
    assert processes + len(set(args.vllm_server_urls)) == 8 * nodes
    # An optimizer step keeps the size that the recipe has on its 4 GPUs
    wanted = read_recipe(recipe)
    assert processes * args.gradient_accumulation_steps == 4 * wanted["gradient_accumulation_steps"]
    assert args.generation_batch_size == wanted["generation_batch_size"]


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
