"""Completions from running vLLM servers, which share the requests."""

import asyncio
import logging
import re
import time
from collections.abc import Iterable, Iterator
from queue import SimpleQueue

import httpx2
from anyio.from_thread import start_blocking_portal

from ..rollout.servers.client import RequestRefusedError, ServerError, Snapshot, VLLMServer, open_client
from .engines import Output, Request
from .settings import Decoding, EvaluationError


logger = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0
_MOST_FAILURES = 5  # of one request
_TOO_LONG = re.compile(r"maximum context\s+length|maximum model length")  # in vLLM's words


class ServerEngine:
    """
    Generates with vLLM servers that serve the same model. A request that a server fails goes to whichever is free next.

    Args:
        urls (`list[str]`): Base URLs, such as `"http://127.0.0.1:8000"`.
        max_concurrent_requests (`int`): Requests that one server works on at a time.
        recovery_timeout (`float`): Seconds to wait for a server to come up or to return.
        request_timeout (`float`): Seconds that one request may take.
        snapshot ([`Snapshot`], *optional*): Weights of a training that every server must hold, also one that returns.

    `weights` tells the weights by their version, if the servers have one.
    """

    def __init__(
        self,
        urls: list[str],
        max_concurrent_requests: int = 64,
        recovery_timeout: float = 60.0,
        request_timeout: float = 1800.0,
        snapshot: Snapshot | None = None,
    ):
        if max_concurrent_requests < 1:
            raise EvaluationError(f"`concurrent` must be at least 1, got {max_concurrent_requests}.")
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise EvaluationError(f"A server is given by its base URL, such as 'http://{url}'; got {url!r}.")
        self.servers = [VLLMServer(url, request_timeout) for url in dict.fromkeys(urls)]
        self.max_concurrent_requests, self.recovery_timeout = max_concurrent_requests, recovery_timeout
        self.snapshot = snapshot
        self._down: set[VLLMServer] = set()
        self._version: str | None = None  # of the weights
        with start_blocking_portal() as portal:
            portal.call(self._connect)
        models = {server.url: server.model for server in self.servers}
        self.name, *others = set(models.values())
        if others:
            raise EvaluationError(f"The servers serve different models: {models}. Give those of one model.")
        self.weights = None if self._version is None else f"{self.name}@{self._version}"

    async def _connect(self):
        """Wait for all servers, and go on with those that are up."""
        async with open_client() as http:
            waits = (self._until_up(http, server) for server in self.servers)
            found = await asyncio.gather(*waits, return_exceptions=True)
            self.servers = _up(self.servers, found)
            versions = {server.url: await server.weight_version(http) for server in self.servers}
        self._version, *others = set(versions.values())
        if others:
            raise EvaluationError(
                f"The servers hold different versions of the weights: {versions}. Give those that hold the same."
            )

    def generate(self, requests: Iterable[Request], decoding: Decoding) -> Iterator[tuple[Request, Output]]:
        """Complete requests, in whatever order the servers finish."""
        shortest = min(server.max_model_len for server in self.servers)
        if decoding.max_tokens is not None and decoding.max_tokens >= shortest:
            raise EvaluationError(
                f"`max_tokens={decoding.max_tokens}` leaves no room for a prompt in the servers' context of {shortest} "
                "tokens. Lower it, or start the servers with a larger `--max-model-len`."
            )
        outputs: SimpleQueue = SimpleQueue()
        with start_blocking_portal() as portal:
            serving = portal.start_task_soon(self._serve, list(requests), decoding, outputs)
            try:
                yield from iter(outputs.get, None)
                serving.result()
            finally:
                serving.cancel()

    async def _serve(self, requests: list[Request], decoding: Decoding, outputs: SimpleQueue):
        """Put every request with its output into a queue, and `None` at the end."""
        jobs: asyncio.Queue = asyncio.Queue()
        for request in requests:
            jobs.put_nowait((request, 0))
        async with open_client() as http:
            places = [server for server in self.servers for _ in range(self.max_concurrent_requests)]
            workers = [asyncio.create_task(self._work(http, server, jobs, decoding, outputs)) for server in places]
            all_done, waiting = asyncio.create_task(jobs.join()), set(workers)
            try:
                while not all_done.done():
                    ended, waiting = await asyncio.wait({all_done, *waiting}, return_when=asyncio.FIRST_COMPLETED)
                    waiting.discard(all_done)
                    for task in ended:
                        # A server that does not return leaves its requests to the others, if there are any
                        if not (waiting and isinstance(task.exception(), ConnectionError)):
                            task.result()
            finally:
                for task in (all_done, *workers):
                    task.cancel()
                await asyncio.gather(all_done, *workers, return_exceptions=True)
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
            request, failures = await jobs.get()
            try:
                if server not in self._down:
                    outputs.put((request, await _answer(http, server, request, decoding)))
                    continue
                jobs.put_nowait((request, failures))
            except ServerError as error:
                if failures + 1 == _MOST_FAILURES:
                    raise ServerError(f"A request failed {_MOST_FAILURES} times. The last time: {error}") from error
                self._note(server, error)
                jobs.put_nowait((request, failures + 1))
            finally:
                jobs.task_done()  # after the request was put back
            await self._until_up(http, server)

    def _note(self, server: VLLMServer, error: ServerError):
        if server not in self._down:
            logger.warning("%s. Waiting up to %g s for the server.", error, self.recovery_timeout)
        self._down.add(server)

    async def _until_up(self, http: httpx2.AsyncClient, server: VLLMServer):
        deadline = time.monotonic() + self.recovery_timeout
        while True:
            try:
                await server.learn_model(http)
                await self._check_weights(http, server)
                self._down.discard(server)
                return
            except ServerError as error:
                self._note(server, error)
                if time.monotonic() > deadline:
                    raise ConnectionError(
                        f"The vLLM server {server.url} did not come up within {self.recovery_timeout:g} s: {error}. Start it, "
                        "and run the same command again: what is answered is kept."
                    ) from error
            await asyncio.sleep(_RETRY_SECONDS)

    async def _check_weights(self, http: httpx2.AsyncClient, server: VLLMServer):
        """Make sure that a server holds the weights that are evaluated, as far as that can be known."""
        if self.snapshot is not None:
            await server.hold(http, self.snapshot)
        elif self._version is not None and (found := await server.weight_version(http)) != self._version:
            raise EvaluationError(
                f"The vLLM server {server.url} came back with version {found!r} of the weights, and {self._version!r} is "
                "evaluated. Load that version, and run the same command again: what is answered is kept."
            )


def _up(servers: list[VLLMServer], found: list[BaseException | None]) -> list[VLLMServer]:
    """The servers that are up, at least one, by what waiting for each has raised."""
    errors = [error for error in found if error is not None]
    wrong = [error for error in errors if not isinstance(error, ConnectionError)]
    if wrong or len(errors) == len(servers):
        raise (wrong or errors)[0]
    for error in errors:
        logger.warning("%s The other servers take its requests.", error)
    return [server for server, error in zip(servers, found, strict=True) if error is None]


async def _answer(http: httpx2.AsyncClient, server: VLLMServer, request: Request, decoding: Decoding) -> Output:
    """What a server answers; to a prompt that is too long for it, nothing, cut off by the limit."""
    try:
        answer = await server.answer(http, request.problem.prompt, _body(request, decoding))
    except RequestRefusedError as error:
        if _TOO_LONG.search(str(error)) is None:
            raise
        logger.warning("Problem %s is too long for the server, and counts as truncated.", request.problem.id)
        return Output("", 0, True)
    return Output(answer.text, answer.tokens, answer.truncated)


def _body(request: Request, decoding: Decoding) -> dict:
    """Settings of a request in vLLM's names. All are given, or the server would take the others from the model's own."""
    body = {name: vars(decoding)[name] for name in ("temperature", "top_p", "top_k", "max_tokens", "presence_penalty")}
    body |= {"min_p": 0.0, "repetition_penalty": 1.0, "stop": list(decoding.stop)}
    return body | ({"seed": request.seed(decoding)} if decoding.temperature > 0 else {})
