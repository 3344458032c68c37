"""`TarDownloader`: downloads the files of a remote set that upcoming batches will read.

The plan gives the samples of batches far ahead, and the index the tars they are in. These are downloaded into the disk
cache while earlier batches train, so that opening a new block does not stall a batch.
"""

from __future__ import annotations

from contextlib import suppress

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.format import tar_name
from resolute.pipeline.plan.plan import Plan
from resolute.pipeline.storage.base import Files

__all__ = ["TarDownloader"]

# why: the blocks that are open at a time (order.py); `CacheSettings.ahead_bytes` is the limit for large samples
_AHEAD_SAMPLES = 16 * 1024


class TarDownloader:
    """Follows one rank through the plan. Does nothing if the set is in a folder."""

    def __init__(
        self, plan: Plan, files: Files, *, rank: int = 0, world_size: int = 1, samples: int = _AHEAD_SAMPLES
    ) -> None:
        """`files`: those of the plan's set, of the reader whose tars are downloaded (`Files.for_reader`)."""
        self._plan, self._rank, self._world_size, self._samples = plan, rank, world_size, samples
        self._files = files
        self._current = self._next = 0  # the batch of the last `advance`; the next one whose tars are downloaded
        self._pending: list[str] = []  # names not accepted yet, in order of need
        self._last: set[str] = set()  # names of the last batch. why: neighbouring batches share files

    def advance(self, index: int) -> None:
        """Batch `index` is being read: download its tars and those of later batches, as far as `files` accept them."""
        if not self._files.remote:
            return
        if not self._current <= index < self._next:  # the loader moved in the plan
            self._next, self._pending, self._last = index, [], set()
        self._current = index
        while self._hint():
            phase = self._plan.phase_at(min(self._next, self._plan.total_batches - 1))
            if self._next >= self._plan.total_batches or (self._next - index) * phase.batch_size > self._samples:
                return
            with suppress(ResoluteError):  # why: a damaged index is reported when its batch is due
                names = self._names(self._next)
                self._pending = [name for name in names if name not in self._last]
                self._last = set(names)
            self._next += 1

    def _hint(self) -> bool:
        """Pass the pending names to the files; False if these accept no more for now."""
        while self._pending:
            if not self._files.prefetch(self._pending[0]):
                return False
            self._pending.pop(0)
        return True

    def _names(self, index: int) -> list[str]:
        """The tars that contain this rank's samples of a batch, in the order of the samples."""
        phase = self._plan.phase_at(index)
        split = self._plan.shards.splits[phase.split]
        _, stored_res = self._plan.res_at(index)
        records = split.stored[stored_res][self._plan.ids(index, rank=self._rank, world_size=self._world_size)]
        return [tar_name(stored_res, split.shards[n]) for n in dict.fromkeys(records["shard"].tolist())]
