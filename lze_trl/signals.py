"""What signals ask of a training. This module imports nothing slow."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any


ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals by which schedulers and closed terminals end a training, or say that they soon will."""

STARTED_ALONE = "LZE_TRL_STARTED_ALONE"
"""Environment variable with the id of a training's process, if no launcher waits for its end."""

_SAME = 3.0  # seconds in which a further signal is the same one: a scheduler sends it to a launcher, which forwards it, and to us
_PATIENCE = 5.0  # seconds in which a training that got the signal of its launcher has begun to end


class Interrupted(SystemExit):
    """A signal has ended the training. The process exits with 128 and the number of the signal, without a traceback."""


def end_at_once(number: int, frame: Any):
    """Signal handler: exit with 128 and the number of the signal. Neither an import nor a cleanup can stop it."""
    os._exit(128 + number)


@contextmanager
def handling(handler: Callable[[int, Any], None], numbers: Iterable[int] = (signal.SIGINT, *ENDING)) -> Iterator[None]:
    """
    Handle signals within the block, those that nobody else handles or ignores. Nothing changes in an interactive session or
    outside of the main thread.
    """
    usual, before = (signal.SIG_DFL, signal.default_int_handler, end_at_once), {}
    if threading.current_thread() is threading.main_thread() and not hasattr(sys, "ps1"):
        before = {number: found for number in numbers if (found := signal.getsignal(number)) in usual}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, found in before.items():
            signal.signal(number, found)


class Signals:
    """The signals that this process has got. The first one ends the training as Ctrl-C does, a second one at once."""

    def __init__(self):
        self.received = 0  # the first one, of this training
        self.waits = False  # whether the training ends with its step, and not where it is
        self._at = 0.0

    def note(self, number: int):
        """The training ends by a signal, unless it ends already."""
        if not self.received:
            self.received, self._at = number, time.monotonic()

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle signals within the block."""
        self.received, own = 0, os.getpid()

        def handle(number: int, frame: Any):
            if os.getpid() != own:  # a worker that was forked, which is told to end
                end_at_once(number, frame)
            if self.received:
                if time.monotonic() - self._at > _SAME:
                    end_at_once(number, frame)
                return
            self.note(number)
            if not self.waits:
                raise Interrupted(128 + number)

        with handling(handle, ENDING):
            yield


SIGNALS = Signals()
"""A process has one set of signals."""


def end_with_launcher():
    """
    Send this process a SIGTERM when the launcher that started it ends and leaves it behind, as accelerate does for one
    process. A process that was started by itself, or from a shell that may be closed, is left alone.
    """
    launched = "ACCELERATE_DYNAMO_BACKEND" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ
    if not launched or os.environ.get(STARTED_ALONE) == str(os.getpid()):
        return
    launcher = os.getppid()

    def watch():
        while os.getppid() == launcher:
            time.sleep(1.0)
        time.sleep(_PATIENCE)
        if not SIGNALS.received:
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="lze-launcher", daemon=True).start()
