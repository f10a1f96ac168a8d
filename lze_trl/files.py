"""Files and folders that appear whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_atomically(path: Path, content: bytes):
    """Write a whole file into a folder that exists; neither a reader nor a crash ever sees a part of it."""
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
    """Make an empty folder to fill; at the end of the block it takes the place of the old one, unless the block fails."""
    unfinished = folder.with_name(f"{folder.name}.unfinished-{os.getpid()}")
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
