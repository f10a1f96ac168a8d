"""How signals end a training. This module imports nothing slow."""

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
"""Environment variable with the id of a training's process, if no launcher waits for that process."""

_SAME = 3.0  # seconds in which a second signal is a duplicate: a scheduler sends it to us, and to a launcher that forwards it
_PATIENCE = 5.0  # seconds in which a training reacts to the signal that has ended its launcher


class Interrupted(SystemExit):
    """A signal has ended the training. The process exits with 128 and the number of the signal, without a traceback."""


def end_at_once(number: int, frame: Any):
    """Exit at once with 128 + the number of the signal, as a signal handler. No exception handler can stop it."""
    os._exit(128 + number)


@contextmanager
def handling(handler: Callable[[int, Any], None], numbers: Iterable[int] = (signal.SIGINT, *ENDING)) -> Iterator[None]:
    """Handle signals within the block, unless others do, in an interactive session, or outside of the main thread."""
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
    """The signals that this process has received. The first one ends the training as Ctrl-C does, a second one at once."""

    def __init__(self):
        self.received = 0  # number of the first signal of this training, 0 for none
        self.waits = False  # whether the training ends after its step, instead of at once
        self._at = 0.0

    def note(self, number: int):
        """Note the signal that ends the training, unless another one already has."""
        if not self.received:
            self.received, self._at = number, time.monotonic()

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle signals within the block."""
        self.received, own = 0, os.getpid()

        def handle(number: int, frame: Any):
            if os.getpid() != own:  # a forked worker process
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
"""The signals of this process."""


def end_with_launcher():
    """Send this process a SIGTERM when its launcher ends and leaves it behind, as accelerate does with one process."""
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
