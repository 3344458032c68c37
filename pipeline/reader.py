"""How do the bytes of a batch get from the shards to memory ahead of time?

Threads that live as long as the run. Each task reads and checks a few samples of a folder in one call that holds no
lock (`pipeline/fetch.py`); a remote set's come through its cache. Where the storage turns out to be slow and the
consumer had to wait for it, there will be twice as many threads, up to a bound: each keeps one request in flight.
"""

from __future__ import annotations

import functools
import itertools
import os
import queue
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import ResoluteError
from .fetch import CHANGED, FAILED, SHORT, fetch
from .files import OpenFile
from .shards import ShardSet, Split, key_name

__all__ = ["PendingBatch", "Reader", "Sample"]

Sample = NDArray[np.uint8] | ResoluteError  # an encoded image, (nbytes,), or why it could not be read

_TASK_SAMPLES = 32  # at most; fewer where there are many threads
_OPEN_FILES = 256  # well under the usual limit of 1024 a process
_SLOW_S = 0.5e-3  # a read above this waited for more than memory

_Task = tuple["Future[list[Sample]]", str, int, NDArray[np.int64]]


class PendingBatch:
    """The bytes of a batch that is being read."""

    def __init__(self, parts: list[Future[list[Sample]]], reader: Reader) -> None:
        self._parts, self._reader = parts, reader

    def done(self) -> bool:
        return all(part.done() for part in self._parts)

    def result(self) -> list[Sample]:
        """Encoded images, one a sample; in the place of a damaged one the error that names it.

        Raises `ResoluteError` if the index itself is damaged.
        """
        if not self.done():
            self._reader.hurry()
        return list(itertools.chain.from_iterable(part.result() for part in self._parts))


class Reader:
    """Reads samples by number. Use as a context manager; `close()` ends its threads and files.

    In memory are the batches that were submitted and not yet taken, and nothing else.
    """

    def __init__(
        self, shards: ShardSet, *, threads: int = 4, most_threads: int = 64, check_crc: bool = True
    ) -> None:
        self._shards, self._check_crc, self._most = shards, check_crc, most_threads
        self._open: Callable[[str], OpenFile] = functools.lru_cache(_OPEN_FILES)(OpenFile)
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._read_s = 0.0  # of one sample, in the task that ended last
        self._start(threads)

    @property
    def threads(self) -> int:
        return len(self._threads)

    def submit(self, split: str, res: int, ids: NDArray[np.int64]) -> PendingBatch:
        """Start reading the samples `ids` (N,) of a split, as stored for `res` px."""
        size = max(4, min(_TASK_SAMPLES, len(ids) // self.threads))
        parts: list[Future[list[Sample]]] = []
        for i in range(0, len(ids), size):
            parts.append(Future())
            self._tasks.put((parts[-1], split, res, ids[i : i + size]))
        return PendingBatch(parts, self)

    def hurry(self) -> None:
        """The consumer waits: keep more requests in flight, if it is the storage that takes the time."""
        if self._read_s > _SLOW_S and self.threads < self._most:
            self._start(min(self.threads, self._most - self.threads))

    def _start(self, count: int) -> None:
        for _ in range(count):
            thread = threading.Thread(target=self._work, name=f"resolute-read-{self.threads}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, split, res, ids = task
            began = time.perf_counter()
            try:
                future.set_result(self._read(split, res, ids))
            except BaseException as error:  # why: it belongs to the consumer, in whose thread it is raised
                future.set_exception(error)
            self._read_s = (time.perf_counter() - began) / len(ids)

    def _read(self, split: str, res: int, ids: NDArray[np.int64]) -> list[Sample]:
        part = self._shards.splits[split]
        records = part.stored[res][ids]
        if self._shards.files.remote:
            return [self._remote(part, res, *each) for each in zip(ids.tolist(), records, strict=True)]
        where, tar = self._shards.files.where, self._shards.tar
        names = {n: where(tar(res, part.shards[n])) for n in set(records["shard"].tolist())}
        opened: dict[int, OpenFile | None] = {}  # why: what is in here stays open until the reads are done
        for number, name in names.items():
            try:
                opened[number] = self._open(name)
            except OSError:
                opened[number] = None  # why: -1 fails in the read, and its reason is asked for there
        files = np.array([-1 if (file := opened[n]) is None else file.fd for n in records["shard"].tolist()], np.int32)
        sizes = records["nbytes"].astype(np.int64)
        offsets, crcs = records["offset"].astype(np.int64), records["crc32"].astype(np.int64)
        buffer = np.empty(sizes.sum(), np.uint8)
        became, got = fetch(files, offsets, sizes, crcs, self._check_crc, buffer)
        ends = np.cumsum(sizes).tolist()
        out: list[Sample] = [buffer[end - size : end] for end, size in zip(ends, sizes.tolist(), strict=True)]
        for i in np.flatnonzero(became).tolist():
            what = _told(int(became[i]), int(got[i]), records[i], names[int(records["shard"][i])])
            out[i] = self._damaged(part, res, int(ids[i]), records[i], what)
        return out

    def _remote(self, part: Split, res: int, sample: int, record: Any) -> Sample:
        name = self._shards.tar(res, part.shards[record["shard"]])
        for fresh in (False, True):  # why: what a cache holds may be damaged where the store is not
            try:
                data = self._shards.files.read(name, int(record["offset"]), int(record["nbytes"]), fresh=fresh)
            except ResoluteError as error:
                return error
            crc = zlib.crc32(data) if self._check_crc else int(record["crc32"])
            if crc == record["crc32"]:
                return np.frombuffer(data, np.uint8)
        return self._damaged(part, res, sample, record, _told(CHANGED, crc, record, name))

    def _damaged(self, part: Split, res: int, sample: int, record: Any, what: str) -> ResoluteError:
        key = key_name(int(part.samples[sample]["key"]))
        return ResoluteError(
            f"{self._shards.files.where(self._shards.tar(res, part.shards[record['shard']]))}: sample {key} at offset "
            f"{record['offset']} is damaged, {what}; {self._shards.repair}"
        )

    def close(self) -> None:
        while not self._tasks.empty():
            try:
                self._tasks.get_nowait()
            except queue.Empty:  # a thread was faster
                break
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        self._open.cache_clear()  # type: ignore[attr-defined]  # an lru_cache

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _told(became: int, got: int, record: Any, name: str) -> str:
    if became == CHANGED:
        return f"got CRC-32 {got:08x}, expected {record['crc32']:08x}"
    if became == SHORT:
        return f"got {got} bytes, expected {record['nbytes']}"
    assert became == FAILED
    try:
        fd = os.open(name, os.O_RDONLY)
        try:
            os.pread(fd, int(record["nbytes"]), int(record["offset"]))
        finally:
            os.close(fd)
    except OSError as error:
        return f"got '{error.strerror or error}', expected {record['nbytes']} bytes"
    return f"got a failed read, expected {record['nbytes']} bytes"
