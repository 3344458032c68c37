"""Prefetch hints: what of a remote set will be read soon is fetched before a batch waits for it.

The plan is known: batches far ahead are asked for their samples, and the files for the chunks these lie in. A batch
that is read meets its chunks in the cache; a block that opens, or an epoch that begins with sixteen new ones, was
fetched while earlier batches trained.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress

import numpy as np

from pipeline.errors import ResoluteError
from pipeline.plan.plan import Plan

__all__ = ["PREFETCH_SAMPLES", "Prefetcher"]

# why: the blocks that an epoch opens at once; `CacheSettings.ahead_bytes` is the bound where samples are large
PREFETCH_SAMPLES = 16 * 1024
_REMEMBERED = 4096  # chunks hinted at lately: neighbours in a batch share theirs


class Prefetcher:
    """Follows a rank through the plan. Costs nothing where the files of the set are not fetched in chunks."""

    def __init__(self, plan: Plan, *, rank: int = 0, world_size: int = 1, samples: int = PREFETCH_SAMPLES) -> None:
        self._plan, self._rank, self._world, self._samples = plan, rank, world_size, samples
        self._files, self._step = plan.shards.files, plan.shards.files.chunk_bytes
        self._now = self._next = 0  # the batch that was followed last, and the one whose chunks are hinted at next
        self._left: list[tuple[str, int]] = []  # of the batch before it: (name, chunk) that were not taken yet
        self._lately: OrderedDict[tuple[str, int], None] = OrderedDict()

    def advance(self, index: int) -> None:
        """Batch `index` is read now: hint at what comes after it, as far as the files take hints."""
        if not self._step:
            return
        if not self._now <= index < self._next:  # another place in the plan
            self._next, self._left = index + 1, []
        self._now = index
        while self._hint():
            pass_ = self._plan.pass_at(min(self._next, self._plan.total_batches - 1))
            if self._next >= self._plan.total_batches or (self._next - index) * pass_.batch_size > self._samples:
                return
            with suppress(ResoluteError):  # why: a damaged index ends the run when its batch is due, not now
                self._left = self._chunks(self._next)
            self._next += 1

    def _hint(self) -> bool:
        """Hand over what is left; False if the files prefetch no more for now."""
        while self._left:
            chunk = self._left[-1]
            if chunk in self._lately:
                self._lately.move_to_end(chunk)
            elif self._files.prefetch(chunk[0], chunk[1] * self._step, self._step):
                self._lately[chunk] = None
                if len(self._lately) > _REMEMBERED:
                    self._lately.popitem(last=False)
            else:
                return False
            self._left.pop()
        return True

    def _chunks(self, index: int) -> list[tuple[str, int]]:
        """The chunks that hold this rank's part of a batch."""
        pass_ = self._plan.pass_at(index)
        shards = self._plan.shards
        split = shards.splits[pass_.split]
        records = split.stored[pass_.stored_res][self._plan.ids(index, rank=self._rank, world_size=self._world)]
        first = records["offset"].astype(np.int64)
        last = first + records["nbytes"] - 1
        shard = records["shard"].astype(np.int64) << 32
        codes = np.unique(np.concatenate([shard | first // self._step, shard | last // self._step]))
        names = [shards.tar(pass_.stored_res, shard) for shard in split.shards]
        return [(names[code >> 32], code & 0xFFFFFFFF) for code in codes.tolist()]
