"""Files and folders that appear whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_atomically(path: Path, content: bytes):
    """
    Write a file so that neither a reader nor a crash ever sees a part of it: under a temporary name, to the disk, then renamed.

    Args:
        path (`Path`): Where to write; its folder exists.
        content (`bytes`): The whole file.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def made_aside(folder: Path) -> Iterator[Path]:
    """
    Make a folder aside; at the end of the block it takes the place of the old one, unless the block fails.

    Args:
        folder (`Path`): Where it appears; the folders above it are made.

    Yields:
        `Path`: The empty folder to fill.
    """
    unfinished = folder.with_name(f"{folder.name}.unfinished-{os.getpid()}")
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
