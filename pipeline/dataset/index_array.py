"""Index arrays: memory-mapped record arrays with O(1) access, verified block by block on first use.

An index array is a .npy file, possibly of several gigabytes. `NAME.crc.npy` beside it holds the CRC-32 of each 4 KiB
block. Opening maps the array and reads the checksums, whose SHA-256 is in the manifest; a block is verified when one
of its records is first accessed. Opening reads about 0.03 bytes per sample; verifying costs a microsecond per block.
"""

from __future__ import annotations

import functools
import hashlib
import io
import mmap
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resolute.errors import ResoluteError
from resolute.pipeline.storage.base import OpenFile
from resolute.pipeline.storage.local import retry_local
from resolute.pipeline.storage.read_at import read_at

__all__ = ["BLOCK_BYTES", "REPAIR", "JoinedRecords", "Records", "checksums", "checksums_name", "read_checksums"]

BLOCK_BYTES = 4096  # one page: the smallest unit that is read from a disk
REPAIR = "run `resolute verify` on this set: it finds all damage and prints the command that repairs it"
_CHUNK = 1 << 20  # records per step when a column is copied


def checksums_name(name: str) -> str:
    """File name of the checksums of the index array `name`."""
    return name.removesuffix(".npy") + ".crc.npy"


def checksums(pieces: Iterable[bytes]) -> NDArray[np.uint32]:
    """CRC-32 of each block (the last may be short) of a file passed as `pieces` of any length: (blocks,) uint32."""
    crcs = bytearray()
    rest = b""
    for piece in pieces:
        data = memoryview(rest + piece if rest else piece)
        end = len(data) // BLOCK_BYTES * BLOCK_BYTES
        for at in range(0, end, BLOCK_BYTES):
            crcs += zlib.crc32(data[at : at + BLOCK_BYTES]).to_bytes(4, "little")
        rest = bytes(data[end:])
    if rest:
        crcs += zlib.crc32(rest).to_bytes(4, "little")
    return np.frombuffer(bytes(crcs), "<u4")


class Records:
    """The records of one index array, (N,) of a structured dtype; read-only and thread-safe.

        records[ids]       copies of the records `ids` (integers of any shape, each in [0, N))
        records[7]         one record; records[10:20] and records[:] are copies of a range
        records["label"]   a copy of a complete column: O(N), not for the hot path

    Every access raises `ResoluteError` if a block differs from what prep wrote, `StorageError` if the disk fails,
    IndexError if an index is out of range.
    """

    repair = REPAIR  # remedy for damage, in messages

    def __init__(self, path: Path, crcs: NDArray[np.uint32], dtype: np.dtype[Any], *, where: str = "",
                 rows: NDArray[np.uint32] | None = None) -> None:  # fmt: skip
        """Map `path`, whose blocks have the checksums `crcs`.

        `rows` selects a subset: record i is the file's record rows[i]. `where` names the file in messages.
        Raises `ResoluteError` if the header is damaged or has another dtype, `StorageError` if it cannot be read.
        """
        self._path, self._crcs, self.dtype, self._where, self._rows = path, crcs, dtype, where or str(path), rows
        self._file = retry_local(lambda: OpenFile(path), self._where)
        try:
            self._map = retry_local(lambda: mmap.mmap(self._file.fd, 0, access=mmap.ACCESS_READ), self._where)
        except ValueError:  # mmap of an empty file
            raise self._damaged("got 0 bytes, expected a .npy file") from None
        self._checked = np.zeros(len(crcs), np.bool_)
        if -(-len(self._map) // BLOCK_BYTES) != len(crcs):
            raise self._damaged(f"got {len(self._map)} bytes, expected {len(crcs)} blocks of {BLOCK_BYTES}")
        self._check([0])
        try:
            head = io.BytesIO(self._map[:BLOCK_BYTES])
            version = np.lib.format.read_magic(head)
            shape, _, got = np.lib.format.read_array_header_1_0(head)
        except ValueError as error:
            raise self._damaged(f"got '{error}', expected a .npy file") from None
        self._first = head.tell()
        if version != (1, 0) or got != dtype or self._first + shape[0] * dtype.itemsize != len(self._map):
            raise self._damaged(f"got {shape} records of {got}, expected {dtype}")
        self._file_rows = np.frombuffer(self._map, dtype, count=shape[0], offset=self._first)
        self._length = len(self._file_rows if rows is None else rows)

    def __reduce__(self) -> tuple[Any, ...]:
        kind = functools.partial(type(self), where=self._where, rows=self._rows)
        return kind, (self._path, self._crcs, self.dtype)

    def __len__(self) -> int:
        return self._length

    def subset(self, rows: NDArray[np.uint32]) -> Records:
        """View of the records `rows` (M,), in that order; shares the mapped file."""
        if self._rows is not None:
            rows = self._rows[rows]
        return type(self)(self._path, self._crcs, self.dtype, where=self._where, rows=rows)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            out = np.empty(len(self), self.dtype[key])
            for at in range(0, len(self), _CHUNK):
                out[at : at + _CHUNK] = self[at : at + _CHUNK][key]
            return out
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            if self._rows is None and step == 1:
                return self._range(start, max(start, stop))
            key = np.arange(start, stop, step)
        ids = np.asarray(key)
        if ids.dtype.kind not in "iu":
            raise IndexError(f"{self._where}: got indices of {ids.dtype}, expected integers")
        records = self._gather(np.ascontiguousarray(ids, np.int64).reshape(-1)).reshape(ids.shape)
        return records[()] if ids.ndim == 0 else records

    def _gather(self, flat: NDArray[np.int64]) -> NDArray[Any]:
        """Copies of the records `flat` (n,)."""
        if len(flat) and (flat.min() < 0 or flat.max() >= len(self)):
            raise self._out_of_range()
        if self._rows is not None:
            flat = self._rows[flat].astype(np.int64)
        starts = self._first + flat * self.dtype.itemsize
        # why two: a record may span two blocks
        blocks = np.concatenate([starts // BLOCK_BYTES, (starts + self.dtype.itemsize - 1) // BLOCK_BYTES])
        unchecked = blocks[~self._checked[blocks]]
        if len(unchecked):
            self._check(np.unique(unchecked).tolist())
        records: NDArray[Any] = self._file_rows[flat]
        return records

    def __iter__(self) -> Iterator[Any]:
        for at in range(0, len(self), _CHUNK):
            yield from self[at : at + _CHUNK]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype)

    def _range(self, start: int, stop: int) -> NDArray[Any]:
        """Copy of the file's records [start, stop)."""
        size = self.dtype.itemsize
        low, high = (self._first + start * size) // BLOCK_BYTES, -(-(self._first + stop * size) // BLOCK_BYTES)
        if stop > start:
            self._check((low + np.flatnonzero(~self._checked[low:high])).tolist(), ahead=False)
        return np.array(self._file_rows[start:stop])

    def _check(self, blocks: list[int], *, ahead: bool = True) -> None:
        """Verify blocks and mark them as checked. Two threads may verify the same block, which is harmless."""
        if ahead and len(blocks) > 1:  # why: lets a cold disk serve all reads at once
            for block in blocks:
                length = min(BLOCK_BYTES, len(self._map) - block * BLOCK_BYTES)
                self._map.madvise(mmap.MADV_WILLNEED, block * BLOCK_BYTES, length)
        for block in blocks:
            at = block * BLOCK_BYTES
            # why not from the mapping: an I/O error there is a SIGBUS that kills the process
            data = retry_local(functools.partial(read_at, self._file.fd, BLOCK_BYTES, at), self._where)
            got, expected = zlib.crc32(data), int(self._crcs[block])
            if got != expected:
                raise self._damaged(f"got CRC-32 {got:08x} at byte {at}, expected {expected:08x}")
            self._checked[block] = True

    def _out_of_range(self) -> IndexError:
        return IndexError(f"{self._where}: index out of range of {len(self)} records")

    def _damaged(self, what: str) -> ResoluteError:
        return ResoluteError(f"{self._where}: changed since prep, {what}; {self.repair}")


class JoinedRecords(Records):
    """The records of several arrays, one array after another, as one of `dtype`; used like `Records`.

    The fields of the arrays have the names of `dtype`; one that is a shorter vector there is followed by zeros.
    """

    def __init__(
        self, parts: Sequence[Records], dtype: np.dtype[Any], *, rows: NDArray[np.uint32] | None = None
    ) -> None:
        """`parts` are at least one; `rows` selects a subset: record i is record rows[i] of the parts."""
        self._parts, self.dtype, self._rows, self._where = tuple(parts), dtype, rows, parts[0]._where
        self._starts = np.cumsum([0, *map(len, parts)])
        self._length = int(self._starts[-1]) if rows is None else len(rows)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(type(self), rows=self._rows), (self._parts, self.dtype)

    def subset(self, rows: NDArray[np.uint32]) -> Records:
        return type(self)(self._parts, self.dtype, rows=rows if self._rows is None else self._rows[rows])

    def _gather(self, flat: NDArray[np.int64]) -> NDArray[Any]:
        if len(flat) and (flat.min() < 0 or flat.max() >= self._length):
            raise self._out_of_range()
        if self._rows is not None:
            flat = self._rows[flat].astype(np.int64)
        out = np.empty(len(flat), self.dtype)
        parts = np.searchsorted(self._starts, flat, side="right") - 1
        for number, (part, start) in enumerate(zip(self._parts, self._starts.tolist(), strict=False)):
            chosen = np.flatnonzero(parts == number)
            if len(chosen):
                out[chosen] = self._converted(part[flat[chosen] - start])
        return out

    def _range(self, start: int, stop: int) -> NDArray[Any]:
        pieces = [
            self._converted(part[max(0, start - first) : max(0, stop - first)])
            for part, first in zip(self._parts, self._starts.tolist(), strict=False)
        ]  # fmt: skip
        return np.concatenate(pieces)

    def _converted(self, records: NDArray[Any]) -> NDArray[Any]:
        if records.dtype == self.dtype:
            return records
        out = np.zeros(len(records), self.dtype)
        for name in self.dtype.names or ():
            column = records[name]
            out[name][(slice(None), *map(slice, column.shape[1:]))] = column
        return out


def read_checksums(path: Path, sha256: str, where: str) -> NDArray[np.uint32]:
    """Read a checksum file and verify its own SHA-256: (blocks,) uint32.

    Raises `FileNotFoundError`, `StorageError` if it cannot be read, `ResoluteError` if its SHA-256 differs.
    """
    data = retry_local(path.read_bytes, where)
    got = hashlib.sha256(data).hexdigest()
    if got != sha256:
        raise ResoluteError(f"{where}: changed since prep, got SHA-256 {got[:12]}…, expected {sha256[:12]}…; {REPAIR}")
    crcs: NDArray[np.uint32] = np.load(io.BytesIO(data), allow_pickle=False)
    return crcs
