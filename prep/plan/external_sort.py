"""External sort of records by name, in bounded memory.

As long as the names ascend, records go straight to the target files; from the first that does not, sorted runs are
written next to them and merged at the end.
"""

from __future__ import annotations

import heapq
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from operator import eq, itemgetter
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from resolute.files import write_errors

__all__ = ["ENTRY", "Record", "RecordFile", "TwoTargets", "sort_records"]

# `name_end` is the end of the name in the blob of names; it begins where the previous name ends.
ENTRY = np.dtype([("name_end", "<u8"), ("offset", "<i8"), ("nbytes", "<u8"), ("size_bytes", "<u8"),
                  ("label", "<u4"), ("container", "<u4"), ("packed", "u1")])  # fmt: skip
_PACKED = struct.Struct("<QqQQIIB")
_BLOCK = 1024  # records read or written at once per run
RUN_RECORDS = 250_000


class Record(NamedTuple):
    """One image: see `ImageRef`; `label` and `container` are numbers."""

    name: bytes
    offset: int
    nbytes: int
    size_bytes: int
    label: int
    container: int
    packed: int


class RecordFile(NamedTuple):
    """A list of records on disk: `entries` is a file of ENTRY, `names` the blob of their names."""

    entries: Path
    names: Path

    @classmethod
    def at(cls, folder: Path, stem: str) -> RecordFile:
        return cls(folder / f"{stem}.entries", folder / f"{stem}.names")

    def write(self, records: Iterable[Record]) -> None:
        """Replace the files. Raises `ResoluteError` if the disk refuses."""
        end = 0
        records = iter(records)
        with ExitStack() as stack:
            with write_errors(self.entries):
                entries = stack.enter_context(self.entries.open("wb"))
                names = stack.enter_context(self.names.open("wb"))
            while block := list(islice(records, _BLOCK)):
                packed = bytearray()
                for name, *rest in block:
                    end += len(name)
                    packed += _PACKED.pack(end, *rest)
                with write_errors(self.entries):
                    entries.write(packed)
                    names.write(b"".join([record.name for record in block]))
            with write_errors(self.entries):
                entries.flush()
                names.flush()

    def read(self) -> Iterator[Record]:
        start = 0
        with self.entries.open("rb") as entries, self.names.open("rb") as names:
            while packed := entries.read(_BLOCK * _PACKED.size):
                rows = list(_PACKED.iter_unpack(packed))
                blob, first = names.read(rows[-1][0] - start), start
                for end, *rest in rows:
                    yield Record(blob[start - first : end - first], *rest)
                    start = end

    def map(self, mode: Literal["r", "r+"] = "r") -> tuple[NDArray[np.void], mmap.mmap]:
        """Memory-map the entries (N,) ENTRY, writable if "r+", and the blob of names; N must be at least 1."""
        entries = np.memmap(self.entries, ENTRY, mode).view(np.ndarray)
        with self.names.open("rb") as file:
            return entries, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def remove(self) -> None:
        self.entries.unlink(missing_ok=True)
        self.names.unlink(missing_ok=True)


class TwoTargets(Exception):
    """Two records with the name `str(error)` have different targets."""


class _Ascending(Iterator[Record]):
    """Yields the records while their names ascend strictly; `first_unsorted` is then the first that does not."""

    def __init__(self, records: Iterator[Record]) -> None:
        self._records = records
        self._last = b""
        self.first_unsorted: Record | None = None

    def __next__(self) -> Record:
        if self.first_unsorted is not None:
            raise StopIteration
        record = next(self._records)
        if record.name <= self._last:
            self.first_unsorted = record
            raise StopIteration
        self._last = record.name
        return record


def sort_records(
    records: Iterator[Record], target: RecordFile, *, run_records: int = RUN_RECORDS,
    is_same: Callable[[int, int], bool] = eq,
) -> int:  # fmt: skip
    """Write the records to `target` in ascending order of name; returns the number of duplicate names dropped.

    Of records with the same name the last one is kept, as when an archive is unpacked. At most `run_records` are in
    memory at a time; temporary runs are next to `target`. `is_same` compares two records' labels when all records have
    been read. Raises `ResoluteError` if the disk refuses, `TwoTargets` if a name has two different labels.
    """
    ascending = _Ascending(records)
    target.write(ascending)
    if ascending.first_unsorted is None:
        return 0
    runs = [RecordFile.at(target.entries.parent, "run-0")]
    for old, new in zip(target, runs[0], strict=True):
        old.replace(new)
    block = [ascending.first_unsorted, *islice(records, run_records - 1)]
    while block:
        # why: the sort is stable and runs are in order of arrival, so equal names keep that order
        block.sort(key=itemgetter(0))
        runs.append(RecordFile.at(target.entries.parent, f"run-{len(runs)}"))
        runs[-1].write(block)
        block = list(islice(records, run_records))
    repeated = 0

    def last_of_each(merged: Iterator[Record]) -> Iterator[Record]:
        nonlocal repeated
        previous = next(merged)
        for record in merged:
            if record.name == previous.name:
                repeated += 1
                if not is_same(record.label, previous.label):
                    raise TwoTargets(os.fsdecode(record.name))
            else:
                yield previous
            previous = record
        yield previous

    target.write(last_of_each(heapq.merge(*(run.read() for run in runs), key=itemgetter(0))))
    for run in runs:
        run.remove()
    return repeated
