"""Parts: the Parquet files of a table, each of which appears whole or not at all.

A part is closed once its rows take 8 MB of memory. Until then each flush writes it again with all of its rows, under a name of
its own, and the version before is removed ten seconds later: a reader that has just listed the folder finds what it has read of.
So a run of millions of groups has a few hundred files, rows show up within seconds, and nothing has to be merged afterwards.
"""

import io
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ..files import write_atomically


PART_BYTES = 8 * 2**20
"""Size in memory from which a part is closed. It bounds what a flush has to write."""

GRACE_SECONDS = 10.0
"""Time that an older version of a part stays for those who are reading it."""

_PATTERN = re.compile(r"a(\d{4})-(\d{8})-(\d{8})\.parquet")
_MAGIC = b"PAR1"


@dataclass(frozen=True, order=True)
class Part:
    """
    One file of a table.

    Attributes:
        attempt (`int`): Attempt of the run that wrote it, counted from 1.
        first (`int`): First flush of the attempt whose rows it holds.
        last (`int`): Last one.
        path (`Path`): The file.
    """

    attempt: int
    first: int
    last: int
    path: Path

    @property
    def is_whole(self) -> bool:
        """
        Whether the file ends as a Parquet file does. One that was cut off while it was copied does not.

        Raises:
            FileNotFoundError: If it is no longer there.
        """
        try:
            with open(self.path, "rb") as file:
                file.seek(-4, os.SEEK_END)
                return file.read(4) == _MAGIC
        except FileNotFoundError:
            raise
        except OSError:
            return False


def part_name(attempt: int, first: int, last: int) -> str:
    """File name of a part."""
    return f"a{attempt:04d}-{first:08d}-{last:08d}.parquet"


def list_parts(folder: Path, is_usable: Callable[[Part], bool] = lambda part: True) -> list[Part]:
    """
    Parts of a table in the order they were written, each in its newest version.

    A part is an older version if its flushes are all in another one.

    Args:
        folder (`Path`): Folder of the table.
        is_usable (`Callable[[Part], bool]`, *optional*): Which parts to list. One that is left out replaces no other.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    found = []
    for name in names:
        match = _PATTERN.fullmatch(name)
        if match:
            found.append(Part(*(int(number) for number in match.groups()), folder / name))
    found.sort(key=lambda part: (part.attempt, part.first, -part.last))
    kept: list[Part] = []
    for part in found:
        is_older = kept and kept[-1].attempt == part.attempt and part.last <= kept[-1].last
        if not is_older and is_usable(part):
            kept.append(part)
    return kept


def write_part(path: Path, rows: pa.Table):
    """Write one part atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    pq.write_table(rows, buffer, compression="zstd")
    write_atomically(path, buffer.getvalue())


class OpenPart:
    """
    The part of a table that new rows go to.

    Args:
        folder (`Path`): Folder of the table.
        attempt (`int`): Attempt of the run.
    """

    def __init__(self, folder: Path, attempt: int):
        self.folder, self.attempt = folder, attempt
        self._first = 1
        self._rows: pa.Table | None = None
        self._newest: Path | None = None
        self._older: list[tuple[float, Path]] = []

    def write(self, new: list[pa.Table], flush: int) -> pa.Table:
        """
        Write the part with further rows, which count as written only once [`keep`] is called: what is recorded together
        is kept together.

        Args:
            new (`list[pa.Table]`): The rows.
            flush (`int`): Number of the flush, larger than that of any before.

        Returns:
            `pa.Table`: All rows of the part.
        """
        rows = pa.concat_tables([*([] if self._rows is None else [self._rows]), *new]).combine_chunks()
        path = self.folder / part_name(self.attempt, self._first, flush)
        write_part(path, rows)
        if self._newest is not None:
            self._older.append((time.monotonic(), self._newest))
        self._newest = path
        self.remove_older(GRACE_SECONDS)
        return rows

    def keep(self, rows: pa.Table, flush: int):
        """Take what was written as the rows of the part, and close it if it is large enough."""
        self._rows = rows
        if rows.nbytes >= PART_BYTES:
            self._first, self._rows, self._newest = flush + 1, None, None

    def remove_older(self, seconds: float = 0.0):
        """Remove the versions that were replaced so long ago."""
        while self._older and time.monotonic() - self._older[0][0] >= seconds:
            self._older.pop(0)[1].unlink(missing_ok=True)
