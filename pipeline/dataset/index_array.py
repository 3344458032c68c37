"""Index arrays: records by number at once, checked before they are trusted.

An index array is a .npy file that may be gigabytes; beside it lies a small one (`NAME.crc.npy`) with the CRC-32 of
each of its blocks of 4 KiB. Opening maps the first into memory and reads the second, whose hash is in the manifest;
a block is checked when a record in it is asked for the first time. So opening costs about 0.03 bytes a sample, and
the price of checking is paid by the records that are used: a page that is read anyway, and a microsecond.
"""

from __future__ import annotations

import functools
import hashlib
import io
import mmap
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import ResoluteError
from pipeline.jit import compiled
from pipeline.storage.files import OpenFile, retry_local
from pipeline.storage.read_at import read_at

__all__ = ["BLOCK_BYTES", "REPAIR", "Records", "checksums", "checksums_name", "read_checksums"]

BLOCK_BYTES = 4096  # a page: the least that a disk is asked for
REPAIR = "run `make verify` with this set as SHARDS: it finds all damage and prints the command that repairs it"
_CHUNK = 1 << 20  # records of a whole column that are in memory at once


def checksums_name(name: str) -> str:
    """The file that holds the checksums of the index array `name`."""
    return name.removesuffix(".npy") + ".crc.npy"


def checksums(pieces: Iterable[bytes]) -> NDArray[np.uint32]:
    """CRC-32 of each block of a file that comes in pieces of any length; the last block may be short."""
    found = bytearray()
    rest = b""
    for piece in pieces:
        data = memoryview(rest + piece if rest else piece)
        whole = len(data) // BLOCK_BYTES * BLOCK_BYTES
        for at in range(0, whole, BLOCK_BYTES):
            found += zlib.crc32(data[at : at + BLOCK_BYTES]).to_bytes(4, "little")
        rest = bytes(data[whole:])
    if rest:
        found += zlib.crc32(rest).to_bytes(4, "little")
    return np.frombuffer(bytes(found), "<u4")


class Records:
    """The records of one index array, (N,) of its dtype, read-only and safe to share between threads.

        records[ids]       copies of the records `ids` (any shape of integers, each in [0, N))
        records[7]         one of them; records[10:20] and records[:] copies of a run of them
        records["label"]   a whole column, checked and copied: O(N), not for the hot path

    Every access raises `ResoluteError` if it needs a block that is not what prep wrote, `StorageError` if the disk does
    not deliver it, IndexError out of range.
    """

    repair = REPAIR  # what to do about damage, for messages

    def __init__(self, path: Path, crcs: NDArray[np.uint32], dtype: np.dtype[Any], *, where: str = "",
                 places: NDArray[np.uint32] | None = None) -> None:  # fmt: skip
        """Map `path`, whose blocks have the checksums `crcs`. `places`: record i of this is the file's places[i].

        `where` names the file in messages. Raises `ResoluteError` if its header is damaged or of another dtype,
        `StorageError` if it cannot be read.
        """
        self._path, self._crcs, self.dtype, self._where, self._places = path, crcs, dtype, where or str(path), places
        self._file = retry_local(lambda: OpenFile(path), self._where)
        try:
            self._map = retry_local(lambda: mmap.mmap(self._file.fd, 0, access=mmap.ACCESS_READ), self._where)
        except ValueError:  # what mmap says of an empty file
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
        self._rows = np.frombuffer(self._map, dtype, count=shape[0], offset=self._first)
        self._length = len(self._rows if places is None else places)

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, (type(self), self._path, self._crcs, self.dtype, self._where, self._places)

    def __len__(self) -> int:
        return self._length

    def part(self, places: NDArray[np.uint32]) -> Records:
        """Those of the records whose numbers are `places`, in that order; nothing is copied."""
        if self._places is not None:
            places = self._places[places]
        return type(self)(self._path, self._crcs, self.dtype, where=self._where, places=places)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            out = np.empty(len(self), self.dtype[key])
            for at in range(0, len(self), _CHUNK):
                out[at : at + _CHUNK] = self[at : at + _CHUNK][key]
            return out
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            if self._places is None and step == 1:
                return self._run(start, max(start, stop))
            key = np.arange(start, stop, step)
        ids = np.asarray(key)
        if ids.dtype.kind not in "iu":
            raise IndexError(f"{self._where}: got indices of {ids.dtype}, expected integers")
        flat = np.ascontiguousarray(ids, np.int64).reshape(-1)
        if self._places is not None:
            if len(flat) and (flat.min() < 0 or flat.max() >= len(self)):
                raise IndexError(f"{self._where}: index out of range of {len(self)} records")
            flat = self._places[flat].astype(np.int64)
        missing, count = _unchecked(flat, len(self._rows), self._first, self.dtype.itemsize, self._checked)
        if count < 0:
            raise IndexError(f"{self._where}: index out of range of {len(self)} records")
        if count:
            self._check(np.unique(missing[:count]).tolist())
        found = self._rows[flat].reshape(ids.shape)
        return found[()] if ids.ndim == 0 else found

    def __iter__(self) -> Iterator[Any]:
        for at in range(0, len(self), _CHUNK):
            yield from self[at : at + _CHUNK]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype)

    def _run(self, start: int, stop: int) -> NDArray[Any]:
        """Copies of the file's records [start, stop)."""
        size = self.dtype.itemsize
        low, high = (self._first + start * size) // BLOCK_BYTES, -(-(self._first + stop * size) // BLOCK_BYTES)
        if stop > start:
            self._check((low + np.flatnonzero(~self._checked[low:high])).tolist(), ahead=False)
        return np.array(self._rows[start:stop])

    def _check(self, blocks: list[int], *, ahead: bool = True) -> None:
        """Compare blocks with their checksums. Two threads may both do it; the mark is set after it went well."""
        if ahead and len(blocks) > 1:  # why: a cold disk gets all its reads at once, not one after another
            for block in blocks:
                length = min(BLOCK_BYTES, len(self._map) - block * BLOCK_BYTES)
                self._map.madvise(mmap.MADV_WILLNEED, block * BLOCK_BYTES, length)
        for block in blocks:
            at = block * BLOCK_BYTES
            # why not from the map: there an I/O error is a signal that ends the process
            data = retry_local(functools.partial(read_at, self._file.fd, BLOCK_BYTES, at), self._where)
            got, expected = zlib.crc32(data), int(self._crcs[block])
            if got != expected:
                raise self._damaged(f"got CRC-32 {got:08x} at byte {at}, expected {expected:08x}")
            self._checked[block] = True

    def _damaged(self, what: str) -> ResoluteError:
        return ResoluteError(f"{self._where}: changed since prep, {what}; {self.repair}")


def _opened(kind: type[Records], path: Path, crcs: NDArray[np.uint32], dtype: Any, where: str, places: Any) -> Records:
    return kind(path, crcs, dtype, where=where, places=places)


@compiled
def _unchecked(rows: Any, length: Any, first: Any, size: Any, checked: Any) -> Any:
    """The blocks that `rows` need and that are not `checked`, and how many; -1 for a row out of range."""
    missing = np.empty(2 * len(rows), np.int64)
    count = 0
    for row in rows:
        if row < 0 or row >= length:
            return missing, -1
        low = (first + row * size) // BLOCK_BYTES
        high = (first + (row + 1) * size - 1) // BLOCK_BYTES  # a record may lie in two blocks
        if not checked[low]:
            missing[count] = low
            count += 1
        if high != low and not checked[high]:
            missing[count] = high
            count += 1
    return missing, count


def read_checksums(path: Path, sha256: str, where: str) -> NDArray[np.uint32]:
    """The checksums in a file whose own SHA-256 is known.

    Raises `FileNotFoundError`, `StorageError` if it cannot be read, `ResoluteError` if its SHA-256 is another.
    """
    data = retry_local(path.read_bytes, where)
    got = hashlib.sha256(data).hexdigest()
    if got != sha256:
        raise ResoluteError(
            f"{where}: changed since prep, got SHA-256 {got[:12]}…, expected {sha256[:12]}…; {REPAIR}"
        )
    crcs: NDArray[np.uint32] = np.load(io.BytesIO(data), allow_pickle=False)
    return crcs
