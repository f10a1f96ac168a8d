"""Files that appear whole or not at all."""

import itertools
import os
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
    except OSError as error:  # of a full disk, in which there is no path
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def displayed(name: str) -> str:
    """A name as text that can be encoded: bytes of it that are no UTF-8 become question marks."""
    return name.encode(errors="replace").decode()


def numbered(path: Path) -> Path:
    """The path with the first number behind it, from `.1` on, that nothing has yet."""
    names = (path.with_name(f"{path.name}.{number}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())
