"""Several vLLM servers as one: requests spread by load, failures sent elsewhere, returning servers synced first."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import httpx2
from anyio.from_thread import start_blocking_portal

from .client import Completion, Identity, ServerError, Snapshot, VLLMServer, open_client


logger = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0
_REMIND_SECONDS = 60.0
_ANSWER_SECONDS = 10.0  # for a server that has not failed to say that it is there
_MAX_FAILURES = 5  # of one request, on any servers


@dataclass(eq=False)
class Group:
    """One prompt to complete."""

    prompt: list[int]
    count: int  # G, the number of completions
    body: dict[str, Any]  # sampling settings, in vLLM's names
    failures: int = 0
    failed_on: VLLMServer | None = None


def _with_client(method: Callable[..., Coroutine]) -> Callable:
    """Run a method with an HTTP client, in an event loop on a thread of its own: the caller may have a loop running."""

    @wraps(method)
    def run(pool: "ServerPool", *args: Any, **kwargs: Any) -> Any:
        async def with_client() -> Any:
            async with open_client() as http:
                return await method(pool, http, *args, **kwargs)

        with start_blocking_portal() as portal:
            return portal.call(with_client)

    return run


class ServerPool:
    """
    Several vLLM servers that hold the same weights. Each completes at most `max_concurrent_requests` prompts at a time; when
    none is left, one has `recovery_timeout` seconds to return.

    A server takes requests only while it is known to hold the current weights. It is asked for their version before the
    first request and whenever it was idle or failed; with a request running, it cannot have restarted unnoticed. So a
    server that comes back with old weights is loaded and checked before it takes part again.
    """

    def __init__(self, urls: list[str], max_concurrent_requests: int, request_timeout: float, recovery_timeout: float):
        self.servers = [VLLMServer(url, request_timeout) for url in urls]
        if not urls or len({server.url for server in self.servers}) != len(urls):
            raise ValueError(f"`vllm_server_urls` must name at least one server, and each once, got {urls}.")
        self.max_concurrent_requests = max_concurrent_requests
        self.recovery_timeout = recovery_timeout
        self.snapshot: Snapshot | None = None

    # ---- Start and sync ----

    @_with_client
    async def connect(self, http: httpx2.AsyncClient, identity: Identity, timeout: float):
        """
        Wait until every server is up, and check that it is what the trainer needs. Raises a `ConnectionError` if one is
        not up in time, and [`ServerMismatchError`] if it has another model, tokenizer or context length.
        """

        async def wait_for(server: VLLMServer):
            reminded = time.monotonic()
            while True:
                try:
                    await server.identify(http, identity)
                    server.problem = None
                    return
                except ServerError as error:
                    if server.note(error) or time.monotonic() - reminded > _REMIND_SECONDS:
                        reminded = time.monotonic()
                        logger.warning("Waiting for the vLLM server %s (%s)", server.url, server.problem)
                await asyncio.sleep(_RETRY_SECONDS)

        async with _tasks(wait_for(server) for server in self.servers) as tasks:
            done, missing = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
            if missing:
                late = [server for task, server in zip(tasks, self.servers, strict=True) if task in missing]
                raise ConnectionError(
                    f"{_problems(late)} Not up after {timeout:g} s. Start it, or raise `vllm_server_timeout` if it needs "
                    "longer to start."
                )

    @_with_client
    async def load(self, http: httpx2.AsyncClient, snapshot: Snapshot) -> list[VLLMServer]:
        """
        Load weights into every server that is up, and check them.

        Returns the servers that hold the weights, at least one; the others get them when they return. Raises a
        `ConnectionError` if no server is up within the recovery timeout, and [`ServerMismatchError`] if a server does not
        compute the trainer's log-probs.
        """
        self.snapshot = snapshot
        self._forget()
        async with _tasks(self._hold(http, server) for server in self.servers) as tasks:
            for task in tasks:
                await task
        if not any(server.ready for server in self.servers):
            async with _tasks(self._admit(http, server) for server in self.servers) as tasks:
                for task in await self._first(tasks):
                    task.result()
        return [server for server in self.servers if server.ready]

    def _forget(self):
        """Take no server for ready: it may have restarted since the last call, and its requests have ended."""
        for server in self.servers:
            server.ready, server.running = False, 0

    async def _hold(self, http: httpx2.AsyncClient, server: VLLMServer):
        """Make sure that a server holds the current weights, if it is up."""
        if self.snapshot is None:
            raise RuntimeError("No weights were synced yet: call `load` first.")
        try:
            await server.hold(http, self.snapshot)
        except ServerError as error:
            self._fail(server, error)
            return
        if server.problem is not None:
            logger.warning("The vLLM server %s is back, with the current weights.", server.url)
        server.ready, server.problem = True, None

    async def _admit(self, http: httpx2.AsyncClient, server: VLLMServer):
        """Wait until a server is up, and make sure that it holds the current weights."""
        await self._hold(http, server)
        while not server.ready:
            await asyncio.sleep(_RETRY_SECONDS)
            await self._hold(http, server)

    async def _first(self, tasks: Iterable[asyncio.Task]) -> set[asyncio.Task]:
        """The tasks that end first. While no server has a request, they are admissions, and patience has an end."""
        alone_since = reminded = time.monotonic()
        alone = not any(server.running for server in self.servers)
        while True:
            timeout = _RETRY_SECONDS if alone else None
            done, _ = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if done:
                return done
            all_failed = all(server.problem is not None for server in self.servers)
            patience = self.recovery_timeout if all_failed else max(self.recovery_timeout, _ANSWER_SECONDS)
            now = time.monotonic()
            left = alone_since + patience - now
            if left <= 0:
                raise ConnectionError(
                    f"No vLLM server is left, and none returned within {self.recovery_timeout:g} s "
                    f"(`recovery_timeout` of `vllm_server_kwargs`). {_problems(self.servers)} Restart a server and resume from the last "
                    "checkpoint, with `resume_from_checkpoint`."
                )
            if now - reminded >= _REMIND_SECONDS:
                reminded = now
                logger.warning("Still waiting for a vLLM server to return, for up to %.0f s more.", left)

    def _fail(self, server: VLLMServer, error: ServerError):
        server.ready = False
        if not server.note(error):
            return
        what_now = "Its requests go to other servers"
        if all(other.problem is not None for other in self.servers):
            wait = f"{self.recovery_timeout:g} s (`recovery_timeout` of `vllm_server_kwargs`)"
            what_now = f"No other server is left: waiting up to {wait} for one to return"
        logger.warning(
            "The vLLM server %s failed (%s). %s; it takes part again once it answers and holds the current weights.",
            *(server.url, error, what_now),
        )

    # ---- Generation ----

    @_with_client
    async def complete(self, http: httpx2.AsyncClient, groups: list[Group]) -> list[list[Completion]]:
        """
        Complete every group, each with exactly its number of completions of the current weights.

        Raises a `ConnectionError` if no server is left and none returns within the recovery timeout, [`ServerError`] if
        one request fails again and again, [`RequestRefusedError`] if a server refuses one.
        """
        if self.snapshot is None:
            raise RuntimeError("No weights were synced yet: call `load` before `complete`.")
        waiting = deque(groups)
        results: dict[Any, Any] = {}
        self._forget()
        async with _tasks() as tasks:
            while len(results) < len(groups):
                self._start(http, waiting, tasks)
                for task in await self._first(tasks):
                    server, group = tasks.pop(task)
                    if group is None:
                        task.result()
                    else:
                        self._finish(task, server, group, waiting, results)
        return [results[group] for group in groups]

    def _start(self, http: httpx2.AsyncClient, waiting: deque[Group], tasks: dict):
        """Send waiting groups to the least loaded of the ready servers, and admit those that are not ready."""
        while waiting and (server := self._least_loaded(waiting[0])) is not None:
            group = waiting.popleft()
            request = server.complete(http, group.prompt, group.count, group.body)
            tasks[asyncio.create_task(request)] = (server, group)
            server.running += 1
        being_admitted = [server for server, group in tasks.values() if group is None]
        for server in self.servers:
            if waiting and not server.ready and server not in being_admitted:
                tasks[asyncio.create_task(self._admit(http, server))] = (server, None)

    def _least_loaded(self, group: Group) -> VLLMServer | None:
        free = [server for server in self.servers if server.ready and server.running < self.max_concurrent_requests]
        # A request that failed goes to another server if there is one
        return min(free, key=lambda server: (server is group.failed_on, server.running), default=None)

    def _finish(self, task: asyncio.Task, server: VLLMServer, group: Group, waiting: deque[Group], results: dict):
        server.running -= 1
        try:
            results[group] = task.result()
        except ServerError as error:
            self._fail(server, error)
            group.failures += 1
            group.failed_on = server
            if group.failures == _MAX_FAILURES:
                raise ServerError(f"A request failed {_MAX_FAILURES} times. The last time: {error}") from error
            waiting.appendleft(group)
        if server.running == 0:
            server.ready = False  # idle, it might restart unnoticed


def _problems(servers: list[VLLMServer]) -> str:
    return " ".join(f"The vLLM server {server.url}: {server.problem or 'no answer'}." for server in servers)


@asynccontextmanager
async def _tasks(coroutines: Iterable[Coroutine] = ()) -> AsyncIterator[dict[asyncio.Task, Any]]:
    """Tasks that run until the end of the block, and no longer; the block may add others."""
    tasks: dict[asyncio.Task, Any] = {asyncio.create_task(coroutine): None for coroutine in coroutines}
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
