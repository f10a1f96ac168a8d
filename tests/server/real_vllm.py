"""Real vLLM servers on this machine's CPU, started with the project's own script, and models that they serve."""

import os
import signal
import subprocess
import time
from pathlib import Path

import httpx2
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import tiny


REPOSITORY = Path(__file__).resolve().parents[2]
ENVIRONMENT = REPOSITORY / os.environ.get("VLLM_VENV", ".venv-vllm")
START_SECONDS = 300


def small_model(seed: int = 0, tied: bool = False, **changes) -> Qwen2ForCausalLM:
    """A Qwen2 model with the smallest attention heads that vLLM knows on a CPU."""
    torch.manual_seed(seed)
    settings = {
        "vocab_size": len(tiny.tokenizer()),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
        "initializer_range": 0.2,  # far from uniform, so that wrong weights show
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    }
    return Qwen2ForCausalLM(Qwen2Config(**(settings | changes)))


class RealServer:
    """A vLLM server process; `options` win over those of the script."""

    def __init__(self, model: Path, log: Path, options: tuple[str, ...] = (), threads: int = 1):
        self.port = tiny.free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.model, self.log, self.options, self.threads, self.process = model, log, options, threads, None

    def start(self):
        command = [
            REPOSITORY / "scripts" / "vllm_serve.sh",
            "--model",
            self.model,
            "--port",
            str(self.port),
            *self.options,
        ]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [str(part) for part in command],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the server and its workers, to be killed together
                env=os.environ | {"OMP_NUM_THREADS": str(self.threads)},
            )

    def wait(self):
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if httpx2.get(f"{self.url}/health", trust_env=False).status_code == 200:
                    return
            except httpx2.RequestError:
                time.sleep(0.5)
        raise RuntimeError(f"The vLLM server did not start:\n{self.log.read_text()[-4000:]}")

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self):
        if self.runs:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def ensure(self):
        """Start again if a test has killed it."""
        if not self.runs:
            self.start()
        self.wait()

    def __enter__(self) -> "RealServer":
        try:
            self.ensure()
        except BaseException:  # interrupted, or not up in time
            self.kill()
            raise
        return self

    def __exit__(self, *error):
        self.kill()
