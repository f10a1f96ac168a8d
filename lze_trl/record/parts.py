"""Parts: the Parquet files of a table, each of which appears whole or not at all.

Every flush adds a part of its own. A hundred of them, or 8 MB, and what is left when the run ends, are merged into one, which
stays: no row is written more than twice, and a run of a million groups has a dozen files.
"""

import io
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ..files import write_atomically


MERGED_BYTES, MERGED_PARTS = 8 * 2**20, 100
"""Size in memory, and number, from which the parts of single flushes are merged."""

_PATTERN = re.compile(r"a(\d{4})-(\d{8})-(\d{8})\.parquet")


@dataclass(frozen=True, order=True)
class Part:
    """One file of a table."""

    attempt: int  # of the run, counted from 1
    first: int  # of the flushes whose rows it holds, counted from 1 in each attempt
    last: int
    folder: Path

    @property
    def path(self) -> Path:
        """The file."""
        return self.folder / f"a{self.attempt:04d}-{self.first:08d}-{self.last:08d}.parquet"

    @property
    def is_whole(self) -> bool:
        """Whether the file, which must be there, has its end: one cut off while it was copied has not."""
        try:
            pq.read_metadata(self.path)
        except FileNotFoundError:
            raise
        except (pa.ArrowException, OSError):
            return False
        return True


def list_parts(folder: Path, is_usable: Callable[[Part], bool] = lambda part: True) -> list[Part]:
    """Parts of a table as they were written, without those whose rows are all in another one that is usable."""
    names = os.listdir(folder) if folder.is_dir() else []
    found = [
        Part(int(match[1]), int(match[2]), int(match[3]), folder)
        for name in names
        if (match := _PATTERN.fullmatch(name))
    ]
    kept: list[Part] = []
    for part in sorted(found, key=lambda part: (part.attempt, part.first, -part.last)):
        is_in_another = kept and kept[-1].attempt == part.attempt and part.last <= kept[-1].last
        if not is_in_another and is_usable(part):
            kept.append(part)
    return kept


def write_part(part: Part, rows: pa.Table):
    """Write one part atomically."""
    part.folder.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    pq.write_table(rows, buffer, compression="zstd")
    write_atomically(part.path, buffer.getvalue())


class PartWriter:
    """Adds rows to a table in an attempt of the run."""

    def __init__(self, folder: Path, attempt: int):
        self.folder, self.attempt = folder, attempt
        self._flushes = 0
        self._unwritten: list[pa.Table] = []
        self._unmerged: list[tuple[Part, pa.Table]] = []

    def add(self, rows: pa.Table):
        """Keep rows for the next flush."""
        self._unwritten.append(rows)

    def flush(self):
        """Write the rows that were added as a part of their own. If that fails, they are kept."""
        if self._unwritten:
            self._flushes += 1  # also if it fails, so that no name is ever that of another file
            rows = pa.concat_tables(self._unwritten).combine_chunks()
            part = Part(self.attempt, self._flushes, self._flushes, self.folder)
            write_part(part, rows)
            self._unwritten.clear()
            self._unmerged.append((part, rows))

    def merge(self, closing: bool) -> list[Part]:
        """Merge the parts of single flushes, if there are enough of them or the run ends, and return them to be removed."""
        parts, tables = [part for part, _ in self._unmerged], [rows for _, rows in self._unmerged]
        is_due = len(parts) >= MERGED_PARTS or sum(rows.nbytes for rows in tables) >= MERGED_BYTES
        if not (is_due or closing):
            return []
        if len(parts) > 1:
            write_part(replace(parts[0], last=parts[-1].last), pa.concat_tables(tables).combine_chunks())
        self._unmerged.clear()
        return parts if len(parts) > 1 else []
