"""How do the bytes of a batch get from the shards to memory ahead of time?

Threads that live as long as the run; each task reads a few samples with one positioned read each and checks
their CRC-32. Reads and checksums release the GIL, so that the threads run beside the training loop.
"""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import ResoluteError
from .shards import ShardSet, key_name

__all__ = ["PendingBatch", "Reader"]

_TASK_SAMPLES = 32  # reads a task does one after another
_OPEN_FILES = 256  # well under the usual limit of 1024 a process


class _File:
    """An open file that closes with its last reference, also when a thread still reads while it is evicted."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)


class PendingBatch:
    """The bytes of a batch that is being read."""

    def __init__(self, parts: list[Future[list[NDArray[np.uint8]]]]) -> None:
        self._parts = parts

    def done(self) -> bool:
        return all(part.done() for part in self._parts)

    def result(self) -> list[NDArray[np.uint8]]:
        """Encoded images, one (nbytes,) uint8 array a sample. Raises `ResoluteError` for a damaged one."""
        return [jpeg for part in self._parts for jpeg in part.result()]


class Reader:
    """Reads samples by number. Use as a context manager; `close()` ends its threads and files."""

    def __init__(self, shards: ShardSet, *, threads: int = 4, check_crc: bool = True) -> None:
        self._shards, self._check_crc = shards, check_crc
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="resolute-read")
        self._open: Callable[[Path], _File] = functools.lru_cache(_OPEN_FILES)(_File)

    def submit(self, split: str, res: int, ids: NDArray[np.int64]) -> PendingBatch:
        """Start reading the samples `ids` (N,) of a split, as stored for `res` px."""
        parts = [ids[i : i + _TASK_SAMPLES] for i in range(0, len(ids), _TASK_SAMPLES)]
        return PendingBatch([self._pool.submit(self._read, split, res, part) for part in parts])

    def _read(self, split: str, res: int, ids: NDArray[np.int64]) -> list[NDArray[np.uint8]]:
        records = self._shards.splits[split].stored[res][ids]
        return [self._sample(split, res, int(i), record) for i, record in zip(ids, records, strict=True)]

    def _sample(self, split: str, res: int, sample: int, record: Any) -> NDArray[np.uint8]:
        part = self._shards.splits[split]
        path = self._shards.path(res, part.shards[record["shard"]])
        offset, nbytes = int(record["offset"]), int(record["nbytes"])
        try:
            file = self._open(path)  # why: the name keeps it open until the read is done
            data = os.pread(file.fd, nbytes, offset)
        except OSError as error:
            raise self._damaged(path, part, sample, offset, error.strerror or str(error)) from None
        if len(data) != nbytes:
            raise self._damaged(path, part, sample, offset, f"got {len(data)} bytes, expected {nbytes}")
        if self._check_crc and zlib.crc32(data) != record["crc32"]:
            got = f"got CRC-32 {zlib.crc32(data):08x}, expected {record['crc32']:08x}"
            raise self._damaged(path, part, sample, offset, got)
        return np.frombuffer(data, np.uint8)

    @staticmethod
    def _damaged(path: Path, part: Any, sample: int, offset: int, what: str) -> ResoluteError:
        key = key_name(int(part.samples["key"][sample]))
        return ResoluteError(
            f"{path}: sample {key} at offset {offset} is damaged, {what}; "
            "run `make verify`, then `make shards` again: it repairs the set"
        )

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._open.cache_clear()  # type: ignore[attr-defined]  # an lru_cache

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
