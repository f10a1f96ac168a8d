"""Append-only Parquet parts: names, listing, atomic writing, and merging of small ones."""

import io
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ..files import write_atomically
from .schema import SORT_KEYS


FAN_OUT = 16
"""Neighbouring parts that are merged into one."""

FINAL_BYTES = 8 * 2**20
"""Size of the encoded columns from which a part is final, so that merging costs the trainer a bounded amount of memory."""

_ROW_GROUP = 65_536
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
        Whether the file ends as a Parquet file does: one cut off by a crashed copy does not.

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
    Parts of a table in the order they were written.

    A part whose flushes are all in a larger one has been merged into it and is left out: the merge may have been
    interrupted before it could remove them.

    Args:
        folder (`Path`): Folder of the table.
        is_usable (`Callable[[Part], bool]`, *optional*): Parts to list; one that is not stands for no other.
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
        is_merged = kept and kept[-1].attempt == part.attempt and part.last <= kept[-1].last
        if not is_merged and is_usable(part):
            kept.append(part)
    return kept


def write_part(folder: Path, name: str, table: pa.Table, compression: str = "snappy"):
    """Write one part atomically. Small parts are compressed fast, for they are soon merged."""
    folder.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression=compression, row_group_size=_ROW_GROUP)
    write_atomically(folder / name, buffer.getvalue())


def merge_parts(directory: Path, table: str, attempt: int, least: int = FAN_OUT):
    """
    Merge runs of small neighbouring parts of one attempt until none is left to merge.

    Parts grow in levels, each [`FAN_OUT`] times the one below, so that a row is rewritten a few times at most.

    Args:
        directory (`Path`): Telemetry folder.
        table (`str`): Name of the table.
        attempt (`int`): Attempt whose parts may be touched.
        least (`int`, *optional*, defaults to `FAN_OUT`): Number of parts worth a merge; 2 at the end of a run.
    """
    sizes: dict[Path, int] = {}
    while True:
        parts = [part for part in list_parts(directory / table) if part.attempt == attempt]
        for part in parts:
            if part.path not in sizes:
                sizes[part.path] = _uncompressed_bytes(part.path)
        chosen = _mergeable(parts, [sizes[part.path] for part in parts], least)
        if not chosen:
            return
        _merge(directory / table, table, chosen)


def _uncompressed_bytes(path: Path) -> int:
    metadata = pq.read_metadata(path)
    return sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))


def _mergeable(parts: list[Part], sizes: list[int], least: int) -> list[Part]:
    """First run of at least `least` neighbours, among the smallest parts if there are enough of them."""
    limit = FINAL_BYTES // FAN_OUT**3
    while limit <= FINAL_BYTES:
        start = 0
        for end in range(len(parts) + 1):
            if end < len(parts) and sizes[end] < limit:
                continue
            if end - start >= least:
                return _until_final(parts[start:end], sizes[start:end])
            start = end + 1
        limit *= FAN_OUT
    return []


def _until_final(parts: list[Part], sizes: list[int]) -> list[Part]:
    total = 0
    for count, size in enumerate(sizes, start=1):
        total += size
        if total >= FINAL_BYTES and count > 1:
            return parts[:count]
    return parts


def _merge(folder: Path, table: str, parts: list[Part]):
    merged = pa.concat_tables([pq.ParquetFile(part.path).read(use_threads=False) for part in parts])
    merged = merged.sort_by([(key, "ascending") for key in SORT_KEYS[table]])
    write_part(folder, part_name(parts[0].attempt, parts[0].first, parts[-1].last), merged, compression="zstd")
    for part in parts:
        part.path.unlink(missing_ok=True)
