"""Several vLLM servers as one: requests spread by load, failures sent elsewhere, returning servers synced first."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import httpx2
from anyio.from_thread import start_blocking_portal

from .client import Completion, EngineDeadError, Identity, ServerError, Snapshot, VLLMServer, open_client


logger = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0
_REMIND_SECONDS = 60.0
_ANSWER_SECONDS = 10.0  # for a server that has not failed to say that it is there
_MAX_FAILURES = 5  # of one request, on any servers

Result = TypeVar("Result")


@dataclass(eq=False)
class Group:
    """One prompt to complete."""

    prompt: list[int]
    count: int  # G, the number of completions
    body: dict[str, Any]  # sampling settings, in vLLM's names
    failures: int = 0
    failed_on: "Member | None" = None


@dataclass(eq=False)
class Member:
    """A server and what the pool knows of it."""

    server: VLLMServer
    ready: bool = False  # known to hold the current weights
    running: int = 0
    problem: ServerError | None = None  # of the outage it is in

    def note(self, error: ServerError) -> bool:
        """
        Note what is wrong, and return whether that is worth a report: when an outage begins, and when the server says that
        its engine has died, which explains the outage. What it says while it restarts does not.
        """
        if isinstance(self.problem, EngineDeadError):
            return False
        worth_it = self.problem is None or isinstance(error, EngineDeadError)
        self.problem = error
        return worth_it


def _with_client(method: Callable[..., Coroutine[Any, Any, Result]]) -> Callable[..., Result]:
    """
    Run a method with an HTTP client to its end, in an event loop of its own, on a thread of its own: the caller, a
    notebook say, may have a loop running.
    """

    @wraps(method)
    def run(pool: "ServerPool", *args: Any, **kwargs: Any) -> Result:
        async def with_client() -> Result:
            async with open_client() as http:
                return await method(pool, http, *args, **kwargs)

        with start_blocking_portal() as portal:
            return portal.call(with_client)

    return run


class ServerPool:
    """
    Several vLLM servers that hold the same weights.

    A server takes requests only while it is known to hold the current weights. It is asked for their version before the
    first request and whenever it was idle or failed; with a request running, it cannot have restarted unnoticed. So a
    server that comes back with old weights is loaded and checked before it takes part again.

    Args:
        urls (`list[str]`): Base URLs of the servers.
        max_concurrent_requests (`int`): Prompts that one server completes at a time.
        request_timeout (`float`): Seconds that one request may take.
        recovery_timeout (`float`): Seconds to wait for a server to return when none is left.
    """

    def __init__(self, urls: list[str], max_concurrent_requests: int, request_timeout: float, recovery_timeout: float):
        self.members = [Member(VLLMServer(url, request_timeout)) for url in urls]
        self.servers = [member.server for member in self.members]
        if not urls or len({server.url for server in self.servers}) != len(urls):
            raise ValueError(f"`vllm_server_urls` must name at least one server, and each once, got {urls}.")
        self.max_concurrent_requests = max_concurrent_requests
        self.recovery_timeout = recovery_timeout
        self.snapshot: Snapshot | None = None

    # ---- Start and sync ----

    @_with_client
    async def connect(self, http: httpx2.AsyncClient, identity: Identity, timeout: float):
        """
        Wait until every server is up, and check that it is what the trainer needs.

        Raises:
            `ConnectionError`: If a server is not up in time.
            [`ServerMismatchError`]: If a server has another model, tokenizer or context length.
        """

        async def wait_for(member: Member):
            reminded = time.monotonic()
            while True:
                try:
                    await member.server.identify(http, identity)
                    member.problem = None
                    return
                except ServerError as error:
                    if member.note(error) or time.monotonic() - reminded > _REMIND_SECONDS:
                        reminded = time.monotonic()
                        logger.warning("Waiting for the vLLM server %s (%s)", member.server.url, member.problem)
                await asyncio.sleep(_RETRY_SECONDS)

        async with _tasks(wait_for(member) for member in self.members) as tasks:
            done, missing = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
            if missing:
                late = [member for task, member in zip(tasks, self.members, strict=True) if task in missing]
                raise ConnectionError(
                    f"{_problems(late)} Not up after {timeout:g} s. Start it, or raise `vllm_server_timeout` if it needs "
                    "longer to start."
                )

    @_with_client
    async def load(self, http: httpx2.AsyncClient, snapshot: Snapshot) -> list[VLLMServer]:
        """
        Load weights into every server that is up, and check them.

        Returns:
            `list[VLLMServer]`: Servers that hold the weights, at least one. The others get them when they return.

        Raises:
            `ConnectionError`: If no server is up within the recovery timeout.
            [`ServerMismatchError`]: If a server does not compute the trainer's log-probs with them.
        """
        self.snapshot = snapshot
        for member in self.members:
            member.ready = False
        async with _tasks(self._hold(http, member) for member in self.members) as tasks:
            for task in tasks:
                await task
        if not any(member.ready for member in self.members):
            async with _tasks(self._admit(http, member) for member in self.members) as tasks:
                for task in await self._first(tasks):
                    task.result()
        return [member.server for member in self.members if member.ready]

    async def _hold(self, http: httpx2.AsyncClient, member: Member):
        """Make sure that a server holds the current weights, if it is up."""
        try:
            await member.server.hold(http, self.snapshot)
        except ServerError as error:
            self._fail(member, error)
            return
        if member.problem is not None:
            logger.warning("The vLLM server %s is back, with the current weights.", member.server.url)
        member.ready, member.problem = True, None

    async def _admit(self, http: httpx2.AsyncClient, member: Member):
        """Wait until a server is up, and make sure that it holds the current weights."""
        await self._hold(http, member)
        while not member.ready:
            await asyncio.sleep(_RETRY_SECONDS)
            await self._hold(http, member)

    async def _first(self, admissions: Iterable[asyncio.Task]) -> set[asyncio.Task]:
        """The admissions that end first, while there is no server to work with."""
        alone_since = reminded = time.monotonic()
        while True:
            done, _ = await asyncio.wait(admissions, timeout=_RETRY_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if done:
                return done
            all_failed = all(member.problem is not None for member in self.members)
            patience = self.recovery_timeout if all_failed else max(self.recovery_timeout, _ANSWER_SECONDS)
            now = time.monotonic()
            left = alone_since + patience - now
            if left <= 0:
                raise ConnectionError(
                    f"No vLLM server is left, and none returned within {self.recovery_timeout:g} s "
                    f"(`vllm_recovery_timeout`). {_problems(self.members)} Restart a server and resume from the last "
                    "checkpoint, with `resume_from_checkpoint`."
                )
            if now - reminded >= _REMIND_SECONDS:
                reminded = now
                logger.warning("Still waiting for a vLLM server to return, for up to %.0f s more.", left)

    def _fail(self, member: Member, error: ServerError):
        member.ready = False
        if not member.note(error):
            return
        if any(other.problem is None for other in self.members):
            what_now = "Its requests go to other servers"
        else:
            what_now = (
                f"No other server is left: waiting up to {self.recovery_timeout:g} s (`vllm_recovery_timeout`) for one to "
                "return"
            )
        logger.warning(
            "The vLLM server %s failed (%s). %s; it takes part again once it answers and holds the current weights.",
            *(member.server.url, error, what_now),
        )

    # ---- Generation ----

    @_with_client
    async def complete(self, http: httpx2.AsyncClient, groups: list[Group]) -> list[list[Completion]]:
        """
        Complete every group, each with exactly its number of completions of the current weights.

        Raises:
            `ConnectionError`: If no server is left and none returns within the recovery timeout.
            [`ServerError`]: If one request fails again and again.
            [`RequestRefusedError`]: If a server refuses a request.
        """
        if self.snapshot is None:
            raise RuntimeError("No weights were synced yet: call `load` before `complete`.")
        waiting, results = deque(groups), {}
        for member in self.members:
            member.ready, member.running = False, 0
        async with _tasks() as tasks:
            while len(results) < len(groups):
                self._start(http, waiting, tasks)
                if any(member.running for member in self.members):
                    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                else:
                    done = await self._first(tasks)
                for task in done:
                    member, group = tasks.pop(task)
                    if group is None:
                        task.result()
                    else:
                        self._finish(task, member, group, waiting, results)
        return [results[group] for group in groups]

    def _start(self, http: httpx2.AsyncClient, waiting: deque[Group], tasks: dict):
        """Send waiting groups to the least loaded of the ready servers, and admit those that are not ready."""
        while waiting and (member := self._least_loaded(waiting[0])) is not None:
            group = waiting.popleft()
            request = member.server.complete(http, group.prompt, group.count, group.body)
            tasks[asyncio.create_task(request)] = (member, group)
            member.running += 1
        being_admitted = [member for member, group in tasks.values() if group is None]
        for member in self.members:
            if waiting and not member.ready and member not in being_admitted:
                tasks[asyncio.create_task(self._admit(http, member))] = (member, None)

    def _least_loaded(self, group: Group) -> Member | None:
        free = [member for member in self.members if member.ready and member.running < self.max_concurrent_requests]
        # A request that failed goes to another server if there is one
        return min(free, key=lambda member: (member is group.failed_on, member.running), default=None)

    def _finish(self, task: asyncio.Task, member: Member, group: Group, waiting: deque[Group], results: dict):
        member.running -= 1
        try:
            results[group] = task.result()
        except ServerError as error:
            self._fail(member, error)
            group.failures += 1
            group.failed_on = member
            if group.failures == _MAX_FAILURES:
                raise ServerError(f"A request failed {_MAX_FAILURES} times. The last time: {error}") from error
            waiting.appendleft(group)
        if member.running == 0:
            member.ready = False  # idle, it might restart unnoticed


def _problems(members: list[Member]) -> str:
    return " ".join(f"The vLLM server {member.server.url}: {member.problem or 'no answer'}." for member in members)


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
