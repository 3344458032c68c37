"""Converts shards on this machine: their batches are spread over all workers, their files are written one by one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter

from prep.convert.batch import Batch, BatchResult, EncodeOptions
from prep.shards.writer import BATCH_SAMPLES, ShardSpec, ShardWriter
from prep.storage.output import Store

from .process_pool import Pool
from .stats import RunStats

__all__ = ["convert_shards"]

_PENDING_BATCHES = 64  # batches of about 1 MB that a slow disk may lag behind


def convert_shards(
    pool: Pool,
    options: EncodeOptions,
    specs: Iterable[ShardSpec],
    store: Store,
    *,
    done: Callable[[bytes], None],
    progress: Callable[[RunStats], None],
) -> RunStats:
    """Convert and write `specs`, which are consumed lazily; returns the totals.

    `done(record)` is called from another thread for each durable record (`ShardRecord.to_bytes`), `progress(totals so
    far)` after each batch. Writing and syncing happen in threads of this process, so workers wait only for a disk that
    cannot keep up. Raises the first error and leaves no partial files.
    """
    stats = RunStats()
    queued: deque[ShardSpec] = deque()  # submitted to the pool, in order

    def batches() -> Iterator[Batch]:
        for spec in specs:
            queued.append(spec)
            yield from spec.batches()

    def add(writer: ShardWriter, result: BatchResult) -> None:
        start = perf_counter()
        writer.add(result)
        stats.write_s += perf_counter() - start

    def finish(writer: ShardWriter, last: Future[None]) -> None:
        last.result()
        for record in writer.finish():
            done(record)
        unfinished.remove(writer)

    unfinished: list[ShardWriter] = []
    writer: ShardWriter | None = None
    batches_left = 0  # batches that the current shard still lacks
    pending: deque[Future[None]] = deque()
    with ThreadPoolExecutor(1) as disk, ThreadPoolExecutor(2) as closing:
        try:
            for result in pool.run(options, batches()):
                if writer is None:
                    writer = ShardWriter(store, options, queued.popleft())
                    batches_left = -(-len(writer.spec.byte_ranges) // BATCH_SAMPLES)
                    unfinished.append(writer)
                stats.add(writer.spec.split, result)
                pending.append(disk.submit(add, writer, result))
                batches_left -= 1
                if batches_left == 0:
                    pending.append(closing.submit(finish, writer, pending[-1]))
                    writer = None
                while len(pending) > _PENDING_BATCHES or (pending and pending[0].done()):
                    pending.popleft().result()
                progress(stats)
            while pending:
                pending.popleft().result()
        except BaseException:
            disk.shutdown(wait=True, cancel_futures=True)
            closing.shutdown(wait=True, cancel_futures=True)
            for writer in unfinished:
                writer.discard()
            raise
    return stats
