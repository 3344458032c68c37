"""What does a worker process do? Chunks of paths in, ready-made pieces of tar out."""

from __future__ import annotations

import errno
import os
import signal
import threading
import zlib
from collections.abc import Sequence
from multiprocessing import parent_process
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.shards import SAMPLE, STORED, key_name

from .chunk import Chunk, Job, Task
from .decode import Reject, decode
from .resize import jpegs, one_thread
from .tar import BLOCK_BYTES, member

__all__ = ["convert", "read", "start"]

# A file that the system cannot give us is its own fault; any other error (memory, descriptors) is ours.
_UNREADABLE = frozenset(
    {errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.EIO, errno.ELOOP, errno.ENAMETOOLONG}
)


def start() -> None:
    """Set up a worker process: one thread, deaf to Ctrl-C (the parent ends it), gone when the parent is."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    one_thread()
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)  # why: nobody is left to read results; the pool's own queue would wait for ever


def read(path: str) -> bytes:
    """A file's bytes. Raises `Reject` if the file is the problem."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123  # why: half of Path's overhead, per image
            return file.read()
    except OSError as error:
        if error.errno in _UNREADABLE:
            raise Reject(f"unreadable: {error.strerror}") from None
        raise


def convert(job: Job, task: Task) -> Chunk:
    """Read, decode, resize, encode and wrap up one chunk. Only `Reject` is caught."""
    tars: list[list[bytes]] = [[] for _ in job.short_sides]
    sizes = [0] * len(job.short_sides)
    samples: list[tuple[int, int]] = []
    stored: list[list[tuple[int, ...]]] = [[] for _ in job.short_sides]
    rejects: list[tuple[int, str]] = []
    for i, (path, label) in enumerate(zip(task.paths, task.labels, strict=True)):
        key = task.first_key + i
        try:
            pixels = decode(read(path))
        except Reject as reject:
            rejects.append((key, str(reject)))
            continue
        name = key_name(key)
        label_member = member(f"{name}.cls", b"%0*d" % (job.label_digits, label))
        samples.append((key, label))
        for r, (jpeg, width, height) in enumerate(jpegs(pixels, job.short_sides, job.quality)):
            jpeg_member = member(f"{name}.jpg", jpeg)
            stored[r].append((sizes[r] + BLOCK_BYTES, len(jpeg), zlib.crc32(jpeg), 0, width, height))
            tars[r] += (jpeg_member, label_member)
            sizes[r] += len(jpeg_member) + len(label_member)
    return Chunk(
        tars=tuple(b"".join(parts) for parts in tars),
        samples=_records(samples, SAMPLE),
        stored=tuple(_records(rows, STORED) for rows in stored),
        rejects=tuple(rejects),
    )


def _records(rows: Sequence[tuple[int, ...]], dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.array(rows, dtype=dtype)
