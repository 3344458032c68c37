"""How do chunks go through worker processes and come back in order, with flat memory?"""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial

from pipeline.errors import ResoluteError

from .chunk import Chunk, Job, Task

__all__ = ["Pool", "open_pool"]

_PRELOAD = ["prep.worker"]  # why: torch takes seconds to import; the fork server does it once for all


def _start() -> None:
    from .worker import start  # why: imports torch, which the main process can do without

    start()


def _convert(job: Job, task: Task) -> Chunk:
    from .worker import convert

    return convert(job, task)


class Pool:
    """Persistent worker processes; see `open_pool`."""

    def __init__(self, executor: ProcessPoolExecutor, workers: int) -> None:
        self._executor = executor
        self._window = 3 * workers + 2  # chunks in flight: hides a slow one, stays small

    def run(self, job: Job, tasks: Iterable[Task]) -> Iterator[Chunk]:
        """Chunks in the order of `tasks`, which is consumed lazily.

        An error of ours in a worker is raised here as it is; a worker that dies raises `ResoluteError`.
        """
        pending: deque[Future[Chunk]] = deque()
        work = partial(_convert, job)
        try:
            for task in tasks:
                pending.append(self._executor.submit(work, task))
                if len(pending) >= self._window:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool:
            raise ResoluteError(
                "prep: a worker process died, got no result from it, expected one; it may have been out of "
                "memory: try fewer WORKERS (--workers)"
            ) from None


@contextmanager
def open_pool(workers: int) -> Iterator[Pool]:
    """Start `workers` processes; they end with the block, or on their own if this process is killed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    executor = ProcessPoolExecutor(max_workers=workers, mp_context=context, initializer=_start)
    try:
        yield Pool(executor, workers)
    finally:
        executor.shutdown(wait=True, cancel_futures=True)
