"""A process pool that returns results in order and attributes crashes and hangs of workers to single images.

An image counts as hung when its worker has spent `HANG_S` seconds running or sleeping on it. Time during which the
worker or this process was stopped (Ctrl-Z, a paused container) or waited for a CPU does not count.
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
HANG_S = 120.0  # per image; the largest accepted image takes about ten seconds
_BATCHES_PER_WORKER = 2  # the next batch is already there when one is done
_POLL_S = 1.0  # interval between two observations of the workers
_TICKS_S = 1 / os.sysconf("SC_CLK_TCK")
_MAX_STARTUP_CRASHES = 3  # workers that die before their first image, which no image can cause

Serve = Callable[[Connection, Any], None]


@dataclass(kw_only=True)
class _Watch:
    """Time that a worker has been busy with one image.

    `image` is (number of the batch, position in it), negative if there is none; `busy_s` the seconds it ran or slept;
    `observed_s` and `cpu_s` the clock and the worker's CPU time at the last observation.
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
        elif state == "S":  # why min: time in which this process itself was stopped counts as one poll
            self.busy_s += min(now - self.observed_s, _POLL_S)
        elif cpu_s is not None and self.cpu_s is not None:  # running, waiting for a CPU or disk, or stopped
            self.busy_s += cpu_s - self.cpu_s
        self.observed_s, self.cpu_s = now, cpu_s


def _main_thread(pid: int) -> tuple[str, float | None]:
    """State and CPU seconds of a process's main thread, which decodes; ("S", None) without /proc.

    Source: proc(5), /proc/pid/stat: state, utime and stime are fields 3, 14 and 15.
    """
    try:
        fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "S", None
    return fields[0], (int(fields[11]) + int(fields[12])) * _TICKS_S


class _Worker:
    """A worker process, its connection, and the batches it has been sent."""

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
        with suppress(OSError):  # why suppressed: reading from the connection will report that the worker has died
            self.conn.send((options, batch))

    def end(self) -> None:
        self.conn.close()
        self.process.kill()  # why kill: its unfinished work is not needed
        self.process.join()


def _worker_main(serve: Serve, conn: Connection, current: Any, environ: Mapping[str, str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # why: the parent ends this process, even while it is importing
    # why: the fork server has the environment of its own start; credentials may have been set since
    os.environ.update(environ)
    serve(conn, current)


def _serve(conn: Connection, current: Any) -> None:
    from prep.convert.worker import serve  # why: the main process does not need these imports

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
        if method == "forkserver":  # why: the fork server imports it and compiles its kernel once for all workers
            self._context.set_forkserver_preload(_PRELOAD)
        self._serve = serve
        self._hang_s = hang_s
        self._window = 4 * workers + 16  # batches in progress: enough to hide a slow one, few enough for memory
        self._workers = [_Worker(self._context, self._serve) for _ in range(workers)]
        self._crash_counts: Counter[tuple[int, int]] = Counter()  # (batch, position) -> workers that died there
        self._startup_crashes = 0

    def run(self, options: EncodeOptions, batches: Iterable[Batch]) -> Iterator[BatchResult]:
        """Yield one result per batch, in the order of `batches`, which is consumed lazily.

        An image on which a worker dies twice, or stays longer than `hang_s`, is rejected; the rest of its batch is
        converted again. An exception raised in a worker is raised here unchanged. Raises `ResoluteError` if workers die
        before they start an image.
        """
        source = enumerate(batches)
        self._crash_counts.clear()
        for i, worker in enumerate(self._workers):
            if worker.in_flight:  # why: it would send the results of an earlier, abandoned run
                worker.end()
                self._workers[i] = _Worker(self._context, self._serve)
        retries: deque[tuple[int, Batch]] = deque()  # batches of workers that died
        done: dict[int, BatchResult] = {}
        first = submitted = 0  # number of the next batch to yield, and to submit
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
        """Replace a dead worker and return its batches; the image it died on is skipped if it is to blame."""
        worker.process.join()
        number, batch = worker.in_flight[0]
        position = worker.current.value
        code = worker.process.exitcode or 0
        died = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        if position < 0:
            self._startup_crashes += 1
            if self._startup_crashes >= _MAX_STARTUP_CRASHES:
                raise ResoluteError(
                    f"prep: {self._startup_crashes} worker processes died before their first image ({died}), expected "
                    "them to start; if they ran out of memory, use fewer WORKERS (--workers)"
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
    """Start the fork server now, so that it imports what workers need while this process prepares the work."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOAD)
    forkserver.ensure_running()


@contextmanager
def open_pool(workers: int, method: str = "forkserver") -> Iterator[Pool]:
    """Start `workers` processes; they end with the block, or by themselves if this process is killed."""
    pool = Pool(workers, method)
    try:
        yield pool
    finally:
        pool.end()
