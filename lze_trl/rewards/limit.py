"""
A limit of computing time for answers that SymPy would compute for minutes.

The time is that of the thread on the processor, so a busy machine makes no difference. A signal raises an exception in the main
thread, again and again until the computation ends, because SymPy and math-verify catch exceptions. It also reaches regular
expressions and the arithmetic of large numbers. Other threads get no signals: what they compute is not interrupted.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import thread_time
from types import FrameType, SimpleNamespace
from typing import Any

from sympy.core.cache import clear_cache


ANSWER_SECONDS = 1.0
"""Most that reading an answer and comparing it may take."""

BATCH_SECONDS = 10.0
SURE_SECONDS = 0.1
"""What the answers of a batch may take together beyond the second number, which each of them has in any case."""

_TICK = 0.05


class GradingTimeout(Exception):  # noqa: N818
    """An answer that cannot be read or compared in time."""


class _Interruption(BaseException):
    """Ends a computation from outside. SymPy and math-verify catch every `Exception`."""


_main = SimpleNamespace(is_limited=False, left=float("inf"))  # seconds that a batch has left


@contextmanager
def budget(seconds: float | None = None) -> Iterator[None]:
    """
    Within this block, answers share so many seconds, by default `BATCH_SECONDS`. When they are used up, each still has
    `SURE_SECONDS`.
    """
    before, _main.left = _main.left, BATCH_SECONDS if seconds is None else seconds
    try:
        yield
    finally:
        _main.left = before


def in_time(function: Callable, *args: Any, seconds: float | None = None) -> Any:
    """
    The result of a function that may compute for `seconds`; by default, for what the limit of an answer and the budget leave.
    Raises [`GradingTimeout`] if it takes longer. Within another such call, the limit of the outer one holds.
    """
    if _main.is_limited or threading.current_thread() is not threading.main_thread():
        return function(*args)
    begin, limit = thread_time(), seconds
    if limit is None:
        limit = SURE_SECONDS + min(ANSWER_SECONDS - SURE_SECONDS, _main.left)

    def interrupt(number: int, frame: FrameType | None):
        if thread_time() - begin > limit:
            raise _Interruption

    previous = signal.signal(signal.SIGVTALRM, interrupt)
    _main.is_limited = True
    try:
        try:
            # Counts the time of all threads outside of system calls
            signal.setitimer(signal.ITIMER_VIRTUAL, _TICK, _TICK)
            return function(*args)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except _Interruption:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)  # it may have come just before the first
        clear_cache()  # expressions whose properties were being computed
        raise GradingTimeout from None
    finally:
        signal.signal(signal.SIGVTALRM, signal.SIG_DFL if previous is None else previous)
        _main.is_limited = False
        if seconds is None:
            _main.left = max(0.0, _main.left - max(0.0, thread_time() - begin - SURE_SECONDS))
