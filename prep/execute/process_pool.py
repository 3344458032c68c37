"""A pool of worker processes that keeps the order of its chunks and blames single images for deaths and hangs.

An image is a hang when its worker has had `HANG_S` seconds of running or sleeping on it. Time in which the worker or
this process was stopped (Ctrl-Z, a paused container) or had to wait for a core does not count.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any

from pipeline.errors import ResoluteError
from prep.convert.batch import Batch, BatchResult, EncodeOptions

__all__ = ["HANG_S", "Pool", "open_pool", "start_fork_server"]

_PRELOAD = ["prep.convert.worker"]
HANG_S = 120.0  # one image; the largest we accept takes some ten seconds
_BATCHES_PER_WORKER = 2  # tasks a worker has at a time: the next is there when one is done
_POLL_S = 1.0  # between two looks at the workers
_TICKS_S = 1 / os.sysconf("SC_CLK_TCK")
_MAX_STARTUP_CRASHES = 3  # workers that die before they touch an image: it is not an image's fault

Serve = Callable[[Connection, Any], None]


@dataclass(kw_only=True)
class _Watch:
    """How long a worker has been at one image. `image`: number of the task, position in it; negative: none.

    `busy_s`: seconds it ran or slept; `seen_s`, `cpu_s`: the clock and its CPU time at the last look.
    """

    image: tuple[int, int]
    busy_s: float = 0.0
    observed_s: float = 0.0
    cpu_s: float | None = None

    def observe(self, image: tuple[int, int], pid: int) -> None:
        state, cpu_s = _main_thread(pid)
        now = monotonic()
        if image != self.image:
            self.image, self.busy_s = image, 0.0
        elif state == "S":  # why: however long this process was stopped itself, it counts as one poll
            self.busy_s += min(now - self.observed_s, _POLL_S)
        elif cpu_s is not None and self.cpu_s is not None:  # running, waiting for a core or a disk, or stopped
            self.busy_s += cpu_s - self.cpu_s
        self.observed_s, self.cpu_s = now, cpu_s


def _main_thread(pid: int) -> tuple[str, float | None]:
    """State and CPU seconds of a process's main thread, where images are decoded; as if asleep without a /proc.

    Source: proc(5), /proc/pid/stat: state, utime and stime are fields 3, 14 and 15.
    """
    try:
        fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "S", None
    return fields[0], (int(fields[11]) + int(fields[12])) * _TICKS_S


class _Worker:
    """A process, its connection, and what it has been submitted."""

    def __init__(self, context: Any, serve: Serve) -> None:
        self.conn, child_conn = context.Pipe()
        self.current = context.RawValue("q", -1)
        self.in_flight: deque[tuple[int, Batch]] = deque()
        self.watch = _Watch(image=(-1, -1))
        self.hung = False
        args = (serve, child_conn, self.current, dict(os.environ))
        self.process = context.Process(target=_worker_main, args=args, daemon=True)
        self.process.start()
        child_conn.close()

    def send(self, options: EncodeOptions, number: int, batch: Batch) -> None:
        self.in_flight.append((number, batch))
        with suppress(OSError):  # why: if it has died, its connection says so when it is read
            self.conn.send((options, batch))

    def end(self) -> None:
        self.conn.close()
        self.process.kill()  # why: nothing of what it still works on is wanted
        self.process.join()


def _worker_main(serve: Serve, conn: Connection, current: Any, environ: Mapping[str, str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # why: the parent ends this process, also while it still imports
    # why: the fork server keeps the environment of its own start; credentials may have come since
    os.environ.update(environ)
    serve(conn, current)


def _serve(conn: Connection, current: Any) -> None:
    from prep.convert.worker import serve  # why: the main process can do without what it imports

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
        self._crash_counts: Counter[tuple[int, int]] = Counter()  # by task and position
        self._startup_crashes = 0

    def run(self, options: EncodeOptions, batches: Iterable[Batch]) -> Iterator[BatchResult]:
        """Chunks in the order of `tasks`, which is consumed lazily.

        An image at which a worker dies twice, or stays longer than `hang_s`, is rejected; everything else in
        its chunk is done again. An error of ours in a worker is raised here as it is. Raises `ResoluteError`
        if workers die without an image to blame.
        """
        source = enumerate(batches)
        self._crash_counts.clear()
        for i, worker in enumerate(self._workers):
            if worker.in_flight:  # why: an earlier run was given up, and would answer this one
                worker.end()
                self._workers[i] = _Worker(self._context, self._serve)
        retries: deque[tuple[int, Batch]] = deque()  # of workers that died
        done: dict[int, BatchResult] = {}
        first = submitted = 0  # the next to yield, the next new one
        more = True
        while True:
            while True:
                worker = min(self._workers, key=lambda worker: len(worker.in_flight))
                if len(worker.in_flight) >= _BATCHES_PER_WORKER:
                    break
                if retries:
                    worker.send(options, *retries.popleft())
                elif more and submitted - first < self._window:
                    item = next(source, None)
                    if item is None:
                        more = False
                        continue
                    submitted += 1
                    worker.send(options, *item)
                else:
                    break
            while first in done:
                yield done.pop(first)
                first += 1
            if first == submitted and not more:
                return
            by_conn = {worker.conn: worker for worker in self._workers if worker.in_flight}
            for conn in wait(list(by_conn), timeout=_POLL_S):
                worker = by_conn[conn]
                try:
                    result = worker.conn.recv()
                except (EOFError, OSError):
                    retries.extend(self._replace(worker))
                    continue
                if isinstance(result, Exception):
                    raise result
                done[worker.in_flight.popleft()[0]] = result
            self._kill_hung_workers()

    def end(self) -> None:
        for worker in self._workers:
            worker.end()

    def _kill_hung_workers(self) -> None:
        for worker in self._workers:
            image = (worker.in_flight[0][0], worker.current.value) if worker.in_flight else (-1, -1)
            worker.watch.observe(image, worker.process.pid)
            if image[1] >= 0 and worker.watch.busy_s > self._hang_s and not worker.hung:
                worker.hung = True
                worker.process.kill()

    def _replace(self, worker: _Worker) -> list[tuple[int, Batch]]:
        """Put a new worker in the place of a dead one; what it was submitted comes back, the guilty image marked."""
        worker.process.join()
        number, batch = worker.in_flight[0]
        position = worker.current.value
        code = worker.process.exitcode or 0
        died = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        if position < 0:
            self._startup_crashes += 1
            if self._startup_crashes >= _MAX_STARTUP_CRASHES:
                raise ResoluteError(
                    f"prep: {self._startup_crashes} worker processes died before they had an image ({died}), expected "
                    "them to live; they may have been out of memory: try fewer WORKERS (--workers)"
                )
        else:
            self._crash_counts[number, position] += 1
            if worker.hung:
                batch = replace(batch, skip={**batch.skip, position: f"decoder hung: more than {self._hang_s:.0f} s"})
            elif self._crash_counts[number, position] > 1:
                batch = replace(batch, skip={**batch.skip, position: f"decoder died: {died}"})
        worker.end()
        self._workers[self._workers.index(worker)] = _Worker(self._context, self._serve)
        return [(number, batch), *list(worker.in_flight)[1:]]


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
