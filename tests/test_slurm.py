"""The Slurm scripts start what the recipes need, by their documented commands and their defaults."""

import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
from transformers import TrainingArguments

from lze_trl.job.recipe import parse_recipe, read_recipe


ROOT = Path(__file__).resolve().parents[1]
SLURM = ROOT / "scripts" / "slurm"
# The development machine has no accelerator
ON_CPU = ["--bf16", "false", "--use_cpu", "true"]
# Each records its arguments, one a line. `accelerate` waits for the servers, as the trainer does, and `srun` runs its
# command once a node, as Slurm does
COMMANDS = {
    "accelerate": """printf "%s\\n" "$@" >"accelerate.${SLURM_PROCID:-0}"
        servers=$(grep -c ^http:// "accelerate.${SLURM_PROCID:-0}")
        for _ in {1..500}; do
            [[ $(find . -name "vllm.*.started" | wc -l) == "$servers" ]] && exit
            sleep 0.02
        done
        exit 1""",
    "vllm": """printf "%s\\n" "$@" >"vllm.$BASHPID"
        mv "vllm.$BASHPID" "vllm.$BASHPID.started" """,
    "scontrol": 'tr , "\\n" <<<"$3"',
    "srun": """while [[ $1 == --* ]]; do case $1 in --nodelist=*) nodes=${1#*=} ;; esac; shift; done
        rank=0
        for node in ${nodes//,/ }; do SLURM_PROCID=$rank "$@"; rank=$((rank + 1)); done""",
}


def documented() -> list[tuple[str, str]]:
    """Where a command is written, and the command."""
    found = []
    for path in [ROOT / "docs" / "scaling.md", *sorted(SLURM.glob("*.sbatch"))]:
        text = re.sub(r"\\\n *", "", path.read_text())
        found += [(path.name, line) for line in re.findall(r"^(?:# {4,})?(sbatch .*)$", text, re.MULTILINE)]
    return found


def asked_for(command: str) -> tuple[str, int, dict[str, str]]:
    """The script, the number of nodes and the variables of an `sbatch` command."""
    _, *options, script = shlex.split(command)
    given = dict(option.removeprefix("--").split("=", 1) for option in options)
    variables = dict(pair.split("=", 1) for pair in given["export"].split(",") if pair != "ALL")
    return Path(script).name, int(given.get("nodes", default_nodes(Path(script).name))), variables


def default_nodes(script: str) -> int:
    return int(re.search(r"^#SBATCH --nodes=(\d+)$", (SLURM / script).read_text(), re.MULTILINE)[1])


@pytest.fixture
def start(tmp_path):
    """Runs a script where nothing that it starts is real, and returns it with what it asked `accelerate` for."""
    for name, body in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    for name in ("recipes", "accelerate_configs", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)

    def run(script: str, nodes: int, **variables):
        names = ",".join(f"node{i}" for i in range(nodes))
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": names, **variables}
        done = subprocess.run(
            ["bash", SLURM / script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False
        )
        return done, [path.read_text().splitlines() for path in sorted(tmp_path.glob("accelerate.[0-9]*"))]

    return run


def read_arguments(arguments: list[str], monkeypatch):
    """The settings that the trainer makes of a command line, and its number of processes; TRL checks that they fit."""
    processes = int(arguments[arguments.index("--num_processes") + 1])
    monkeypatch.setattr(TrainingArguments, "world_size", property(lambda self: processes))
    monkeypatch.chdir(ROOT)
    return parse_recipe([*arguments[arguments.index("lze_trl.job.train") + 1 :], *ON_CPU])[1], processes


def assert_fits(arguments: list[str], recipe: Path, gpus: int, monkeypatch):
    """The recipe starts, and its optimizer step is that of the GPUs that it is sized for."""
    args, processes = read_arguments(arguments, monkeypatch)
    given = read_recipe(recipe)
    rows = processes * args.per_device_train_batch_size * args.gradient_accumulation_steps
    assert rows == gpus * given["per_device_train_batch_size"] * given["gradient_accumulation_steps"]
    assert args.generation_batch_size == given["generation_batch_size"]
    assert args.generation_batch_size % rows == 0
    assert (args.use_vllm, args.vllm_mode) == (True, "http")


@pytest.mark.parametrize("command", sorted({command for _, command in documented()}), ids=lambda c: c.split("/")[-1])
def test_a_documented_command_starts(command, start, monkeypatch, tmp_path):
    script, nodes, variables = asked_for(command)
    done, launches = start(script, nodes, **variables)
    assert done.returncode == 0, done.stderr
    # One server a GPU, and training on all the others
    args, processes = read_arguments(launches[0], monkeypatch)
    servers = [path.read_text().splitlines() for path in tmp_path.glob("vllm.*.started")]
    assert len(servers) == len(set(args.vllm_server_urls)) == 8 * nodes - processes
    where = {f"http://{s[s.index('--host') + 1]}:{s[s.index('--port') + 1]}" for s in servers}
    assert where == set(args.vllm_server_urls)
    assert all(server[:2] == ["serve", variables["MODEL"]] for server in servers)
    # Every node that trains is told the same, and its own rank
    assert len(launches) == max(1, nodes - 1)
    for rank, arguments in enumerate(launches):
        if nodes > 1:
            assert arguments[arguments.index("--machine_rank") + 1] == str(rank)
            assert arguments[arguments.index("--num_machines") + 1] == str(len(launches))
        assert (ROOT / arguments[arguments.index("--config_file") + 1]).exists()
        assert_fits(arguments, ROOT / variables["RECIPE"], 4, monkeypatch)


@pytest.mark.parametrize("servers", [3, 4, 6])
def test_every_k_fits_or_is_refused(servers, start, monkeypatch, tmp_path):
    recipe = ROOT / "recipes/Qwen2.5-Math-1.5B/math/lze.yaml"
    done, launches = start("one_node.sbatch", 1, MODEL="m", RECIPE=str(recipe), SERVER_GPUS=str(servers))
    if servers in (4, 6, 7):
        assert_fits(launches[0], recipe, 4, monkeypatch)
    else:
        assert done.returncode == 1 and not launches and not list(tmp_path.glob("vllm.*.started"))
        assert f"SERVER_GPUS={servers} leaves {8 - servers} GPUs" in done.stderr and "4, 6 or 7" in done.stderr


@pytest.mark.parametrize("script", ["one_node.sbatch", "multi_node.sbatch"])
@pytest.mark.parametrize("line", ["", "gradient_accumulation_steps: auto\n"])
def test_a_recipe_without_the_size_of_its_step_is_refused(line, script, start, tmp_path):
    (tmp_path / "mine.yaml").write_text(f"per_device_train_batch_size: 8\n{line}")
    done, launches = start(script, default_nodes(script), MODEL="m", RECIPE="mine.yaml", SYNC_DIR="/shared")
    assert done.returncode == 1 and not launches and not list(tmp_path.glob("vllm.*.started"))
    assert done.stderr == "mine.yaml must give gradient_accumulation_steps, a whole number of at least 1.\n"


def test_nodes_that_do_not_divide_are_refused(start, tmp_path):
    recipe = ROOT / "recipes/Qwen3-4B/dapo/lze.yaml"
    for nodes, gpus in ((4, 24), (1, 0)):
        done, launches = start("multi_node.sbatch", nodes, MODEL="m", RECIPE=str(recipe), SYNC_DIR="/shared")
        assert done.returncode == 1 and not launches and not list(tmp_path.glob("vllm.*.started"))
        assert f"leaves {gpus} GPUs for training" in done.stderr


def serve(tmp_path, *arguments, then="exec sleep 60", **variables):
    """`scripts/vllm_gpus.sh`, where `vllm` records its arguments and its GPU and waits to be ended, or does what `then` says."""
    (tmp_path / "vllm").write_text(
        '#!/bin/bash\nprintf "%s\\n" "$CUDA_VISIBLE_DEVICES" "$VLLM_SERVER_DEV_MODE" "$@" >"seen.$BASHPID.part"\n'
        f'mv "seen.$BASHPID.part" "seen.$BASHPID"\n{then}\n'
    )
    (tmp_path / "vllm").chmod(0o755)
    return subprocess.Popen(
        ["bash", ROOT / "scripts" / "vllm_gpus.sh", *arguments],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_servers_on_gpus_start_together_and_end_together(tmp_path):
    process = serve(tmp_path, "1,3", "some/model", "--max-model-len", "99", HOST="192.0.2.1")  # HOST opens nothing
    deadline = time.monotonic() + 30
    seen = wait_for_servers(tmp_path, 2)
    calls = sorted(path.read_text().splitlines() for path in seen)
    common = ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1", "--max-model-len", "99"]
    assert calls == [
        [gpu, "1", "serve", "some/model", "--host", "127.0.0.1", "--port", port, *common]
        for gpu, port in (("1", "8000"), ("3", "8001"))
    ]
    process.terminate()
    out, _ = process.communicate(timeout=30)
    assert out.splitlines() == [
        "http://127.0.0.1:8000: GPU 1, log in vllm-127.0.0.1-8000.log",
        "http://127.0.0.1:8001: GPU 3, log in vllm-127.0.0.1-8001.log",
    ]
    servers = [int(path.suffix[1:]) for path in seen]
    while any(is_alive(pid) for pid in servers) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(is_alive(pid) for pid in servers)


def wait_for_servers(tmp_path, count: int) -> list[Path]:
    deadline = time.monotonic() + 30
    while len(seen := sorted(tmp_path.glob("seen.*[0-9]"))) < count and time.monotonic() < deadline:
        time.sleep(0.02)
    return seen


def test_servers_on_gpus_listen_where_they_are_told(tmp_path):
    process = serve(tmp_path, "0", "some/model", LZE_VLLM_HOST="node7")
    (seen,) = wait_for_servers(tmp_path, 1)
    process.terminate()
    assert process.communicate(timeout=30)[0] == "http://node7:8000: GPU 0, log in vllm-node7-8000.log\n"
    assert "--host\nnode7\n--port\n8000\n" in seen.read_text()


def test_a_server_that_ends_is_reported_and_the_others_stay(tmp_path):
    dies = '[[ $CUDA_VISIBLE_DEVICES == 1 ]] && { echo "out of memory"; exit 7; }; exec sleep 60'
    process = serve(tmp_path, "0,1", "some/model", then=dies)
    first = [process.stderr.readline() for _ in range(2)]
    assert first == [
        "scripts/vllm_gpus.sh: a server has ended with 7. Its log vllm-127.0.0.1-8001.log ends with:\n",
        "out of memory\n",
    ]
    (other,) = (path for path in wait_for_servers(tmp_path, 2) if path.read_text().startswith("0\n"))
    assert process.poll() is None and is_alive(int(other.suffix[1:]))
    os.kill(int(other.suffix[1:]), signal.SIGTERM)
    _, rest = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "has ended with 143. Its log vllm-127.0.0.1-8000.log" in rest and rest.endswith("no server is left.\n")


def is_alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("arguments", [(), ("0,1",), ("some/model", "0"), ("0,", "some/model")])
def test_servers_on_gpus_need_gpus_and_a_model(tmp_path, arguments):
    process = serve(tmp_path, *arguments)
    assert "give GPUs and a model" in process.communicate(timeout=30)[1]
    assert process.returncode == 1


def test_servers_on_gpus_without_vllm_say_so(tmp_path):
    process = serve(tmp_path, "0", "some/model", VLLM="/nowhere/vllm")
    assert "there is no command `/nowhere/vllm`" in process.communicate(timeout=30)[1]
    assert process.returncode == 1
