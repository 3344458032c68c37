"""How do the bytes of a batch get from the shards to memory ahead of time?

Threads that live as long as the run. Each task reads and checks a few samples in one call that holds no lock
(`pipeline/fetch.py`), from the set's own files or from what a cache holds of a remote set. Where the storage turns out
to be slow and the consumer had to wait for it, there will be four times as many threads, up to a bound: each keeps
one request in flight.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import zlib
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import ResoluteError
from .fetch import CHANGED, FAILED, SHORT, fetch
from .files import OpenFile
from .shards import ShardSet, key_name

__all__ = ["Encoded", "PendingBatch", "Reader"]

Pieces = NDArray[np.uint8] | list[NDArray[np.uint8]]

_TASK_SAMPLES, _LEAST_SAMPLES = 32, 4  # few where storage is slow, or not known yet: each task keeps one request going
_SLOW_S = 0.5e-3  # a read that was blocked for longer waited for more than memory
_TASKS_SEEN = 4

_MOST_PADDING = 4  # times the bytes of a batch that its padded rows may take

Errors = dict[int, ResoluteError]  # by place in the batch


@dataclass(frozen=True)
class _Task:
    """Some samples of a batch: where in the shards, and where in the batch's buffer each goes."""

    split: str
    res: int
    first: int  # place in the batch
    ids: NDArray[np.int64]
    records: NDArray[Any]
    buffer: NDArray[np.uint8]
    starts: NDArray[np.int64]
    future: Future[Errors] = field(default_factory=Future)


@dataclass(frozen=True)
class Encoded:
    """The encoded images of a batch, and why some could not be read, by their place in it.

    `pieces` is one (N, width) uint8 array, each image at the start of its row and nothing of meaning after it (a
    decoder stops where the image ends), or a list of N arrays (nbytes,).
    """

    pieces: Pieces
    errors: Errors


class PendingBatch:
    """The bytes of a batch that is being read."""

    def __init__(self, pieces: Pieces, tasks: list[_Task], reader: Reader) -> None:
        self._pieces, self._tasks, self._reader = pieces, tasks, reader

    def done(self) -> bool:
        return all(task.future.done() for task in self._tasks)

    def result(self) -> Encoded:
        errors: Errors = {}
        for task in self._tasks:
            if not task.future.done():
                self._reader.hurry()
            errors |= task.future.result()
        return Encoded(self._pieces, errors)


class Reader:
    """Reads samples by number. Use as a context manager; `close()` ends its threads and files.

    In memory are the batches that were submitted and not yet taken, each at most four times its bytes.
    """

    def __init__(
        self, shards: ShardSet, *, threads: int = 2, most_threads: int = 64, check_crc: bool = True,
        padded: bool = True,
    ) -> None:  # fmt: skip
        """`padded` batches come in one array where that is not too wasteful: handing it on costs the same for any N."""
        self._shards, self._check_crc, self._most, self._padded = shards, check_crc, most_threads, padded
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._read_s: deque[float] = deque(maxlen=_TASKS_SEEN)  # of one sample, in the tasks that ended last
        none = np.zeros(0, np.int64)  # why: the first call loads it, which takes as long as slow storage
        fetch(none.astype(np.int32), none, none, none, check_crc, np.zeros(0, np.uint8), none)
        self._start(threads)

    @property
    def threads(self) -> int:
        return len(self._threads)

    def submit(self, split: str, res: int, ids: NDArray[np.int64]) -> PendingBatch:
        """Start reading the samples `ids` (N,) of a split, as stored for `res` px.

        Raises `ResoluteError` if the index is damaged; damaged samples are told in the result.
        """
        records = self._shards.splits[split].stored[res][ids]
        sizes = records["nbytes"].astype(np.int64)
        width, total = int(sizes.max()), int(sizes.sum())
        pieces: Pieces
        if self._padded and width * len(ids) <= _MOST_PADDING * total:
            starts = width * np.arange(len(ids))
            pieces = np.empty((len(ids), width), np.uint8)
            buffer = pieces.reshape(-1)
        else:
            starts = np.cumsum(sizes) - sizes
            buffer = np.empty(total, np.uint8)
            pieces = np.split(buffer, starts[1:])
        step = min(_TASK_SAMPLES, max(_LEAST_SAMPLES, len(ids) // self.threads)) if self._fast() else _LEAST_SAMPLES
        tasks = [
            _Task(split, res, i, ids[i : i + step], records[i : i + step], buffer, starts[i : i + step])
            for i in range(0, len(ids), step)
        ]
        for task in tasks:
            self._tasks.put(task)
        return PendingBatch(pieces, tasks, self)

    def hurry(self) -> None:
        """The consumer waits: keep more requests in flight, if it is the storage that takes the time."""
        if self.threads < self._most and len(self._read_s) == _TASKS_SEEN and not self._fast():
            self._start(min(3 * self.threads, self._most - self.threads))

    def _fast(self) -> bool:
        # why the least: a lock blocks some reads, slow storage all
        return bool(self._read_s) and min(self._read_s) < _SLOW_S

    def _start(self, count: int) -> None:
        for _ in range(count):
            thread = threading.Thread(target=self._work, name=f"resolute-read-{self.threads}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        with _Blocked() as blocked:
            while (task := self._tasks.get()) is not None:
                began = blocked.so_far_s()
                try:
                    errors = self._read(task)
                    task.future.set_result({task.first + i: error for i, error in errors.items()})
                except BaseException as error:  # why: it belongs to the consumer, in whose thread it is raised
                    task.future.set_exception(error)
                self._read_s.append((blocked.so_far_s() - began) / len(task.ids))

    def _read(self, task: _Task) -> Errors:
        """Read the samples of a task; what is wrong with some of them, by place in the task."""
        part, records, files = self._shards.splits[task.split], task.records, self._shards.files
        names = {n: self._shards.tar(task.res, part.shards[n]) for n in set(records["shard"].tolist())}
        sizes, offsets = records["nbytes"].astype(np.int64), records["offset"].astype(np.int64)
        handles = np.full(len(records), -1, np.int32)  # why: -1 fails in the read; it is asked for its reason below
        opened, errors = list[OpenFile](), Errors()  # why: what is in here stays open until the reads are done
        shards = records["shard"].tolist()
        for i, (offset, nbytes) in enumerate(zip(offsets.tolist(), sizes.tolist(), strict=True)):
            try:
                place = files.place(names[shards[i]], offset, nbytes)
            except ResoluteError as error:
                errors[i] = error
                continue
            if place is not None:
                opened.append(place[0])
                handles[i], offsets[i] = place[0].fd, place[1]
        crcs = records["crc32"].astype(np.int64)
        became, got = fetch(handles, offsets, sizes, crcs, self._check_crc, task.buffer, task.starts)
        for i in np.flatnonzero(became).tolist():
            if i in errors:
                continue
            name = names[shards[i]]
            if files.remote:
                wrong = self._asked(task, i, name)
            else:
                wrong = self._damaged(task, i, _told(int(became[i]), int(got[i]), records[i], files.where(name)))
            if wrong is not None:
                errors[i] = wrong
        return errors

    def _asked(self, task: _Task, i: int, name: str) -> ResoluteError | None:
        """Read one sample through the set's own way to its files; what is wrong with it."""
        record, start, error = task.records[i], int(task.starts[i]), None
        nbytes = int(record["nbytes"])
        for fresh in (False, True):  # why: what a cache holds may be damaged where the store is not
            try:
                data = self._shards.files.read(name, int(record["offset"]), nbytes, fresh=fresh)
            except ResoluteError as failed:
                return failed
            crc = zlib.crc32(data) if self._check_crc else int(record["crc32"])
            if crc == record["crc32"]:
                task.buffer[start : start + nbytes] = np.frombuffer(data, np.uint8)
                return None
            error = self._damaged(task, i, _told(CHANGED, crc, record, name))
        return error

    def _damaged(self, task: _Task, i: int, what: str) -> ResoluteError:
        part, record = self._shards.splits[task.split], task.records[i]
        key = key_name(int(part.samples[int(task.ids[i])]["key"]))
        where = self._shards.files.where(self._shards.tar(task.res, part.shards[record["shard"]]))
        return ResoluteError(
            f"{where}: sample {key} at offset "
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
        self._shards.files.release()

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


class _Blocked:
    """How long the thread that made it was blocked, neither working nor, where the system tells, waiting for a core.

    why: where cores are what is lacking, more readers make it worse. Source: proc(5), schedstat: the second number.
    """

    def __init__(self) -> None:
        try:
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:
            self._file = -1

    def so_far_s(self) -> float:
        queued_ns = int(os.pread(self._file, 64, 0).split()[1]) if self._file >= 0 else 0
        return time.perf_counter() - time.thread_time() - queued_ns / 1e9

    def __enter__(self) -> _Blocked:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file >= 0:
            os.close(self._file)
