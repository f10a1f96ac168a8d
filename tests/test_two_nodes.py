"""Two nodes, each in a network namespace of its own, end with the weights of one."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launches import by_accelerate, gap, on_two_cpus, run_to_end
from lze_trl.checkpoint import checkpoints, is_complete
from seeded_vllm import SeededVLLM


ROOT = Path(__file__).parents[1]
NAME = f"test{os.getpid()}"  # of the namespaces
SCRIPT, SERVER = ROOT / "tests" / "nodes_run.py", ROOT / "tests" / "seeded_vllm.py"


def _has_namespaces() -> bool:
    if os.geteuid() or not shutil.which("ip"):
        return False
    made = subprocess.run(["ip", "netns", "add", f"probe-{NAME}"], capture_output=True).returncode == 0
    subprocess.run(["ip", "netns", "del", f"probe-{NAME}"], capture_output=True)
    return made


pytestmark = [pytest.mark.slow, pytest.mark.skipif(not _has_namespaces(), reason="needs root and network namespaces")]


def start(directory: Path, steps: int) -> subprocess.Popen:
    """Two nodes that train for some steps, and a server in a third namespace."""
    directory.mkdir(exist_ok=True)
    own = {"ID": NAME, "LOGS": str(directory / "logs"), "PYTHON": sys.executable}
    own |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "SERVER": f"{sys.executable} {SERVER} 10.77.0.3 8000"}
    command = [ROOT / "scripts" / "two_nodes.sh", SCRIPT, directory, "http://10.77.0.3:8000", str(steps)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=os.environ | own, start_new_session=True, **pipes)


def finish(run: subprocess.Popen, directory: Path) -> int:
    """Wait for the nodes; their exit status."""
    (directory / "said.txt").write_text(run.communicate(timeout=300)[0])
    return run.returncode


def test_two_nodes_are_one_and_a_node_that_dies_ends_the_run_with_a_good_checkpoint(tmp_path):
    server = SeededVLLM()
    single = tmp_path / "single"
    single.mkdir()
    command = [*by_accelerate(single, on_two_cpus("zero3")), SCRIPT, single, server.url, "3"]
    run_to_end(command, env={"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)})
    server.stop()

    nodes = tmp_path / "nodes"
    run = start(nodes, steps=100)
    deadline = time.monotonic() + 240
    while not [c for c in checkpoints(nodes / "run") if is_complete(c)] and time.monotonic() < deadline:
        assert run.poll() is None, run.communicate()[0]
        time.sleep(0.2)
    died = subprocess.run(["ip", "netns", "pids", f"lze-{NAME}-1"], capture_output=True, text=True).stdout.split()
    assert died
    for process in died:
        os.kill(int(process), signal.SIGKILL)
    assert finish(run, nodes) != 0
    assert "A node ended with status" in (nodes / "said.txt").read_text()
    for newer in [c for c in checkpoints(nodes / "run") if int(c.name.rpartition("-")[2]) > 1]:
        shutil.rmtree(newer)
    assert is_complete(nodes / "run" / "checkpoint-1")

    assert finish(start(nodes, steps=3), nodes) == 0, (nodes / "said.txt").read_text()
    assert gap(single / "weights.pt", nodes / "weights.pt") < 1e-6
