"""
Limits of computing time for answers that SymPy would compute for minutes.

The processor time of the thread counts, so a busy machine makes no difference. A signal interrupts the computation between two Python
instructions, in regular expressions and in arithmetic, and repeats until the computation ends, whatever catches exceptions on the way.
Signals reach the main thread only: what another thread asks for is computed by the main thread of a helper process.
"""

import functools
import gc
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import thread_time
from typing import Any

from sympy.core.cache import clear_cache


ANSWER_SECONDS = 1.0
"""Most computing time for reading an answer and comparing it."""

BATCH_SECONDS = 10.0
SURE_SECONDS = 0.1
"""Computing time that the answers of a batch share, and the time that each of them has besides."""

HELPER_SECONDS = 10.0
"""Computing time of one request after which the system ends a helper process, also within a computation in C."""

_TICK = 0.05


class GradingTimeout(Exception):  # noqa: N818
    """Raised if an answer cannot be read or compared in time."""


class _Interruption(BaseException):
    """Ends a computation from outside. SymPy and math-verify catch every `Exception`."""


class _State(threading.local):
    runs = False  # whether a limit is set
    left: float | None = None  # seconds left of the budget of a batch


_this_thread = _State()


@contextmanager
def budget(seconds: float | None = None) -> Iterator[None]:
    """Within this block, let answers share so many seconds, by default `BATCH_SECONDS`. When these are used up, each answer still has `SURE_SECONDS`."""
    before, _this_thread.left = _this_thread.left, BATCH_SECONDS if seconds is None else seconds
    try:
        yield
    finally:
        _this_thread.left = before


def run_with_timeout(function: Callable, *args: Any, seconds: float | None = None) -> Any:
    """
    Return the result of a function that may compute for `seconds`; by default, for what the limit of an answer and the budget leave.
    Raises [`GradingTimeout`] if it takes longer. Garbage collection is off meanwhile. Within another such call, the outer limit holds.
    """
    if _this_thread.runs or threading.current_thread() is not threading.main_thread():
        return function(*args)  # the interruption goes on to the outer call: this one has not used up its own time
    begin, left = thread_time(), _this_thread.left if seconds is None else None
    if seconds is None:
        longest = ANSWER_SECONDS - SURE_SECONDS
        seconds = SURE_SECONDS + (longest if left is None else min(longest, left))
    deadline = begin + seconds

    def tick(*args: Any):
        if thread_time() > deadline:
            raise _Interruption

    previous: Any = signal.signal(signal.SIGVTALRM, tick)
    collects = gc.isenabled()
    try:
        _this_thread.runs = True
        gc.disable()  # going through all objects of a training takes longer than reading an answer
        try:
            # It counts the processor time of all threads, which is at least that of this one
            signal.setitimer(signal.ITIMER_VIRTUAL, _TICK, _TICK)
            return function(*args)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except _Interruption:
        # The interruption may have come just before the line that stops the timer
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        clear_cache()  # of SymPy's expressions, whose properties were being computed
        raise GradingTimeout from None
    finally:
        signal.signal(signal.SIGVTALRM, signal.SIG_DFL if previous is None else previous)
        _this_thread.runs = False
        if collects:
            gc.enable()
        if left is not None:
            _this_thread.left = max(0.0, left - max(0.0, thread_time() - begin - SURE_SECONDS))


_functions: dict[str, Callable] = {}  # what the helper process can be asked for


def in_main_thread(function: Callable) -> Callable:
    """
    Make a function compute in a main thread, so that [`run_with_timeout`] limits it: called in another thread, it runs in the helper
    process. JSON must be able to express arguments and result; tuples come back as lists.
    """
    _functions[function.__qualname__] = function

    @functools.wraps(function)
    def called(*args: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            return function(*args)
        return _helper.call(function.__qualname__, args)

    return called


class _Helper:
    """Runs a process that computes one request after the other. It starts when it is first needed, without a fork."""

    def __init__(self):
        self.lock = threading.Lock()
        self.process: subprocess.Popen[str] | None = None

    def call(self, name: str, args: tuple) -> Any:
        with self.lock:
            # If anything is raised below, this process is not asked again: its next answer would be for this request
            process, self.process = self.process or self._start(), None
            stdin: Any = process.stdin
            stdout: Any = process.stdout
            with suppress(BrokenPipeError):
                stdin.write(json.dumps([name, args, _this_thread.left]) + "\n")
                stdin.flush()
            answer = stdout.readline()
            if answer:
                self.process = process
            elif (code := process.wait()) != -signal.SIGPROF:
                raise RuntimeError(f"The process that grades answers for other threads ended with exit code {code}.")
        result, _this_thread.left, problem = json.loads(answer) if answer else (None, _this_thread.left, "slow")
        if problem is not None:
            raise GradingTimeout if problem == "slow" else RuntimeError(problem)
        return result

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", "from lze_trl.rewards.timeouts import serve; serve()"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
        return subprocess.Popen(command, **pipes, env=environment, text=True, encoding="utf-8", start_new_session=True)


_helper = _Helper()
# A child process needs a helper of its own
os.register_at_fork(after_in_child=lambda: vars(_helper).update(vars(_Helper())))


def serve():
    """Run the helper process: compute requests from standard input, a line of JSON each, until it ends."""
    answers, sys.stdout = sys.stdout, sys.stderr  # for whatever prints
    for line in sys.stdin:
        name, args, _this_thread.left = json.loads(line)
        # Its signal ends the process, also within a computation in C
        signal.setitimer(signal.ITIMER_PROF, HELPER_SECONDS)
        result, problem = None, None
        try:
            result = _functions[name](*args)
        except GradingTimeout:
            problem = "slow"
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(json.dumps([result, _this_thread.left, problem]) + "\n")
        answers.flush()
