"""Which order suits the place a shard set lies on? A second of random reads, as the `full` order would do them."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from pipeline.dataset.shard_set import ShardSet
from pipeline.plan.order import Order

__all__ = ["Probe", "choose_order"]

_READS, _THREADS, _LIMIT_S = 512, 4, 1.0
# why: four readers at 1 ms a sample feed 4 000 images/s. SSDs answer in 0.1 ms, turning disks in 8, network disks in 1
# to 10, and for the slow ones a block at once is many times faster than its samples one by one.
_FAST_S = 1e-3


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What was found; nothing was read (`reads` 0) of a set behind a URL."""

    order: Order
    reads: int = 0
    mean_s: float = 0.0  # of a read

    def __str__(self) -> str:
        if not self.reads:
            return f"order: {self.order}, because the shards are remote"
        return f"order: {self.order}, because a random read takes {1e3 * self.mean_s:.2g} ms here"


def choose_order(shards: ShardSet, res: int) -> Probe:
    """The order to read `shards` in, judged by random training samples of `res` px. Takes a second at most.

    Not a pure function: ask once a run and keep the answer (`Plan(order=...)`), or a resumed run is another one.
    Raises `ResoluteError` if what it reads is damaged.
    """
    if shards.files.remote:
        return Probe(order="block")
    split = shards.splits["train"]
    # why: other places each time; those of the last run are in memory still
    ids = np.random.default_rng().integers(0, len(split), _READS)
    records = split.stored[res][ids]
    end = time.monotonic() + _LIMIT_S

    def read(i: int) -> float | None:
        began = time.monotonic()
        if began > end:
            return None
        record = records[i]
        shards.files.read(shards.tar(res, split.shards[record["shard"]]), int(record["offset"]), int(record["nbytes"]))
        return time.monotonic() - began

    with ThreadPoolExecutor(_THREADS) as pool:
        times_s = [took for took in pool.map(read, range(_READS)) if took is not None]
    mean_s = sum(times_s) / len(times_s)
    return Probe(order="full" if mean_s <= _FAST_S else "block", reads=len(times_s), mean_s=mean_s)
