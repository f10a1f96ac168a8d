"""Scripts in processes of their own: how they are launched, and what they say when they fail."""

import os
import subprocess
import sys
from pathlib import Path

import yaml

import tiny


CONFIGS = Path(__file__).parents[1] / "accelerate_configs"


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
    path = directory / "accelerate.yaml"
    path.write_text(yaml.safe_dump(config))
    port = str(tiny.free_port())
    return [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--config_file", str(path), "--main_process_port", port),
    ]


def by_torchrun(processes: int) -> list[str]:
    """The beginning of a command that starts a script on some processes."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]


def run_to_end(
    command: list[str | Path], timeout: float = 600, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess:
    """Run a command on one thread a process, and fail with what it says if it fails."""
    done = subprocess.run(
        [str(part) for part in command],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | (env or {}),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, told(done)
    return done


def told(result: subprocess.CompletedProcess) -> str:
    """What a failed launch says: its errors, then the beginning of its first traceback."""
    errors = [line for line in result.stderr.splitlines() if "Error: " in line]
    return "\n".join([*errors[:8], result.stderr[result.stderr.find("Traceback") :][:5000]])
