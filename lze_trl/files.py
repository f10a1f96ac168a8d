"""Write files that appear whole or not at all, and name files."""

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
    except OSError as error:  # the error of a full disk names no path
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def displayed(name: str) -> str:
    """Make a file's name printable: bytes that are not UTF-8 become question marks."""
    return name.encode(errors="replace").decode()


def numbered(path: Path) -> Path:
    """Append the first number, from `.1` on, with which the path does not exist yet."""
    names = (path.with_name(f"{path.name}.{number}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())
