"""
Environments that fail: their episode gets no reward and is left out, and the run goes on.

TRL calls `reset`, tools and `get_reward` of a user's environment, and an exception in the first or the last of them ends its
run. Here it ends the episode. What a tool raises is shown to the model, as in TRL; but a tool that hangs or has lost its server
ends the episode as well.
"""

import asyncio
import errno
import functools
import inspect
import logging
import re
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any
from weakref import WeakSet, finalize


logger = logging.getLogger(__name__)

MOST_FAILURES = 3
"""Episodes of one prompt that may fail in a row before the run ends."""

_LOST = re.compile("Connection(Error|Closed)|Timeout|gaierror|URLError|MaxRetry|ProtocolError|NetworkError|Chunk|Rpc")
"""Names of exceptions of Python, requests, urllib3, httpx, aiohttp, websockets and grpc, which say that a server was lost."""
_UNREACHABLE = (errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH)


class EpisodeError(RuntimeError):
    """The environment keeps failing; the message says where and why."""


def guarded(factory: Any, time_limit: float | None) -> Any:
    """
    Return an `environment_factory` whose environments do not raise in `reset` and `get_reward`: a failed episode has
    the reward `None`. With a `time_limit` in seconds, each runs in its own thread, and a call that takes longer fails.
    """

    def make(factory: Callable[[], Any]) -> Any:
        worker = None if time_limit is None else Worker()
        environment = factory() if worker is None else worker.call(factory)
        if id(environment) not in _GUARDS:  # a factory may return one object again and again
            _GUARDS[id(environment)] = Guard(environment, worker, time_limit)
        _guard_methods(type(environment))
        return environment

    if isinstance(factory, dict):
        return {name: functools.partial(make, one) for name, one in factory.items()}
    return functools.partial(make, factory)


def failures(environments: Sequence[Any] | None) -> list[str | None]:
    """Return why the episodes of some environments have failed, `None` for one that has not; nothing for a data column called `environments`."""
    guards = [_GUARDS.get(id(environment)) for environment in environments or ()]
    return [None if guard is None else guard.failure for guard in guards] if any(guards) else []


class Worker:
    """A thread that makes calls one after the other. It is a daemon: one that hangs does not keep the process alive."""

    def __init__(self):
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future]] = SimpleQueue()
        threading.Thread(target=self._work, name="environment", daemon=True).start()

    def call(self, call: Callable[[], Any], time_limit: float | None = None) -> Any:
        """Return or raise what a call does; a `TimeoutError` after `time_limit` seconds."""
        future: Future = Future()
        self._calls.put((call, future))
        return future.result(time_limit)

    def _work(self):
        while True:
            call, future = self._calls.get()
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)


class Guard:
    """Calls the public methods of an environment."""

    def __init__(self, environment: Any, worker: Worker | None, time_limit: float | None):
        self._name, self._worker, self.time_limit = type(environment).__name__, worker, time_limit
        try:
            finalize(environment, _GUARDS.pop, id(environment), None)
        except TypeError:  # it takes no weak reference; kept alive, so that no other object gets its `id`
            self._kept = environment
        self.failure: str | None = None  # of the episode under way
        self._calling = False  # an environment may call its own methods

    def call(self, name: str, method: Callable[[], Any]) -> Any:
        if self._calling:
            return method()
        if not self._is_running(name):
            return None
        self._calling = True
        try:
            return self._checked_result(name, self._within_limit(method))
        except Exception as error:
            return self._end_episode(name, error)
        finally:
            self._calling = False

    async def call_later(self, name: str, method: Callable[[], Any]) -> Any:
        if not self._is_running(name):
            return None
        try:
            return self._checked_result(name, await asyncio.wait_for(method(), self.time_limit))
        except Exception as error:
            return self._end_episode(name, error)

    def _is_running(self, name: str) -> bool:
        """Return whether the episode has not failed; `reset` begins another one."""
        if name == "reset":
            self.failure = None
        return self.failure is None

    def _within_limit(self, call: Callable) -> Any:
        if self._worker is None:
            return call()
        try:
            return self._worker.call(call, self.time_limit)
        except TimeoutError:
            self._worker = Worker()  # the other may hang for good
            raise

    def _checked_result(self, name: str, returned: Any) -> Any:
        if name == "reset" and not isinstance(returned, (str, list, type(None))):
            self.failure = f"{self._place(name)} returned {returned!r}, and not a text, a list of parts, or None"
            return None
        return returned

    def _end_episode(self, name: str, error: Exception) -> None:
        answered = any(getattr(error, answer, None) is not None for answer in ("response", "status"))
        names = " ".join(cls.__name__ for cls in type(error).__mro__)
        lost = not answered and (_LOST.search(names) or getattr(error, "errno", None) in _UNREACHABLE)
        if name not in ("reset", "get_reward") and not lost:
            raise error
        silent = f"longer than {self.time_limit:g} s" if isinstance(error, TimeoutError) else "no message"
        what = str(error) or silent
        self.failure = f"{self._place(name)} raised {type(error).__name__}: {what}"

    def _place(self, name: str) -> str:
        return f"`{self._name}.{name}`"


_GUARDS: dict[int, Guard] = {}  # by the `id` of an environment
_GUARDED: WeakSet[type] = WeakSet()


def _guard_methods(cls: type):
    """Let public methods of a class go through the guard of their object, if it has one: a copy of an environment has none."""
    methods = [] if cls in _GUARDED else inspect.getmembers(cls, inspect.isfunction)  # as TRL finds them
    for name, method in methods:
        if not name.startswith("_") and not isinstance(inspect.getattr_static(cls, name), staticmethod):
            setattr(cls, name, _through_guard(name, method))
    _GUARDED.add(cls)


def _through_guard(name: str, method: Callable) -> Callable:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound, guard = functools.partial(method, self, *args, **kwargs), _GUARDS.get(id(self))
        return bound() if guard is None else guard.call(name, bound)

    @functools.wraps(method)
    async def call_later(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound, guard = functools.partial(method, self, *args, **kwargs), _GUARDS.get(id(self))
        return await (bound() if guard is None else guard.call_later(name, bound))

    return call_later if inspect.iscoroutinefunction(method) else call


class Episodes:
    """Counts episodes that fail, and ends the run if one prompt keeps failing."""

    def __init__(self):
        self._in_a_row: Counter[int] = Counter()  # by prompt id

    def observe(self, prompt_ids: Sequence[int], prompts: Sequence[Any], reasons: Sequence[str | None]):
        """Enter this process's episodes; an [`EpisodeError`] if the last three or more of a prompt have all failed."""
        by_prompt: dict[int, list[int]] = defaultdict(list)
        for i, prompt_id in enumerate(prompt_ids):
            by_prompt[prompt_id].append(i)
        for prompt_id, own in by_prompt.items():
            all_failed = all(reasons[i] is not None for i in own)
            self._in_a_row[prompt_id] = self._in_a_row[prompt_id] + len(own) if all_failed else 0
            if self._in_a_row[prompt_id] >= MOST_FAILURES:
                raise EpisodeError(
                    f"{self._in_a_row[prompt_id]} episodes in a row failed for the prompt {str(prompts[own[0]])[:200]!r} (id {prompt_id}): "
                    f"{reasons[own[0]]}. Mend the environment, or leave the prompt out; then resume."
                )
        failed = [reason for reason in reasons if reason is not None]
        if failed:
            logger.warning(
                "%d of %d episodes failed and are left out: their reward is None. The first one: %s.",
                *(len(failed), len(reasons), failed[0]),
            )
