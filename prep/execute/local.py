"""How do shards get done on this machine? Chunks spread over all workers, one shard after the other on disk."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter

from prep.convert.batch import Chunk, Job, Task
from prep.shards.writer import CHUNK_SAMPLES, ShardSpec, ShardWriter, Written
from prep.storage.output import Store

from .process_pool import Pool
from .stats import Tally

__all__ = ["convert_shards"]

_PENDING_CHUNKS = 64  # about 1 MB each: what a slow disk may lag behind


def convert_shards(
    pool: Pool,
    job: Job,
    specs: Iterable[ShardSpec],
    store: Store,
    *,
    done: Callable[[Written], None],
    progress: Callable[[Tally], None],
) -> Tally:
    """Convert and write `specs`, consumed lazily; `done` is told each shard that is safe, from another thread.

    Files are written and synced beside the workers, which never wait for a disk that keeps up. `progress` is
    told the sum so far after each chunk. Raises the first error, with nothing half-written left.
    """
    tally = Tally()
    waiting: deque[ShardSpec] = deque()  # given to the pool, in order

    def tasks() -> Iterator[Task]:
        for spec in specs:
            waiting.append(spec)
            yield from spec.tasks()

    def add(writer: ShardWriter, chunk: Chunk) -> None:
        start = perf_counter()
        writer.add(chunk)
        tally.write_s += perf_counter() - start

    def finish(writer: ShardWriter, last: Future[None]) -> None:
        last.result()
        done(writer.finish())
        unfinished.remove(writer)

    unfinished: list[ShardWriter] = []
    writer: ShardWriter | None = None
    left = 0  # chunks that the shard at hand still lacks
    pending: deque[Future[None]] = deque()
    with ThreadPoolExecutor(1) as disk, ThreadPoolExecutor(2) as closing:
        try:
            for chunk in pool.run(job, tasks()):
                if writer is None:
                    writer = ShardWriter(store, job, waiting.popleft())
                    left = -(-len(writer.spec.places) // CHUNK_SAMPLES)
                    unfinished.append(writer)
                tally.add(writer.spec.split, chunk)
                pending.append(disk.submit(add, writer, chunk))
                left -= 1
                if left == 0:
                    pending.append(closing.submit(finish, writer, pending[-1]))
                    writer = None
                while len(pending) > _PENDING_CHUNKS or (pending and pending[0].done()):
                    pending.popleft().result()
                progress(tally)
            while pending:
                pending.popleft().result()
        except BaseException:
            disk.shutdown(wait=True, cancel_futures=True)
            closing.shutdown(wait=True, cancel_futures=True)
            for writer in unfinished:
                writer.discard()
            raise
    return tally
