"""How do shards get done on this machine? Chunks spread over all workers, one shard after the other on disk."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter

from prep.convert.batch import Batch, BatchResult, EncodeOptions
from prep.shards.writer import BATCH_SAMPLES, ShardRecord, ShardSpec, ShardWriter
from prep.storage.output import Store

from .process_pool import Pool
from .stats import RunStats

__all__ = ["convert_shards"]

_PENDING_CHUNKS = 64  # about 1 MB each: what a slow disk may lag behind


def convert_shards(
    pool: Pool,
    options: EncodeOptions,
    specs: Iterable[ShardSpec],
    store: Store,
    *,
    done: Callable[[ShardRecord], None],
    progress: Callable[[RunStats], None],
) -> RunStats:
    """Convert and write `specs`, consumed lazily; `done` is told each shard that is safe, from another thread.

    Files are written and synced beside the workers, which never wait for a disk that keeps up. `progress` is
    told the sum so far after each chunk. Raises the first error, with nothing half-written left.
    """
    stats = RunStats()
    queued: deque[ShardSpec] = deque()  # given to the pool, in order

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
        done(writer.finish())
        unfinished.remove(writer)

    unfinished: list[ShardWriter] = []
    writer: ShardWriter | None = None
    batches_left = 0  # chunks that the shard at hand still lacks
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
                while len(pending) > _PENDING_CHUNKS or (pending and pending[0].done()):
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
