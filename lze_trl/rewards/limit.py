"""
Limits of computing time for answers that SymPy would compute for minutes, in any thread.

The time is that of the thread on the processor, so a busy machine makes no difference. An interruption arrives between two Python
instructions, and again until the computation ends: whatever catches exceptions on the way cannot stop it.
"""

import ctypes
import signal
import threading
from _thread import allocate_lock
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import clock_gettime, pthread_getcpuclockid, sleep, thread_time
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


class _State(threading.local):
    runs = False  # whether a limit is set
    left: float | None = None  # of the budget of a batch


_this_thread = _State()


@contextmanager
def budget(seconds: float | None = None) -> Iterator[None]:
    """
    Within this block, answers share so many seconds, by default `BATCH_SECONDS`. When they are used up, each still has
    `SURE_SECONDS`.
    """
    before, _this_thread.left = _this_thread.left, BATCH_SECONDS if seconds is None else seconds
    try:
        yield
    finally:
        _this_thread.left = before


def in_time(function: Callable, *args: Any, seconds: float | None = None) -> Any:
    """
    The result of a function that may compute for `seconds`; by default, for what the limit of an answer and the budget leave.
    Raises [`GradingTimeout`] if it takes longer. Within another such call, the limit of the outer one holds.
    """
    if _this_thread.runs:
        try:
            return function(*args)
        except _Interruption:
            raise GradingTimeout from None
    begin, left = thread_time(), _this_thread.left if seconds is None else None
    if seconds is None:
        longest = ANSWER_SECONDS - SURE_SECONDS
        seconds = SURE_SECONDS + (longest if left is None else min(longest, left))
    is_main = threading.current_thread() is threading.main_thread()
    timer = _Signals(begin + seconds) if is_main else _Watcher(begin + seconds)
    _this_thread.runs = True
    try:
        try:
            timer.start()
            return function(*args)
        finally:
            timer.stop()
    except _Interruption:
        timer.stop()  # it may have come just before the first
        clear_cache()  # expressions whose properties were being computed
        raise GradingTimeout from None
    finally:
        _this_thread.runs = False
        if left is not None:
            _this_thread.left = max(0.0, left - max(0.0, thread_time() - begin - SURE_SECONDS))


class _Signals:
    """Interrupts the main thread. Signals also reach regular expressions and the arithmetic of large numbers."""

    def __init__(self, deadline: float):
        self.deadline = deadline
        self.previous: Any = signal.getsignal(signal.SIGVTALRM)

    def start(self):
        signal.signal(signal.SIGVTALRM, self._tick)
        # By the time of all threads on the processor, which is no less than that of this one
        signal.setitimer(signal.ITIMER_VIRTUAL, _TICK, _TICK)

    def stop(self):
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, signal.SIG_DFL if self.previous is None else self.previous)

    def _tick(self, *args: Any):
        if thread_time() > self.deadline:
            raise _Interruption


class _Watcher:
    """Interrupts another thread than the main one, which gets no signals, from a third one."""

    def __init__(self, deadline: float):
        self.deadline, self.thread = deadline, threading.get_ident()
        self.armed, self.firing = True, False
        self.over = allocate_lock()  # not an `Event`, which an interruption could leave locked

    def start(self):
        self.over.acquire()
        threading.Thread(target=self._watch, daemon=True).start()

    def stop(self):
        self.armed = False
        while self.firing:
            sleep(0)
        self._raise(None)  # one that was sent and has not arrived
        if self.over.locked():
            self.over.release()

    def _watch(self):
        clock = pthread_getcpuclockid(self.thread)
        while not self.over.acquire(timeout=_TICK):
            self.firing = True
            if self.armed and clock_gettime(clock) > self.deadline:
                self._raise(_Interruption)
            self.firing = False

    def _raise(self, error: type[BaseException] | None):
        raised = None if error is None else ctypes.py_object(error)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.thread), raised)
