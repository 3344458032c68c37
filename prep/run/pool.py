"""A process pool that converts batches or whole shards and attributes crashes and hangs of workers to single images.

A worker that dies of a signal by which a decoder crashes is the fault of its image. Any other death, such as by the
kernel's out-of-memory killer, is not, and ends the run.

An image counts as hung when its worker has spent `HANG_S` seconds running or sleeping on it, or in proportion longer if
the set accepts larger photos. Time during which the worker or this process was stopped (Ctrl-Z, a paused container) or
waited for a CPU does not count.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeAlias

from resolute.errors import ResoluteError
from resolute.fork_server import fork_server
from resolute.prep.convert.batch import Batch, BatchResult, EncodeOptions, receive_answer
from resolute.prep.sources.image_ref import ByteRange

from .stats import ShardReport

if TYPE_CHECKING:  # why: these imports are slow, and the fork server has to start early
    from resolute.prep.shard_set.writer import ShardSpec
    from resolute.prep.storage.output import Store

__all__ = ["HANG_S", "Answer", "Pool", "Task", "open_pool", "start_fork_server"]

_PRELOAD = ["resolute.prep.run.preload"]
HANG_S = 120.0  # per image; one of `_MEGAPIXELS` takes about ten seconds
_MEGAPIXELS = 67.1  # of the largest photos that a set accepts without MAX_MEGAPIXELS
_BATCHES_PER_WORKER = 2  # the next batch is already there when one is done
_BATCHES_BEFORE_SHARD = 16  # the same for a shard, of which up to 8 batches are converted without a report
_POLL_S = 1.0  # interval between two observations of the workers
_TICKS_S = 1 / os.sysconf("SC_CLK_TCK")
# By these a decoder crashes; SIGKILL comes from outside, and takes the workers with the largest photos.
_CRASHES = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE})
_MAX_STARTUP_CRASHES = 3  # workers that die before their first image, which no image can cause

Serve = Callable[[Connection, Any], None]
Task: TypeAlias = "Batch | ShardSpec"
# Of a batch its result; of a shard reports, the last of which has its records, or None if its worker died.
Answer: TypeAlias = BatchResult | ShardReport | None


@dataclass(kw_only=True)
class _Watch:
    """Time that a worker has been busy with one image.

    `image` is the number of the image in this run, -1 if there is none; `busy_s` the seconds the worker ran or slept;
    `observed_s` and `cpu_s` the clock and the worker's CPU time at the last observation.
    """

    image: int = -1
    busy_s: float = 0.0
    observed_s: float = 0.0
    cpu_s: float | None = None

    def observe(self, image: int, pid: int) -> None:
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
    """A worker process, its connection, and the tasks it has been sent.

    A task's number is the number of images in the tasks before it; the image at a position of it has the number of the
    task plus the position. `current` is the number of the image being converted, or -1.
    """

    def __init__(self, context: Any, serve: Serve) -> None:
        self.conn, child_conn = context.Pipe()
        self.current = context.RawValue("q", -1)
        self.in_flight: dict[int, Task] = {}
        self.batches_left = 0  # batches in flight that are not converted yet
        self.has_answered = False
        self.watch = _Watch()
        self.hung = False
        args = (serve, child_conn, self.current, dict(os.environ))
        self.process = context.Process(target=_worker_main, args=args, daemon=True)
        self.process.start()
        child_conn.close()

    def send(self, number: int, options: EncodeOptions, store: Store | None, task: Task) -> None:
        self.in_flight[number] = task
        self.batches_left += 1 if isinstance(task, Batch) else task.batch_count
        with suppress(OSError):  # why suppressed: reading from the connection will report that the worker has died
            self.conn.send((number, options, store, task))

    def receive(self) -> tuple[int, Task, Answer]:
        """The next answer, and its task. Raises an exception that the worker sent, `EOFError` if the worker died."""
        try:
            number, answer = receive_answer(self.conn)
        except OSError:  # the message breaks off
            raise EOFError from None
        if isinstance(answer, Exception):
            raise answer
        self.has_answered = True
        task = self.in_flight[number]
        self.batches_left -= answer.stats.batches if isinstance(answer, ShardReport) else 1
        if not isinstance(answer, ShardReport) or answer.records is not None:
            del self.in_flight[number]
        return number, task, answer

    def end(self) -> None:
        self.process.kill()  # why kill: its unfinished work is not needed
        self.conn.close()
        self.process.join()


def _worker_main(serve: Serve, conn: Connection, current: Any, environ: Mapping[str, str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # why: the parent ends this process, even while it is importing
    gc.enable()  # `preload.py` disables it
    # why: the fork server has the environment of its own start; credentials may have been set since
    os.environ.update(environ)
    serve(conn, current)


def _serve(conn: Connection, current: Any) -> None:
    from resolute.prep.run.worker import serve  # why: the main process does not need these imports

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
        # why preloaded: the fork server imports it and compiles its kernel once for all workers
        self._context: Any = fork_server(_PRELOAD) if method == "forkserver" else multiprocessing.get_context(method)
        self._serve = serve
        self._hang_s, self._limit_s = hang_s, hang_s
        # results that wait for that of an earlier batch: enough to hide a slow one, few enough for memory
        self._max_waiting = 2 * workers + 16
        self._workers = [_Worker(self._context, self._serve) for _ in range(workers)]
        self._observed_s = -float("inf")
        self._crash_counts: Counter[ByteRange] = Counter()  # image -> workers that died on it
        self._startup_crashes = 0

    def __len__(self) -> int:
        """The number of worker processes."""
        return len(self._workers)

    def run(
        self, options: EncodeOptions, tasks: Iterable[Task], store: Store | None = None
    ) -> Generator[tuple[Task, Answer], None, None]:
        """Convert batches, and shards, which are written to `store`; `tasks` are consumed lazily.

        Yields (batch, its result) in the order of the batches, and (shard, report) as soon as there is one, the last
        with the records of the finished shard, which is durable.

        An image on which a worker crashes twice, or stays longer than `hang_s` (in proportion longer if `options` allow
        larger photos), is rejected; the rest of its batch is converted again. The answer for a shard whose worker
        crashes is None, and its task then skips such an image: the caller has to convert it again. Its partial files
        are left to `delete_partial_shards`. An exception raised in a worker is raised here unchanged. Raises
        `ResoluteError` if workers crash before they start an image, and if one dies without a crash, as when the
        machine runs out of memory.

        No worker writes any more when the iterator has ended, been closed, or raised.
        """
        self._limit_s = self._hang_s * max(1.0, (options.max_megapixels or 0) / _MEGAPIXELS)
        for i, worker in enumerate(self._workers):
            if worker.in_flight:  # of a run that was abandoned, and so ended the worker
                self._workers[i] = _Worker(self._context, self._serve)
        try:
            yield from self._run(options, iter(tasks), store)
        finally:
            for worker in self._workers:
                if worker.in_flight:
                    worker.end()

    def _run(self, options: EncodeOptions, tasks: Iterator[Task], store: Store | None) -> Iterator[tuple[Task, Answer]]:
        retries: deque[tuple[int, Task]] = deque()  # batches of workers that died
        waiting: deque[tuple[int, Task]] = deque()  # batches whose results have not been yielded, in order
        results: dict[int, BatchResult] = {}
        number = 0
        next_task = next(tasks, None)
        while True:
            while True:
                worker = min(self._workers, key=lambda worker: worker.batches_left)
                is_batch = bool(retries) or isinstance(next_task, Batch)
                if worker.batches_left >= (_BATCHES_PER_WORKER if is_batch else _BATCHES_BEFORE_SHARD):
                    break
                if retries:
                    retried, task = retries.popleft()
                    worker.send(retried, options, store, task)
                elif next_task is not None and len(results) < self._max_waiting:
                    if isinstance(next_task, Batch):
                        waiting.append((number, next_task))
                    worker.send(number, options, store, next_task)
                    number += len(next_task.byte_ranges)
                    next_task = next(tasks, None)
                else:
                    break
            while waiting and waiting[0][0] in results:
                first, task = waiting.popleft()
                yield task, results.pop(first)
            by_conn = {worker.conn: worker for worker in self._workers if worker.in_flight}
            if not by_conn and next_task is None:
                return
            for conn in wait(list(by_conn), timeout=_POLL_S):
                worker = by_conn[conn]
                try:
                    answered, task, answer = worker.receive()
                except EOFError:
                    for lost, task in self._replace(worker):
                        if isinstance(task, Batch):
                            retries.append((lost, task))
                        else:
                            yield task, None
                    continue
                if isinstance(answer, BatchResult):
                    results[answered] = answer
                else:
                    yield task, answer
            self._kill_hung_workers()

    def end(self) -> None:
        for worker in self._workers:
            worker.end()

    def _kill_hung_workers(self) -> None:
        if monotonic() - self._observed_s < _POLL_S:  # why: an observation costs as much as a batch
            return
        self._observed_s = monotonic()
        for worker in self._workers:
            worker.watch.observe(worker.current.value, worker.process.pid)
            if worker.watch.image >= 0 and worker.watch.busy_s > self._limit_s and not worker.hung:
                worker.hung = True
                worker.process.kill()

    def _replace(self, worker: _Worker) -> list[tuple[int, Task]]:
        """Replace a crashed worker and return its tasks; the image it crashed on is skipped if it is to blame.

        Raises `ResoluteError` if the worker died otherwise.
        """
        worker.process.join()
        tasks, image = dict(worker.in_flight), worker.current.value
        code = worker.process.exitcode or 0
        died = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        if not (worker.hung or -code in _CRASHES):
            count = len(self._workers)
            remedy = "use fewer WORKERS (--workers)" if count > 1 else "use a machine with more memory"
            raise ResoluteError(
                f"worker process: died, got {died} in one of {count}, which no photo causes and a lack of memory does, "
                f"expected all to finish; {remedy}, then run the same command again: finished shards are kept"
            )
        for number, task in worker.in_flight.items():
            position = image - number
            if not 0 <= position < len(task.byte_ranges):
                continue
            self._crash_counts[task.byte_ranges[position]] += 1
            if worker.hung:
                reason = f"decoder hung: more than {self._limit_s:.0f} s"
            elif self._crash_counts[task.byte_ranges[position]] > 1:
                reason = f"decoder died: {died}"
            else:
                continue
            tasks[number] = replace(task, skip={**task.skip, position: reason})
        if image < 0 and not worker.has_answered:
            self._startup_crashes += 1
            if self._startup_crashes >= _MAX_STARTUP_CRASHES:
                raise ResoluteError(
                    f"WORKERS: {self._startup_crashes} processes died before their first image ({died}), expected them "
                    "to start; if they ran out of memory, use fewer (--workers)"
                )
        worker.end()
        self._workers[self._workers.index(worker)] = _Worker(self._context, self._serve)
        return list(tasks.items())


def start_fork_server() -> None:
    """Start the fork server now, so that it imports what workers need while this process prepares the work."""
    fork_server(_PRELOAD)


@contextmanager
def open_pool(workers: int, method: str = "forkserver") -> Iterator[Pool]:
    """Start `workers` processes; they end with the block, or by themselves if this process is killed."""
    pool = Pool(workers, method)
    try:
        yield pool
    finally:
        pool.end()
