"""`Reader`: reads the encoded images of batches ahead of time, in threads that live as long as the run.

Each task reads and verifies a few samples in one call without the GIL (`pipeline/graph/kernels/pread.py`), from local
files or from the disk cache of a remote set. Samples for which that fails are read again through `Files.read`, which
retries. Bytes that are present but wrong are a `DamagedSample`, an error of that sample; storage that does not deliver
is a `StorageError`, an error of the batch.
"""

from __future__ import annotations

import threading
import zlib
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resolute.errors import DamagedSample, FileEndsEarly, Interrupted, Missing
from resolute.pipeline.dataset.format import key_name, tar_name
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.graph.buffers import BufferPool
from resolute.pipeline.graph.kernels.pread import TAG_BYTES, EncodedImages, fetch
from resolute.pipeline.storage.base import OpenFile
from resolute.pipeline.storage.threads import DaemonPool

__all__ = ["CutShort", "EncodedBatch", "PendingBatch", "Reader"]

# why 64: each has one request in flight, so at 20 ms per sample they read 3 000 images/s, where 16 read 800. In the
# page cache they cost nothing at batch 256, and 2 % of the consumer's time at batch 64 (benchmarks/results/LOG.md)
_THREADS = 64
_TASKS, _MIN_TASK_SAMPLES = 16, 8  # tasks per batch; samples per task at least
_BUFFERS = 8  # free ones kept for padded batches; the default depth has that many in use
_MAX_PADDING = 4  # padded rows may take this many times the bytes of the batch

Errors = dict[int, DamagedSample]  # by place in the batch


class CutShort(DamagedSample):
    """A sample that is not in its tar, `tar`, because that ends too early."""

    def __init__(self, message: str, tar: str) -> None:
        super().__init__(message)
        self.tar = tar


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


@dataclass(frozen=True)
class EncodedBatch:
    """The encoded images of a batch, and the errors of damaged ones by position.

    `images` is either (N, width) uint8, each row an image, arbitrary bytes and its tag, or a list of N arrays, each an
    image and its tag.
    """

    images: EncodedImages
    nbytes: NDArray[np.int64]  # (N,) sizes of the images without what follows
    errors: Errors


class PendingBatch:
    """A batch whose bytes are being read."""

    def __init__(self, images: EncodedImages, nbytes: NDArray[np.int64], reads: list[Future[Errors]]) -> None:
        self._images, self._nbytes, self._reads = images, nbytes, reads

    def done(self) -> bool:
        return all(read.done() for read in self._reads)

    def result(self) -> EncodedBatch:
        """Wait for all reads. Raises `StorageError` if the storage fails."""
        errors: Errors = {}
        for read in self._reads:
            errors |= read.result()
        return EncodedBatch(self._images, self._nbytes, errors)


class Reader:
    """Reads samples by number; `close()` ends its threads and running reads.

    Memory: all batches submitted and not yet taken, each with at most four times its bytes.
    """

    def __init__(
        self,
        shards: ShardSet,
        *,
        threads: int = _THREADS,
        check_crc: bool = True,
        padded: bool = True,
        asks_once: bool = False,
    ) -> None:
        """Start no thread yet.

        padded      return a batch as one array (which DALI takes faster than N) unless that wastes too much memory
        asks_once   the samples behind the end of a tar that is cut short are damaged from then on, without a read
        """
        self.files = shards.files.for_reader()
        self._shards, self._check_crc, self._padded = replace(shards, files=self.files), check_crc, padded
        self._buffers = BufferPool(nbytes=0, count=_BUFFERS)
        self._pool = DaemonPool(threads, name="resolute-read", cancel=self.files.interrupt)
        self._closed = threading.Event()
        self._asks_once = asks_once
        self._ends: dict[str, int] = {}  # of tars that are cut short: bytes that can be read

    def submit(self, split: str, res: int, ids: NDArray[np.int64], *, tag: int = 0) -> PendingBatch:
        """Start reading the samples `ids` (N,) of a split at stored resolution `res`, in px; each image gets `tag`.

        Raises `ResoluteError` if the index is damaged; damaged samples are reported in the result.
        """
        records = self._shards.splits[split].stored[res][ids]
        sizes = records["nbytes"].astype(np.int64)
        slots = sizes + TAG_BYTES
        width, total = int(slots.max()), int(slots.sum())
        images: EncodedImages
        if self._padded and width * len(ids) <= _MAX_PADDING * total:
            starts = width * np.arange(len(ids))
            images = self._buffers.take((len(ids), width), np.uint8)
            buffer, ends = images.reshape(-1), starts + width
        else:
            ends = np.cumsum(slots)
            starts = ends - slots
            buffer = np.empty(total, np.uint8)
            images = np.split(buffer, starts[1:])
        for i, byte in enumerate(tag.to_bytes(TAG_BYTES, "little")):
            buffer[ends - TAG_BYTES + i] = byte
        step = max(_MIN_TASK_SAMPLES, -(-len(ids) // _TASKS))
        tasks = [
            _Task(split, res, i, ids[i : i + step], records[i : i + step], buffer, starts[i : i + step])
            for i in range(0, len(ids), step)
        ]
        reads = [self._pool.submit(partial(self._read, task)) for task in tasks]
        return PendingBatch(images, sizes, reads)

    def _read(self, task: _Task) -> Errors:
        """Read the samples of a task; returns the errors of damaged ones by position in the batch."""
        split, records, files = self._shards.splits[task.split], task.records, self.files
        shards = records["shard"]
        names = {n: tar_name(task.res, split.shards[n]) for n in set(shards.tolist())}
        sizes, offsets = records["nbytes"].astype(np.int64), records["offset"].astype(np.int64)
        errors, opened = Errors(), list[OpenFile]()  # `opened` keeps the files open until the reads are done
        handles = np.full(len(records), -1, np.int32)  # why -1: such reads fail in `fetch` and are repeated below
        for n, name in names.items():
            if self._closed.is_set():
                raise Interrupted(f"{files.root}: the reader was closed, expected it open; open another")
            if self._ends.get(name) == 0:
                continue
            with suppress(Missing, DamagedSample):  # why: `_read_sample` will raise it
                if (file := files.open(name)) is not None:
                    opened.append(file)
                    handles[shards == n] = file.fd
        crcs = records["crc32"].astype(np.int64)
        good = fetch(handles, offsets, sizes, crcs, self._check_crc, task.buffer, task.starts)
        for i in np.flatnonzero(~good).tolist():
            try:
                self._read_sample(task, i, names[int(shards[i])])
            except DamagedSample as error:
                errors[task.first + i] = error
        return errors

    def _read_sample(self, task: _Task, i: int, name: str) -> None:
        """Read a sample that `fetch` could not read, first normally, then bypassing caches and open files.

        Raises `DamagedSample` if the sample is damaged in the set that was opened, `StorageError` if the storage fails
        or the set was replaced.
        """
        record, start = task.records[i], int(task.starts[i])
        offset, nbytes, expected = int(record["offset"]), int(record["nbytes"]), int(record["crc32"])
        reason, end = "", self._ends.get(name)
        if end is not None and offset + nbytes > end:
            raise self._damaged(task, i, name, f"its tar ends after {end} bytes", is_cut=True)
        for fresh in (False, True):  # why: the cached copy may be damaged, not the store's
            try:
                data = self.files.read(name, offset, nbytes, fresh=fresh)
            except Missing:
                self._shards.check_unchanged()
                raise
            except FileEndsEarly as error:
                reason, end = f"got {error.got_bytes} bytes, expected {nbytes}", error.readable_bytes
                continue
            end = None
            if not self._check_crc or (crc := zlib.crc32(data)) == expected:
                task.buffer[start : start + nbytes] = np.frombuffer(data, np.uint8)
                return
            reason = f"got CRC-32 {crc:08x}, expected {expected:08x}"
        self._shards.check_unchanged()
        if end is not None and self._asks_once:
            self._ends[name] = min(end, self._ends.get(name, end))
        raise self._damaged(task, i, name, reason, is_cut=end is not None)

    def _damaged(self, task: _Task, i: int, name: str, reason: str, *, is_cut: bool) -> DamagedSample:
        key = key_name(int(self._shards.splits[task.split].samples[int(task.ids[i])]["key"]))
        message = (
            f"{self.files.where(name)}: sample {key} at offset {task.records[i]['offset']} is damaged, {reason}; "
            f"{self._shards.repair}"
        )
        return CutShort(message, name) if is_cut else DamagedSample(message)

    def close(self) -> None:
        """End the threads within 2 s: running reads are interrupted, waiting ones dropped."""
        self._closed.set()
        self._pool.close()
        self.files.interrupt()  # why again: also ends prefetches, even if no thread was left
        self.files.release()
