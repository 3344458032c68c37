"""Converts shards on this machine: most of them in one worker process each, the last ones spread over all workers."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from itertools import islice
from time import perf_counter

from resolute.errors import ResoluteError
from resolute.prep.convert.batch import Batch, BatchResult, EncodeOptions
from resolute.prep.shard_set.cleanup import delete_partial_shards
from resolute.prep.shard_set.writer import ShardSpec, ShardWriter
from resolute.prep.storage.output import Store

from .pool import Pool, Task
from .stats import RunStats, ShardReport

__all__ = ["convert_shards", "whole_shards"]

_PENDING_BATCHES = 64  # batches of about 1 MB that a slow disk may lag behind


def whole_shards(sizes: Sequence[int], workers: int) -> int:
    """The number of shards, counted from the first, of which each is converted by a single worker.

    `sizes`: the samples of each shard. While a worker converts a shard alone, those after it have to keep the other
    workers busy; at least as many shards as there are workers are left for that.
    """
    rest, count = sum(sizes), 0
    for size in sizes[: max(0, len(sizes) - workers)]:
        rest -= size
        if rest < (workers - 1) * size:
            break
        count += 1
    return count


def convert_shards(
    pool: Pool,
    options: EncodeOptions,
    specs: Iterable[ShardSpec],
    store: Store,
    *,
    sizes: Sequence[int] = (),
    done: Callable[[bytes], None],
    progress: Callable[[RunStats], None],
) -> RunStats:
    """Convert and write `specs`, which are consumed lazily; `sizes`: the samples of each. Returns the totals.

    Of many shards, a worker converts and writes a whole one, which costs this process next to nothing. The last shards
    (`whole_shards`) are spread over all workers batch by batch, so that all end together, and are written by this
    process; so are shards whose worker died, and all shards without `sizes`, or if no other process sees `store`.

    `done(record)` is called, from any thread, for each durable record (`ShardRecord.to_bytes`), `progress(totals so
    far)` after each answer of a worker. Files are synced in the background: only a disk that cannot keep up makes
    workers wait. Raises the first error and leaves no partial files.
    """
    stats = RunStats()
    source = iter(specs)
    in_workers: set[str] = set()  # unfinished shards that workers write
    counted: Counter[str] = Counter()  # shard -> batches in `stats` whose files are not finished
    lost: list[ShardSpec] = []  # shards whose worker died
    queued: deque[ShardSpec] = deque()  # the shard of each batch that has been submitted to the pool

    def tasks() -> Iterator[Task]:
        by_workers = 0 if store.is_private else whole_shards(sizes, len(pool))
        for spec in islice(source, by_workers):
            in_workers.add(spec.name)
            yield spec
        yield from batches(source)

    def batches(specs: Iterable[ShardSpec]) -> Iterator[Batch]:
        for spec in specs:
            for batch in spec.batches():
                queued.append(spec)
                yield batch

    def reported(spec: ShardSpec, report: ShardReport | None) -> None:
        if report is None:
            delete_partial_shards(store, [spec.name])
            lost.append(spec)
        else:
            stats.merge(report.stats)
            counted[spec.name] += report.stats.batches
            if report.records is None:
                return
            del counted[spec.name]
            for record in report.records:
                done(record)
        in_workers.remove(spec.name)

    try:
        with _BackgroundWriter(store, options, done) as writer:
            for work in (tasks(), batches(lost)):
                with closing(pool.run(options, work, store)) as answers:
                    for task, answer in answers:
                        if isinstance(answer, BatchResult):
                            spec = queued.popleft()
                            if counted[spec.name]:
                                counted[spec.name] -= 1  # why: the worker that died had converted this batch
                            else:
                                stats.add(spec.split, answer)
                            writer.add(spec, answer)
                        else:
                            assert isinstance(task, ShardSpec)
                            reported(task, answer)
                        progress(stats)
            writer.flush()
            stats.write_s += writer.write_s
    except BaseException:
        with suppress(ResoluteError):  # why: the first error counts, and the next run deletes them too
            delete_partial_shards(store, in_workers)
        raise
    return stats


class _BackgroundWriter:
    """Writes shards in threads of this process. Unfinished shards are discarded at the end of the `with` block."""

    def __init__(self, store: Store, options: EncodeOptions, done: Callable[[bytes], None]) -> None:
        self._store, self._options, self._done = store, options, done
        self._disk, self._finisher = ThreadPoolExecutor(1), ThreadPoolExecutor(2)
        self._pending: deque[Future[None]] = deque()
        self._unfinished: list[ShardWriter] = []
        self._writer: ShardWriter | None = None  # of the shard that the next result belongs to
        self.write_s = 0.0

    def __enter__(self) -> _BackgroundWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._disk.shutdown(wait=True, cancel_futures=True)
        self._finisher.shutdown(wait=True, cancel_futures=True)
        for writer in self._unfinished:
            writer.discard()

    def add(self, spec: ShardSpec, result: BatchResult) -> None:
        """Write the next batch result of `spec` soon. Raises the first error of the threads."""
        self._pending.append(self._disk.submit(self._write, spec, result))
        while len(self._pending) > _PENDING_BATCHES or (self._pending and self._pending[0].done()):
            self._pending.popleft().result()

    def flush(self) -> None:
        """Wait until all shards are durable. Raises the first error of the threads."""
        while self._pending:
            self._pending.popleft().result()

    def _write(self, spec: ShardSpec, result: BatchResult) -> None:
        if self._writer is None:
            self._writer = ShardWriter(self._store, self._options, spec)
            self._unfinished.append(self._writer)
        start = perf_counter()
        self._writer.add(result)
        self.write_s += perf_counter() - start
        if self._writer.is_complete:
            self._pending.append(self._finisher.submit(self._finish, self._writer))
            self._writer = None

    def _finish(self, writer: ShardWriter) -> None:
        for record in writer.finish():
            self._done(record)
        self._unfinished.remove(writer)
