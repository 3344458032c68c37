"""How do chunks go through worker processes and come back in order, even if one dies or hangs?"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from time import monotonic
from typing import Any

from pipeline.errors import ResoluteError

from .chunk import Chunk, Job, Task

__all__ = ["HANG_S", "Pool", "open_pool", "start_fork_server"]

_PRELOAD = ["prep.worker"]
HANG_S = 120.0  # one image; the largest we accept takes some ten seconds
_AHEAD = 2  # tasks a worker has at a time: the next is there when one is done
_MAX_BARREN = 3  # workers that die before they touch an image: it is not an image's fault

Serve = Callable[[Connection, Any], None]


class _Worker:
    """A process, its connection, and what it has been given."""

    def __init__(self, context: Any, serve: Serve) -> None:
        self.conn, theirs = context.Pipe()
        self.current = context.RawValue("q", -1)
        self.given: deque[tuple[int, Task]] = deque()
        self.watch = ((-1, -1), monotonic())  # task and image, since when
        self.hung = False
        args = (serve, theirs, self.current, dict(os.environ))
        self.process = context.Process(target=_begin, args=args, daemon=True)
        self.process.start()
        theirs.close()

    def give(self, job: Job, number: int, task: Task) -> None:
        self.given.append((number, task))
        with suppress(OSError):  # why: if it has died, its connection says so when it is read
            self.conn.send((job, task))

    def end(self) -> None:
        self.conn.close()
        self.process.kill()  # why: nothing of what it still works on is wanted
        self.process.join()


def _begin(serve: Serve, conn: Connection, current: Any, environ: Mapping[str, str]) -> None:
    # why: the fork server keeps the environment of its own start; credentials may have come since
    os.environ.update(environ)
    serve(conn, current)


def _serve(conn: Connection, current: Any) -> None:
    from .worker import serve  # why: the main process can do without what it imports

    serve(conn, current)


class Pool:
    """Persistent worker processes; see `open_pool`."""

    def __init__(
        self,
        workers: int,
        method: str = "forkserver",
        serve: Serve = _serve,
        hang_s: float = HANG_S,
    ) -> None:
        self._context: Any = multiprocessing.get_context(method)
        if method == "forkserver":  # why: the fork server imports it, and compiles its kernel, once for all
            self._context.set_forkserver_preload(_PRELOAD)
        self._serve = serve
        self._hang_s = hang_s
        self._window = 4 * workers + 16  # chunks on the way: hides a slow one, stays small
        self._workers = [_Worker(self._context, self._serve) for _ in range(workers)]
        self._strikes: Counter[tuple[int, int]] = Counter()  # by task and position
        self._barren = 0

    def run(self, job: Job, tasks: Iterable[Task]) -> Iterator[Chunk]:
        """Chunks in the order of `tasks`, which is consumed lazily.

        An image at which a worker dies twice, or stays longer than `hang_s`, is rejected; everything else in
        its chunk is done again. An error of ours in a worker is raised here as it is. Raises `ResoluteError`
        if workers die without an image to blame.
        """
        source = enumerate(tasks)
        self._strikes.clear()
        for i, worker in enumerate(self._workers):
            if worker.given:  # why: an earlier run was given up, and would answer this one
                worker.end()
                self._workers[i] = _Worker(self._context, self._serve)
        again: deque[tuple[int, Task]] = deque()  # of workers that died
        done: dict[int, Chunk] = {}
        first = given = 0  # the next to yield, the next new one
        more = True
        while True:
            while True:
                worker = min(self._workers, key=lambda one: len(one.given))
                if len(worker.given) >= _AHEAD:
                    break
                if again:
                    worker.give(job, *again.popleft())
                elif more and given - first < self._window:
                    item = next(source, None)
                    if item is None:
                        more = False
                        continue
                    given += 1
                    worker.give(job, *item)
                else:
                    break
            while first in done:
                yield done.pop(first)
                first += 1
            if first == given and not more:
                return
            by_conn = {worker.conn: worker for worker in self._workers if worker.given}
            for conn in wait(list(by_conn), timeout=1.0):
                worker = by_conn[conn]
                try:
                    result = worker.conn.recv()
                except (EOFError, OSError):
                    again.extend(self._replace(worker))
                    continue
                if isinstance(result, Exception):
                    raise result
                done[worker.given.popleft()[0]] = result
            self._look_for_hung()

    def end(self) -> None:
        for worker in self._workers:
            worker.end()

    def _look_for_hung(self) -> None:
        now = monotonic()
        for worker in self._workers:
            at = (worker.given[0][0], worker.current.value) if worker.given else (-1, -1)
            if at[1] < 0 or at != worker.watch[0]:
                worker.watch = (at, now)
            elif now - worker.watch[1] > self._hang_s and not worker.hung:
                worker.hung = True
                worker.process.kill()

    def _replace(self, worker: _Worker) -> list[tuple[int, Task]]:
        """Put a new worker in the place of a dead one; what it was given comes back, the guilty image marked."""
        worker.process.join()
        number, task = worker.given[0]
        at = worker.current.value
        code = worker.process.exitcode or 0
        died = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        if at < 0:
            self._barren += 1
            if self._barren >= _MAX_BARREN:
                raise ResoluteError(
                    f"prep: {self._barren} worker processes died before they had an image ({died}), expected "
                    "them to live; they may have been out of memory: try fewer WORKERS (--workers)"
                )
        else:
            self._strikes[number, at] += 1
            if worker.hung:
                task = replace(task, skip={**task.skip, at: f"decoder hung: more than {self._hang_s:.0f} s"})
            elif self._strikes[number, at] > 1:
                task = replace(task, skip={**task.skip, at: f"decoder died: {died}"})
        worker.end()
        self._workers[self._workers.index(worker)] = _Worker(self._context, self._serve)
        return [(number, task), *list(worker.given)[1:]]


def start_fork_server() -> None:
    """Let the fork server import what workers need while this process is still looking around."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOAD)
    forkserver.ensure_running()


@contextmanager
def open_pool(workers: int, method: str = "forkserver") -> Iterator[Pool]:
    """Start `workers` processes; they end with the block, or on their own if this process is killed."""
    pool = Pool(workers, method)
    try:
        yield pool
    finally:
        pool.end()
