"""Several vLLM servers as one: they share the requests, and the others take over the requests of one that fails."""

import asyncio
import logging
import math
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future, as_completed
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx2
from anyio.from_thread import BlockingPortal, start_blocking_portal
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_delay

from .client import (
    BusyError,
    Completion,
    RequestRefusedError,
    ServerError,
    Snapshot,
    UnansweredError,
    VLLMServer,
    open_client,
)


logger = logging.getLogger(__name__)

_FIRST_PAUSE, _MAX_PAUSE = 1.0, 30.0  # in seconds; each pause is twice the one before
_MAX_FAILURES = 5  # of one request, on healthy servers

Send = Callable[[httpx2.AsyncClient, VLLMServer], Awaitable[Any]]
"""Sends a request to a server, and returns its result."""


@dataclass(eq=False)
class PromptRequest:
    """A request to complete one prompt, in the form of a [`Send`]."""

    prompt: list[int]
    count: int  # G, the number of completions
    body: dict[str, Any]  # sampling settings, in vLLM's names
    vocabulary: int | None = None  # number of tokens that the model in training knows

    async def __call__(self, http: httpx2.AsyncClient, server: VLLMServer) -> list[Completion]:
        return await server.complete(http, self.prompt, self.count, self.body, self.vocabulary)


@dataclass(eq=False)
class Job:
    """A request in the queue, and its result."""

    send: Send
    result: Future = field(default_factory=Future)
    failed_on: list[VLLMServer] = field(default_factory=list)  # once for each failure that counts


class RequestLoop:
    """
    Runs the servers' work on requests in a background thread until it is closed, so the caller may have an event loop of its own.
    When waiting for a result, also wait for `finished`: it raises the error that has ended all requests, or is cancelled.
    """

    def __init__(self, serve: Callable[[asyncio.Queue[Job]], Awaitable[None]]):
        self._jobs: asyncio.Queue[Job] = asyncio.Queue()
        self._closing = threading.Lock()  # one thread may ask for more while another closes
        self._context: AbstractContextManager[BlockingPortal] | None = start_blocking_portal()
        self._portal = self._context.__enter__()
        self.finished: Future = self._portal.start_task_soon(serve, self._jobs)

    def submit(self, send: Send) -> Future:
        """Queue a request, and return its future result."""
        job = Job(send)
        with self._closing:
            if self._context is not None:
                self._portal.call(self._jobs.put_nowait, job)
        return job.result

    def close(self):
        """Cancel what is under way. Connections are closed, so that the servers stop generating for them."""
        with self._closing:
            context, self._context = self._context, None
        if context is not None:
            self.finished.cancel()
            context.__exit__(None, None, None)


class ServerPool:
    """
    Shares requests among vLLM servers with the same weights. Each works on at most `max_concurrent_requests` requests at a time;
    when all have failed, one has `recovery_timeout` seconds to return.

    A server takes requests only while it is known to hold the current weights. That is checked before its first request and
    whenever it was idle or failed; with a request running, it cannot have restarted unnoticed. So a server that comes
    back with old weights is loaded and checked before it takes part again.

    A server that fails several requests, or asks to come again later, is tried on a short prompt before it takes part again. Its
    failures until then do not count against the requests. Its pauses grow while it answers none.
    """

    def __init__(
        self, urls: Sequence[str], max_concurrent_requests: int, request_timeout: float, recovery_timeout: float
    ):
        self.servers = [VLLMServer(url, request_timeout) for url in urls]
        if not urls or len({server.url for server in self.servers}) != len(urls):
            raise ValueError(f"`vllm_server_urls` must name at least one server, and each once, got {urls}.")
        self.max_concurrent_requests, self.recovery_timeout = max_concurrent_requests, recovery_timeout
        self.snapshot: Snapshot | None = None
        # Called with what the pool waits for, and with "" once it is there
        self.tell: Callable[[str], None] = lambda words: None
        self._last_healthy = 0.0  # in monotonic seconds: when a server was last known not to have failed

    def connect(self, timeout: float, trains: bool = False):
        """
        Wait until every server is up, and with `trains` check that it can be trained with. Raises a `ConnectionError` if one is not
        up within `timeout` seconds, and [`ServerMismatchError`] if it cannot be trained with.
        """

        async def wait_for(http: httpx2.AsyncClient, server: VLLMServer):
            try:
                await server.learn_model(http, trains)
            except UnansweredError as error:
                if server.problem is None:
                    logger.warning("Waiting for the vLLM server %s (%s)", server.url, error)
                server.problem = error
                raise
            server.problem = None

        async def wait_for_all():
            async with open_client() as http:
                stop = stop_after_delay(timeout)
                await asyncio.gather(*(_retrying(stop, lambda: 5.0)(wait_for, http, one) for one in self.servers))

        try:
            _run(wait_for_all)
        except UnansweredError as error:
            raise ConnectionError(
                f"{_problems_of(self.servers)} Not up after {timeout:g} s. Start it, or raise `vllm_server_timeout` if it "
                "needs longer to start."
            ) from error

    def load(self, snapshot: Snapshot) -> list[VLLMServer]:
        """
        Load weights into every server that is up, and check them.

        Returns the servers that hold the weights, at least one; the others get them when they return. Raises a `ConnectionError` if no
        server is up within the recovery timeout, and [`ServerMismatchError`] if a server does not compute the trainer's log-probs.
        """
        self.snapshot = snapshot
        self._mark_unready()
        for server in self.servers:
            server.answered = 0

        async def prepare_all():
            async with open_client() as http:
                preparing = [self._prepare(http, server) for server in self.servers]
                results = await asyncio.gather(*preparing, return_exceptions=True)
            failures = [result for result in results if result is not None]
            wrong = [failure for failure in failures if not isinstance(failure, UnansweredError)]
            if wrong or len(failures) == len(self.servers):
                raise (wrong or failures)[0]

        _run(partial(self._retry_until_timeout, prepare_all))
        return [server for server in self.servers if server.ready]

    def _mark_unready(self):
        """Reset what is known of each server between calls: it may have restarted, and its requests have ended."""
        self._last_healthy = time.monotonic()
        for server in self.servers:
            server.ready, server.running, server.outages, server.failed = False, 0, 0, set()

    async def _prepare(self, http: httpx2.AsyncClient, server: VLLMServer):
        """Make a server ready: up, with the current weights, and tried on a prompt if it has failed before."""
        try:
            await (server.learn_model(http) if self.snapshot is None else server.ensure_weights(http, self.snapshot))
            if len(server.failed) > 1 or isinstance(server.problem, BusyError):
                await server.prompt_logprobs(http, [1, 2] if self.snapshot is None else self.snapshot.probe)
                server.failed.clear()
        except UnansweredError as error:
            self._mark_failed(server, error)
            raise
        server.ready = True
        if server.outages < 2:  # else it has to answer a request first
            self._mark_back(server)

    def _mark_back(self, server: VLLMServer):
        if server.problem is not None:
            logger.warning("The vLLM server %s is back, with the current weights.", server.url)
            server.problem = None
            self.tell("")

    def _mark_failed(self, server: VLLMServer, error: UnansweredError):
        if server.problem is None:
            logger.warning(
                "The vLLM server %s %s (%s). It takes part again once it answers and holds the current weights; without "
                "any server, training waits up to %g s (`recovery_timeout` of `vllm_server_kwargs`).",
                *(server.url, "asks to come again later" if isinstance(error, BusyError) else "failed"),
                *(error, self.recovery_timeout),
            )
        if server.problem is None or isinstance(error, BusyError):  # the first error of an outage says most
            server.problem = error
        server.outages += server.ready
        server.ready = False
        if (wanted := _wanted_pause(error)) or server.outages > 1:
            server.rests_until = time.monotonic() + max(wanted, _pause(server.outages - 1))
        if all(one.problem is not None for one in self.servers):
            self.tell(_problems_of(self.servers))

    async def _retry_until_timeout(self, attempt: Callable[..., Awaitable[None]], *args: Any):
        """Repeat an attempt while it raises [`UnansweredError`], until all servers have been down for the recovery timeout."""
        try:
            await _retrying(lambda state: self._seconds_left() <= 0, self._seconds_left)(attempt, *args)
        except UnansweredError as error:
            raise self._no_server_left() from error

    def _no_server_left(self) -> ConnectionError:
        return ConnectionError(
            f"No vLLM server is left, and none returned within {self.recovery_timeout:g} s (`recovery_timeout` of `vllm_server_kwargs`). "
            f"{_problems_of(self.servers)} Restart a server, then resume the training with `resume_from_checkpoint`, or run "
            "the same command again."
        )

    def _seconds_left(self) -> float:
        """Return the seconds that are left of the recovery timeout: infinite while a server has not failed."""
        now = time.monotonic()
        if any(server.problem is None for server in self.servers):
            self._last_healthy = now
            return math.inf
        return self._last_healthy + self.recovery_timeout - now

    def start(self) -> RequestLoop:
        """Start a loop in which the servers work on requests."""
        self._mark_unready()
        return RequestLoop(self._serve)

    def stream(self, requests: Sequence[Send]) -> Iterator[tuple[int, Any]]:
        """
        Yield results of requests, each with its place among them, in whatever order the servers finish.

        Raises a `ConnectionError` if no server is left and none returns within the recovery timeout, [`ServerError`] if
        one request fails again and again on healthy servers, [`RequestRefusedError`] if a server refuses one.
        """
        if not requests:
            return
        with closing(self.start()) as loop:
            places = {loop.submit(send): place for place, send in enumerate(requests)}
            for future in as_completed([*places, loop.finished]):
                result = future.result()
                yield places.pop(future), result
                if not places:
                    return

    async def _serve(self, jobs: asyncio.Queue[Job]):
        try:
            async with open_client() as http, asyncio.TaskGroup() as tasks:
                for server in self.servers:
                    lock = asyncio.Lock()  # one worker makes the server ready for all of its workers
                    for _ in range(self.max_concurrent_requests):
                        tasks.create_task(self._work(http, server, lock, jobs))
        except BaseExceptionGroup as failures:
            failure = failures.exceptions[0]
        raise failure

    async def _work(self, http: httpx2.AsyncClient, server: VLLMServer, lock: asyncio.Lock, jobs: asyncio.Queue[Job]):
        """Run one worker: a server has `max_concurrent_requests` of them, each with one request at a time."""
        while True:
            async with lock:
                if not server.ready:
                    await asyncio.sleep(max(0.0, min(server.rests_until - time.monotonic(), self._seconds_left())))
                    await self._retry_until_timeout(self._prepare, http, server)
            job = await jobs.get()
            if not server.ready:  # it was idle or failed in the meantime
                jobs.put_nowait(job)
                continue
            server.running += 1
            try:
                job.result.set_result(await job.send(http, server))
            except UnansweredError as error:
                self._mark_failed(server, error)
                self._send_again(job, server, error, jobs)
            except RequestRefusedError as error:
                job.result.set_exception(error)
            else:
                server.answered += 1
                server.outages, server.failed = 0, set()
                self._mark_back(server)
            finally:
                server.running -= 1
                if server.running == 0:
                    server.ready = False  # idle, it might restart unnoticed

    def _send_again(self, job: Job, server: VLLMServer, error: UnansweredError, jobs: asyncio.Queue[Job]):
        """Queue a request again that a server has failed, unless healthy servers have failed it too often."""
        server.failed.add(job)
        if not isinstance(error, BusyError) and len(server.failed) == 1:
            job.failed_on.append(server)
        elif self._seconds_left() <= 0:  # the server itself may be to blame
            raise self._no_server_left() from error
        untried = [one for one in self.servers if one.problem is None and one not in job.failed_on]
        if len(job.failed_on) >= _MAX_FAILURES and not untried:
            final = ServerError(f"A request failed {len(job.failed_on)} times. The last time: {error}")
            final.__cause__ = error
            job.result.set_exception(final)
            server.outages, server.rests_until = 0, 0.0  # it is not to blame
        else:
            jobs.put_nowait(job)


def _pause(attempt: int) -> float:
    return min(_FIRST_PAUSE * 2.0 ** min(attempt - 1, 10), _MAX_PAUSE)


def _wanted_pause(error: BaseException | None) -> float:
    return error.seconds if isinstance(error, BusyError) else 0.0


def _retrying(stop: Callable[[RetryCallState], bool], longest: Callable[[], float]) -> AsyncRetrying:
    """Repeat what raises [`UnansweredError`], with pauses that grow, of at most `longest()` seconds."""

    def wait(state: RetryCallState) -> float:
        error: Any = state.outcome and state.outcome.exception()
        return max(0.0, min(max(_wanted_pause(error), _pause(state.attempt_number)), longest()))

    return AsyncRetrying(retry=retry_if_exception_type(UnansweredError), wait=wait, stop=stop, reraise=True)


def _run(function: Callable[[], Awaitable[None]]):
    """Run a coroutine function in another thread's event loop: the caller may have one running in this thread."""
    with start_blocking_portal() as portal:
        portal.call(function)


def _problems_of(servers: list[VLLMServer]) -> str:
    failed = [server for server in servers if server.problem is not None]
    return " ".join(f"The vLLM server {server.url}: {server.problem}." for server in failed)
