"""Reads the encoded images of batches ahead of time, in threads that live as long as the run.

Each task reads and checks a few samples in one call that holds no lock (`pipeline/graph/kernels/pread.py`), from the
set's own files or from what a cache holds of a remote set. What is not read whole by that call is read again through
`Files.read`, which retries. Bytes that are there and still wrong are a `DamagedSample`, one sample's own error; storage
that does not deliver is a `StorageError`, the whole batch's. Where the storage turns out to be slow and the consumer had to wait
for it, there will be four times as many threads, up to a bound: each keeps one request in flight.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import zlib
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.shard_set import ShardSet, key_name
from pipeline.errors import DamagedSample, FileEndsEarly, Interrupted, Missing
from pipeline.graph.kernels.pread import Pieces, fetch
from pipeline.storage.files import OpenFile, end_threads

__all__ = ["Encoded", "PendingBatch", "Reader"]


_TASK_SAMPLES, _LEAST_SAMPLES = 32, 4  # few where storage is slow, or not known yet: each task keeps one request going
_SLOW_S = 0.5e-3  # a read that was blocked for longer waited for more than memory
_TASKS_SEEN = 4

_INTERRUPTIONS = 100  # more than one closing reader makes
_MOST_PADDING = 4  # times the bytes of a batch that its padded rows may take

Errors = dict[int, DamagedSample]  # by place in the batch


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
    """The encoded images of a batch, and which of them are damaged, by their place in it.

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
        """Wait for all of them. Raises `StorageError` if the storage does not deliver."""
        errors: Errors = {}
        for task in self._tasks:
            if not task.future.done():
                self._reader.add_readers()
            errors |= task.future.result()
        return Encoded(self._pieces, errors)


class Reader:
    """Reads samples by number. Use as a context manager; `close()` ends its threads and the reads under way.

    In memory are the batches that were submitted and not yet taken, each at most four times its bytes.
    """

    def __init__(
        self, shards: ShardSet, *, threads: int = 2, max_threads: int = 64, check_crc: bool = True,
        padded: bool = True,
    ) -> None:  # fmt: skip
        """`padded` batches come in one array where that is not too wasteful: handing it on costs the same for any N."""
        self._shards, self._check_crc, self._most, self._padded = shards, check_crc, max_threads, padded
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._closed = threading.Event()
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

        Raises `ResoluteError` if the index is damaged; damaged samples are in the result.
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

    def add_readers(self) -> None:
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
                    errors = self._read_again(task)
                    task.future.set_result({task.first + i: error for i, error in errors.items()})
                except BaseException as error:  # why: it belongs to the consumer, in whose thread it is raised
                    task.future.set_exception(error)
                self._read_s.append((blocked.so_far_s() - began) / len(task.ids))

    def _read_again(self, task: _Task) -> Errors:
        """`_read`, again where another reader of the same files was closed meanwhile, which interrupts all."""
        for _ in range(_INTERRUPTIONS):
            try:
                return self._read(task)
            except Interrupted:
                if self._closed.is_set():
                    raise
        return self._read(task)  # why not for ever: the files may have been closed

    def _read(self, task: _Task) -> Errors:
        """Read the samples of a task; those that are damaged, by place in the task."""
        part, records, files = self._shards.splits[task.split], task.records, self._shards.files
        names = {n: self._shards.tar(task.res, part.shards[n]) for n in set(records["shard"].tolist())}
        sizes, offsets = records["nbytes"].astype(np.int64), records["offset"].astype(np.int64)
        handles = np.full(len(records), -1, np.int32)  # why: -1 fails in the call, and is read again below
        opened, errors = list[OpenFile](), Errors()  # why: what is in here stays open until the reads are done
        shards = records["shard"].tolist()
        for i, (offset, nbytes) in enumerate(zip(offsets.tolist(), sizes.tolist(), strict=True)):
            if self._closed.is_set():
                raise Interrupted(f"{files.root}: the reader was closed, expected it open; open another")
            with suppress(Missing, DamagedSample):  # why: `_read_one` meets it again
                place = files.locate(names[shards[i]], offset, nbytes)
                if place is not None:
                    opened.append(place[0])
                    handles[i], offsets[i] = place[0].fd, place[1]
        crcs = records["crc32"].astype(np.int64)
        became, _ = fetch(handles, offsets, sizes, crcs, self._check_crc, task.buffer, task.starts)
        for i in np.flatnonzero(became).tolist():
            try:
                self._read_one(task, i, names[shards[i]])
            except DamagedSample as error:
                errors[i] = error
        return errors

    def _read_one(self, task: _Task, i: int, name: str) -> None:
        """Read a sample that was not read whole, first as before and then past caches and open files.

        Raises `DamagedSample` if the set is the one that was opened and the sample is damaged in it, else
        `StorageError`.
        """
        record, start = task.records[i], int(task.starts[i])
        nbytes, expected, reason = int(record["nbytes"]), int(record["crc32"]), ""
        for fresh in (False, True):  # why: what a cache holds may be damaged where the store is not
            try:
                data = self._shards.files.read(name, int(record["offset"]), nbytes, fresh=fresh)
            except Missing:
                self._shards.check_unchanged(name)
                raise
            except FileEndsEarly as error:
                reason = f"got {error.got_bytes} bytes, expected {nbytes}"
                continue
            if not self._check_crc or (crc := zlib.crc32(data)) == expected:
                task.buffer[start : start + nbytes] = np.frombuffer(data, np.uint8)
                return
            reason = f"got CRC-32 {crc:08x}, expected {expected:08x}"
        self._shards.check_unchanged(name)
        key = key_name(int(self._shards.splits[task.split].samples[int(task.ids[i])]["key"]))
        raise DamagedSample(
            f"{self._shards.files.where(name)}: sample {key} at offset {record['offset']} is damaged, {reason}; "
            f"{self._shards.repair}"
        )

    def close(self) -> None:
        """End the threads in at most 2 s: reads under way are interrupted, what has not begun is dropped."""
        self._closed.set()
        with suppress(queue.Empty):
            while True:
                self._tasks.get_nowait()
        for _ in self._threads:
            self._tasks.put(None)
        end_threads(self._threads, self._shards.files.interrupt)
        self._shards.files.interrupt()  # why also without threads: hints of this run's next batches end with it
        self._threads.clear()
        self._shards.files.release()

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


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
