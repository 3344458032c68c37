"""Chooses the sample order for a shard set by timing random reads for up to a second."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from pipeline.dataset.shard_set import ShardSet
from pipeline.plan.order import Order

__all__ = ["Probe", "choose_order"]

_READS, _THREADS, _LIMIT_S = 512, 4, 1.0
# why 1 ms: four readers then deliver 4 000 images/s. SSDs take 0.1 ms, hard disks 8 ms, network disks 1 to 10 ms; on
# slow ones reading a block at once is many times faster than reading its samples one by one.
_FAST_S = 1e-3


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Result of `choose_order`; `reads` is 0 for a remote set, which is not read."""

    order: Order
    reads: int = 0
    mean_s: float = 0.0  # per read

    def __str__(self) -> str:
        if not self.reads:
            return f"order: {self.order}, because the shards are remote"
        return f"order: {self.order}, because a random read takes {1e3 * self.mean_s:.2g} ms here"


def choose_order(shards: ShardSet, res: int) -> Probe:
    """Choose the order by timing reads of random training samples at `res` px, for at most a second.

    Not deterministic: call it once per run and store the result (`Plan(order=...)`), else a resumed run may differ.
    Raises `ResoluteError` if what it reads is damaged, `StorageError` if the storage fails.
    """
    if shards.files.remote:
        return Probe(order="block")
    split = shards.splits["train"]
    # why unseeded: the samples of an earlier call would still be in the page cache
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
