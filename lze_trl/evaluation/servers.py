"""Completions from running vLLM servers, which share the requests."""

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue

import httpx2
from anyio.from_thread import start_blocking_portal

from ..rollout.servers.client import ServerError, VLLMServer, open_client
from .engines import Output, Request
from .settings import Decoding, EvaluationError


logger = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0
_MOST_FAILURES = 5  # of one request, by servers that are up


@dataclass(eq=False)
class Job:
    """A request, and how often it has failed."""

    request: Request
    failures: int = 0


class ServerEngine:
    """
    Generates with vLLM servers that serve the same model. A request that a server fails goes to whichever is free.

    Args:
        urls (`list[str]`): Base URLs, such as `"http://127.0.0.1:8000"`.
        max_concurrent_requests (`int`): Requests that one server works on at a time.
        request_timeout (`float`): Seconds that one request may take.
        recovery_timeout (`float`): Seconds to wait for a server to come up, or to return, when none is up.
    """

    def __init__(
        self,
        urls: list[str],
        max_concurrent_requests: int = 64,
        request_timeout: float = 1800.0,
        recovery_timeout: float = 60.0,
    ):
        if len(set(urls)) != len(urls):
            raise EvaluationError(f"`--server` must name each server once, got {urls}.")
        self.servers = [VLLMServer(url, request_timeout) for url in urls]
        self.max_concurrent_requests = max_concurrent_requests
        self.recovery_timeout = recovery_timeout
        self._down: dict[VLLMServer, float] = {}  # since when
        with start_blocking_portal() as portal:
            portal.call(self._connect)
        models = {server.url: server.model for server in self.servers}
        if len(set(models.values())) != 1:
            raise EvaluationError(f"The servers serve different models: {models}. Give those of one model.")
        self.name = self.servers[0].model

    async def _connect(self):
        async with open_client() as http:
            await asyncio.gather(*(self._until_up(http, server, None) for server in self.servers))

    def generate(self, requests: Iterable[Request], decoding: Decoding) -> Iterator[tuple[Request, Output]]:
        """Complete requests, at most `max_concurrent_requests` a server, in whatever order the servers finish."""
        shortest = min(server.max_model_len for server in self.servers)
        if decoding.max_tokens >= shortest:
            raise EvaluationError(
                f"`max_tokens={decoding.max_tokens}` leaves no room for a prompt in the servers' context of {shortest} tokens. "
                "Lower it, or start the servers with a larger `--max-model-len`."
            )
        outputs = SimpleQueue()
        with start_blocking_portal() as portal:
            future = portal.start_task_soon(self._serve, list(requests), decoding, outputs)
            try:
                yield from iter(outputs.get, None)
                future.result()
            finally:
                future.cancel()

    async def _serve(self, requests: list[Request], decoding: Decoding, outputs: SimpleQueue):
        jobs = asyncio.Queue()
        for request in requests:
            jobs.put_nowait(Job(request))
        async with open_client() as http:
            workers = [
                asyncio.create_task(self._work(http, server, jobs, decoding, outputs))
                for server in self.servers
                for _ in range(self.max_concurrent_requests)
            ]
            finished = asyncio.create_task(jobs.join())
            try:
                done, _ = await asyncio.wait([finished, *workers], return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                for task in (finished, *workers):
                    task.cancel()
                await asyncio.gather(finished, *workers, return_exceptions=True)
                outputs.put(None)

    async def _work(
        self,
        http: httpx2.AsyncClient,
        server: VLLMServer,
        jobs: asyncio.Queue,
        decoding: Decoding,
        outputs: SimpleQueue,
    ):
        """One of the requests that a server works on at a time."""
        while True:
            job = await jobs.get()
            try:
                answer = await server.answer(http, job.request.problem.prompt, _body(job.request, decoding))
                outputs.put((job.request, Output(answer.text, answer.tokens, answer.truncated)))
            except ServerError as error:
                job.failures += 1
                if job.failures == _MOST_FAILURES:
                    raise ServerError(f"A request failed {_MOST_FAILURES} times. The last time: {error}") from error
                jobs.put_nowait(job)  # counted again before it is counted as done
                await self._until_up(http, server, error)
            finally:
                jobs.task_done()

    async def _until_up(self, http: httpx2.AsyncClient, server: VLLMServer, error: ServerError | None):
        """Wait until a server is up, while another is, or for the recovery timeout."""
        alone_since = time.monotonic()
        while True:
            try:
                await server.learn_model(http)
                if self._down.pop(server, None) is not None:
                    logger.warning("The vLLM server %s is back.", server.url)
                return
            except ServerError as failure:
                error = failure
            if server not in self._down:
                logger.warning(
                    "The vLLM server %s does not answer (%s). Its requests wait or go to others.", server.url, error
                )
            self._down.setdefault(server, time.monotonic())
            if len(self._down) < len(self.servers):
                alone_since = time.monotonic()
            elif time.monotonic() - alone_since > self.recovery_timeout:
                raise ConnectionError(
                    f"No vLLM server answers, and none came up within {self.recovery_timeout:g} s; {server.url}: {error}. Start "
                    "it, and run the same command again: what is answered is kept."
                )
            await asyncio.sleep(_RETRY_SECONDS)


def _body(request: Request, decoding: Decoding) -> dict:
    """Settings of a request in vLLM's names. All are said, for the server would take what is not from the model's defaults."""
    body = {
        "temperature": decoding.temperature,
        "top_p": decoding.top_p,
        "top_k": decoding.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": decoding.max_tokens,
        "stop": list(decoding.stop),
    }
    return body | ({"seed": request.seed(decoding)} if decoding.temperature > 0 else {})
