"""`Prefetcher`: fetches the chunks of a remote set that upcoming batches will read.

The plan gives the samples of batches far ahead, and the index the chunks they are stored in. These are fetched into
the disk cache while earlier batches train, so that opening a new block does not stall a batch.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress

import numpy as np

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.format import tar_name
from resolute.pipeline.plan.plan import Plan

__all__ = ["Prefetcher"]

# why: the blocks that are open at a time (order.py); `CacheSettings.ahead_bytes` is the limit for large samples
_AHEAD_SAMPLES = 16 * 1024
_RECENT_CHUNKS = 4096  # why remembered: neighbouring batches share chunks


class Prefetcher:
    """Follows one rank through the plan. Does nothing if the set's files are not fetched in chunks."""

    def __init__(self, plan: Plan, *, rank: int = 0, world_size: int = 1, samples: int = _AHEAD_SAMPLES) -> None:
        self._plan, self._rank, self._world_size, self._samples = plan, rank, world_size, samples
        self._files, self._step = plan.shards.files, plan.shards.files.chunk_bytes
        self._current = self._next = 0  # the batch of the last `advance`; the next one to prefetch
        self._pending: list[tuple[str, int]] = []  # (name, chunk) not accepted yet
        self._recent: OrderedDict[tuple[str, int], None] = OrderedDict()

    def advance(self, index: int) -> None:
        """Batch `index` is being read: prefetch the batches after it, as far as the files accept hints."""
        if not self._step:
            return
        if not self._current <= index < self._next:  # the loader moved in the plan
            self._next, self._pending = index + 1, []
        self._current = index
        while self._hint():
            phase = self._plan.phase_at(min(self._next, self._plan.total_batches - 1))
            if self._next >= self._plan.total_batches or (self._next - index) * phase.batch_size > self._samples:
                return
            with suppress(ResoluteError):  # why: a damaged index is reported when its batch is due
                self._pending = self._chunks(self._next)
            self._next += 1

    def _hint(self) -> bool:
        """Phase the pending chunks to the files; False if these accept no more for now."""
        while self._pending:
            chunk = self._pending[-1]
            if chunk in self._recent:
                self._recent.move_to_end(chunk)
            elif self._files.prefetch(chunk[0], chunk[1] * self._step, self._step):
                self._recent[chunk] = None
                if len(self._recent) > _RECENT_CHUNKS:
                    self._recent.popitem(last=False)
            else:
                return False
            self._pending.pop()
        return True

    def _chunks(self, index: int) -> list[tuple[str, int]]:
        """The (name, chunk number) that contain this rank's samples of a batch."""
        phase = self._plan.phase_at(index)
        split = self._plan.shards.splits[phase.split]
        _, stored_res = self._plan.res_at(index)
        records = split.stored[stored_res][self._plan.ids(index, rank=self._rank, world_size=self._world_size)]
        first = records["offset"].astype(np.int64)
        last = first + records["nbytes"] - 1
        shard = records["shard"].astype(np.int64) << 32
        codes = np.unique(np.concatenate([shard | first // self._step, shard | last // self._step]))
        names = [tar_name(stored_res, shard) for shard in split.shards]
        return [(names[code >> 32], code & 0xFFFFFFFF) for code in codes.tolist()]
