"""A real vLLM server on this machine's CPU, as a process."""

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import httpx2

from .settings import BenchError
from .tasks import CHECKOUT


_START_SECONDS = 300


class RealServer:
    """
    A server of a model on a free port of 127.0.0.1, up within the `with` block: `url`. `options` are vLLM's and win over those of
    `scripts/vllm_serve.sh`; its output goes to `log`; with a `core`, it has that one alone.
    """

    def __init__(
        self, model: Path, log: Path, options: tuple[str, ...] = (), threads: int = 1, core: int | None = None
    ):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.model, self.log, self.options, self.threads, self.core = model, log, options, threads, core
        self.process: subprocess.Popen | None = None

    def start(self):
        """Start it, without waiting."""
        script = CHECKOUT / "scripts" / "vllm_serve.sh"
        pinned = [] if self.core is None else ["taskset", "--cpu-list", self.core]
        command = [*pinned, script, "--model", self.model, "--port", self.port, *self.options]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [str(part) for part in command],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the server and its workers, to be killed together
                env=os.environ | {"OMP_NUM_THREADS": str(self.threads)},
            )

    def wait(self):
        """Wait until it answers; a [`BenchError`] with the end of its log if it does not."""
        deadline = time.monotonic() + _START_SECONDS
        while self.runs and time.monotonic() < deadline:
            try:
                if httpx2.get(f"{self.url}/health", trust_env=False).status_code == 200:
                    return
            except httpx2.RequestError:
                time.sleep(0.5)
        raise BenchError(
            f"The vLLM server did not start. `make vllm-env` makes its environment. End of {self.log}:\n"
            f"{self.log.read_text()[-4000:]}"
        )

    @property
    def runs(self) -> bool:
        """Whether the process lives."""
        return self.process is not None and self.process.poll() is None

    def kill(self):
        """End it at once."""
        if self.process is not None and self.runs:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def ensure(self):
        """Start it again if it does not live, and wait for it."""
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

    def __exit__(self, *error: object):
        self.kill()
