"""One training at a time in an output folder, on one host or on several that share it."""

import _thread
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from filelock import LeaseCompromise, SoftFileLease, Timeout


logger = logging.getLogger(__name__)

NAME = "_lze_running"
"""File that names the process that trains in a folder. Transformers uploads no file whose name begins with `_`."""

RENEWED_SECONDS, SILENT_SECONDS = 5.0, 30.0
"""How often a training renews that file, and how old the file of a dead training is if its process is on another host."""

_held: set[Path] = set()


class OutputFolderError(RuntimeError):
    """An output folder that another training uses, or that cannot be written to; the message says which."""


@contextmanager
def claimed(run_dir: str | Path) -> Iterator[None]:
    """
    Keep other trainings out of an output folder within the block. All processes of the training must enter it; nested blocks of one
    process are allowed. Raises an [`OutputFolderError`] on all processes if another live training uses the folder.
    """
    path = Path(run_dir).resolve() / NAME
    if path in _held:
        yield
        return
    lease = SoftFileLease(
        path,
        lease_duration=SILENT_SECONDS,
        heartbeat_interval=RENEWED_SECONDS,
        on_compromise=_lost,
        thread_local=False,
    )
    is_main = PartialState().is_main_process
    refused = broadcast_object_list([_refusal(lease, path) if is_main else None])[0]
    if refused is not None:
        raise OutputFolderError(refused)
    _held.add(path)
    try:
        yield
    finally:
        _held.discard(path)
        lease.release()


def _refusal(lease: SoftFileLease, path: Path) -> str | None:
    """Acquire the folder, or say why not. The file of a process that ended on this host is taken at once, any other when it is old."""
    first = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            with suppress(Timeout):
                lease.acquire(timeout=0.2, poll_interval=0.1)
                return None
            with suppress(FileNotFoundError):
                renewed, first = path.stat().st_mtime, first or path.stat().st_mtime
                if renewed != first and (owner := lease.owner) is not None:
                    return (
                        f"`{path.parent}` is the output folder of a training that is running: process {owner.pid} on "
                        f"{owner.hostname.partition('?')[0]}, whose last sign of life is {max(0.0, time.time() - renewed):.0f} s old. "
                        f"Wait for its end, end it (`kill {owner.pid}` there), or set another `output_dir`."
                    )
    except OSError as error:
        why = error.strerror
        return f"`{path.parent}` cannot be the output folder: {why}. Make it a folder with free space, or set another `output_dir`."


def _lost(compromise: LeaseCompromise):
    if compromise.reason == "owner-changed":
        logger.error(
            "Another training has `%s`, since this one showed no sign of life. This one ends.", compromise.lock_file
        )
        _thread.interrupt_main()
