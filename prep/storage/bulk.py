"""Reads and deletes thousands of small files of a store, with many requests in flight and bounded memory.

A request to an object store takes about 1 ms of CPU time, much of it in one thread, which limits a process to about a
thousand requests per second whatever the latency. Thousands of objects are therefore read by several processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial

from resolute.errors import ResoluteError
from resolute.fork_server import fork_server
from resolute.machine import available_cpus
from resolute.prep.storage.child import init_child
from resolute.prep.storage.thread_map import thread_map

from .output import OutputBucket, Store, read_present

__all__ = ["REQUESTS", "read_many", "remove_many"]

REQUESTS = 64  # in flight
_MEMORY_BYTES = 256 << 20  # of all files that are being read
_MANY = 4096  # fewer objects are read by threads alone: it takes a second to start processes
_MIN_PROCESSES, _PROCESSES = 3, 8  # why 3: on two CPUs two processes were no faster than the threads of one
_CHUNK_BYTES, _CHUNK_FILES = 8 << 20, 256  # what a process reads at a time
_DELETED_AT_ONCE = 1000  # the most that a request to S3 deletes


def read_many(store: Store, names: Sequence[str], *, nbytes: int = 0) -> Iterator[bytes]:
    """`read_present` of each name, in order. `nbytes` is the size of the largest file, 0 if all are small.

    Raises the first error.
    """
    threads = max(4, min(REQUESTS, _MEMORY_BYTES // max(1, nbytes)))
    processes = min(_PROCESSES, available_cpus())
    if len(names) < _MANY or processes < _MIN_PROCESSES or not isinstance(store, OutputBucket) or store.is_private:
        yield from thread_map(partial(read_present, store), names, threads)
        return
    step = max(1, min(_CHUNK_FILES, _CHUNK_BYTES // max(1, nbytes)))
    chunks = (names[i : i + step] for i in range(0, len(names), step))
    context = fork_server()
    # why the environment: the fork server has that of its own start; credentials may have been set since
    environ = dict(os.environ)
    with ProcessPoolExecutor(processes, mp_context=context, initializer=init_child, initargs=(environ,)) as pool:

        def read_chunk(chunk: Sequence[str]) -> list[bytes]:
            return pool.submit(_read_chunk, store, chunk, max(1, threads // processes)).result()

        try:
            for part in thread_map(read_chunk, chunks, 2 * processes):
                yield from part
        except BrokenProcessPool:
            raise ResoluteError(
                f"{store.where}: a process that read its files died, expected it to finish; run the same command again "
                "on a machine with more free memory"
            ) from None


def _read_chunk(store: Store, names: Sequence[str], threads: int) -> list[bytes]:
    return list(thread_map(partial(read_present, store), names, threads))


def remove_many(store: Store, names: Sequence[str]) -> None:
    """Delete files, those that are missing included."""
    chunks = (names[i : i + _DELETED_AT_ONCE] for i in range(0, len(names), _DELETED_AT_ONCE))
    for _ in thread_map(store.remove_all, chunks, 8):
        pass
