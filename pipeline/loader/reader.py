"""`Reader`: reads the encoded images of batches ahead of time, in threads that live as long as the run.

Each task reads and verifies a few samples in one call without the GIL (`pipeline/graph/kernels/pread.py`), from local
files or from the disk cache of a remote set. Samples for which that fails are read again through `Files.read`, which
retries. Bytes that are present but wrong are a `DamagedSample`, an error of that sample; storage that does not deliver
is a `StorageError`, an error of the batch. If the consumer has to wait for slow storage, the number of threads is
quadrupled, up to a maximum; each thread keeps one request in flight.
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
from pipeline.graph.kernels.pread import EncodedImages, fetch
from pipeline.storage.base import OpenFile
from pipeline.storage.threads import end_threads

__all__ = ["EncodedBatch", "PendingBatch", "Reader"]

_TASK_SAMPLES, _MIN_TASK_SAMPLES = 32, 4  # samples per task; the minimum while storage is slow or not yet measured
_SLOW_S = 0.5e-3  # blocked time per sample above which the data did not come from memory
_TASKS_SEEN = 4  # tasks that decide whether the storage is slow

_INTERRUPTIONS = 100  # more than a closing reader causes
_MAX_PADDING = 4  # padded rows may take this many times the bytes of the batch

Errors = dict[int, DamagedSample]  # by place in the batch


@dataclass(frozen=True)
class _Task:
    """Some samples of a batch: where they are stored, and where they go in the batch's buffer."""

    split: str
    res: int
    first: int  # position of the first in the batch
    ids: NDArray[np.int64]
    records: NDArray[Any]
    buffer: NDArray[np.uint8]
    starts: NDArray[np.int64]
    future: Future[Errors] = field(default_factory=Future)


@dataclass(frozen=True)
class EncodedBatch:
    """The encoded images of a batch, and the errors of damaged ones by position.

    `images` is either (N, width) uint8, each row an image followed by arbitrary bytes (decoders stop at the end of the
    image), or a list of N arrays (nbytes,).
    """

    images: EncodedImages
    errors: Errors


class PendingBatch:
    """A batch whose bytes are being read."""

    def __init__(self, images: EncodedImages, tasks: list[_Task], reader: Reader) -> None:
        self._images, self._tasks, self._reader = images, tasks, reader

    def done(self) -> bool:
        return all(task.future.done() for task in self._tasks)

    def result(self) -> EncodedBatch:
        """Wait for all reads. Raises `StorageError` if the storage fails."""
        errors: Errors = {}
        for task in self._tasks:
            if not task.future.done():
                self._reader.add_readers()
            errors |= task.future.result()
        return EncodedBatch(self._images, errors)


class Reader:
    """Reads samples by number. Use as a context manager; `close()` ends its threads and running reads.

    Memory: all batches submitted and not yet taken, each with at most four times its bytes.
    """

    def __init__(
        self, shards: ShardSet, *, threads: int = 2, max_threads: int = 64, check_crc: bool = True,
        padded: bool = True,
    ) -> None:  # fmt: skip
        """`padded`: return a batch as one array (which DALI takes faster than N) unless that wastes too much memory."""
        self._shards, self._check_crc, self._max_threads, self._padded = shards, check_crc, max_threads, padded
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self._read_s: deque[float] = deque(maxlen=_TASKS_SEEN)  # per sample, of the last tasks
        empty = np.zeros(0, np.int64)  # why: the first call loads machine code, which would look like slow storage
        fetch(empty.astype(np.int32), empty, empty, empty, check_crc, np.zeros(0, np.uint8), empty)
        self._start(threads)

    @property
    def threads(self) -> int:
        return len(self._threads)

    def submit(self, split: str, res: int, ids: NDArray[np.int64]) -> PendingBatch:
        """Start reading the samples `ids` (N,) of a split at stored resolution `res`, in px.

        Raises `ResoluteError` if the index is damaged; damaged samples are reported in the result.
        """
        records = self._shards.splits[split].stored[res][ids]
        sizes = records["nbytes"].astype(np.int64)
        width, total = int(sizes.max()), int(sizes.sum())
        images: EncodedImages
        if self._padded and width * len(ids) <= _MAX_PADDING * total:
            starts = width * np.arange(len(ids))
            images = np.empty((len(ids), width), np.uint8)
            buffer = images.reshape(-1)
        else:
            starts = np.cumsum(sizes) - sizes
            buffer = np.empty(total, np.uint8)
            images = np.split(buffer, starts[1:])
        step = _MIN_TASK_SAMPLES
        if self._fast():
            step = min(_TASK_SAMPLES, max(step, len(ids) // self.threads))
        tasks = [
            _Task(split, res, i, ids[i : i + step], records[i : i + step], buffer, starts[i : i + step])
            for i in range(0, len(ids), step)
        ]
        for task in tasks:
            self._tasks.put(task)
        return PendingBatch(images, tasks, self)

    def add_readers(self) -> None:
        """Add reader threads, up to `max_threads`, if the last four tasks were blocked on I/O.

        Called from the consumer's thread when it has to wait.
        """
        if self.threads < self._max_threads and len(self._read_s) == _TASKS_SEEN and not self._fast():
            self._start(min(3 * self.threads, self._max_threads - self.threads))

    def _fast(self) -> bool:
        # why the minimum: a lock delays some reads, slow storage all of them
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
                    errors = self._read_uninterrupted(task)
                    task.future.set_result({task.first + i: error for i, error in errors.items()})
                except BaseException as error:  # re-raised in the consumer's thread
                    task.future.set_exception(error)
                self._read_s.append((blocked.so_far_s() - began) / len(task.ids))

    def _read_uninterrupted(self, task: _Task) -> Errors:
        """`_read`, repeated if closing another reader of the same files interrupted it."""
        for _ in range(_INTERRUPTIONS):
            try:
                return self._read(task)
            except Interrupted:
                if self._closed.is_set():
                    raise
        return self._read(task)  # why not for ever: the files may be closed

    def _read(self, task: _Task) -> Errors:
        """Read the samples of a task; returns the errors of damaged ones by position in the task."""
        split, records, files = self._shards.splits[task.split], task.records, self._shards.files
        names = {n: self._shards.tar(task.res, split.shards[n]) for n in set(records["shard"].tolist())}
        sizes, offsets = records["nbytes"].astype(np.int64), records["offset"].astype(np.int64)
        handles = np.full(len(records), -1, np.int32)  # why -1: such reads fail in `fetch` and are repeated below
        opened, errors = list[OpenFile](), Errors()  # `opened` keeps the files open until the reads are done
        shards = records["shard"].tolist()
        for i, (offset, nbytes) in enumerate(zip(offsets.tolist(), sizes.tolist(), strict=True)):
            if self._closed.is_set():
                raise Interrupted(f"{files.root}: the reader was closed, expected it open; open another")
            with suppress(Missing, DamagedSample):  # why: `_read_sample` will raise it
                location = files.locate(names[shards[i]], offset, nbytes)
                if location is not None:
                    opened.append(location[0])
                    handles[i], offsets[i] = location[0].fd, location[1]
        crcs = records["crc32"].astype(np.int64)
        good = fetch(handles, offsets, sizes, crcs, self._check_crc, task.buffer, task.starts)
        for i in np.flatnonzero(~good).tolist():
            try:
                self._read_sample(task, i, names[shards[i]])
            except DamagedSample as error:
                errors[i] = error
        return errors

    def _read_sample(self, task: _Task, i: int, name: str) -> None:
        """Read a sample that `fetch` could not read, first normally, then bypassing caches and open files.

        Raises `DamagedSample` if the sample is damaged in the set that was opened, `StorageError` if the storage fails
        or the set was replaced.
        """
        record, start = task.records[i], int(task.starts[i])
        nbytes, expected, reason = int(record["nbytes"]), int(record["crc32"]), ""
        for fresh in (False, True):  # why: the cached copy may be damaged, not the store's
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
        """End the threads within 2 s: running reads are interrupted, waiting ones dropped."""
        self._closed.set()
        with suppress(queue.Empty):
            while True:
                self._tasks.get_nowait()
        for _ in self._threads:
            self._tasks.put(None)
        end_threads(self._threads, self._shards.files.interrupt)
        self._shards.files.interrupt()  # why again: also ends prefetches, even if no thread was left
        self._threads.clear()
        self._shards.files.release()

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Blocked:
    """Measures how long the creating thread was blocked: neither running nor (on Linux) waiting for a CPU core.

    why without waits for a core: if cores are scarce, more reader threads make it worse. Source: proc(5), schedstat:
    the second number.
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
