"""Running totals of a conversion: images, rejects, seconds by kind of work, slowest images."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from resolute.prep.convert.batch import BatchResult

__all__ = ["RunStats", "ShardReport"]

_SLOWEST = 12


@dataclass
class RunStats:
    """Totals of the images converted so far; seconds are summed over all workers.

    `rejected` holds (split, key, reason), `slowest` the (seconds, split, key) of the slowest images, descending.
    """

    batches: int = 0
    images: int = 0
    read_bytes: int = 0
    read_s: float = 0.0
    decode_s: float = 0.0
    convert_s: float = 0.0  # resize and encode
    write_s: float = 0.0  # hash and write
    rejected: list[tuple[str, int, str]] = field(default_factory=list)
    slowest: list[tuple[float, str, int]] = field(default_factory=list)

    @property
    def rejects(self) -> int:
        return len(self.rejected)

    def add(self, split: str, result: BatchResult) -> None:
        self.merge(
            RunStats(
                batches=1,
                images=len(result.samples) + len(result.rejects),
                rejected=[(split, key, reason) for key, reason in result.rejects],
                read_bytes=result.read_bytes,
                read_s=result.times.read_s,
                decode_s=result.times.decode_s,
                convert_s=result.times.convert_s,
                slowest=[(result.times.slowest[0], split, result.times.slowest[1])],
            )
        )

    def merge(self, other: RunStats) -> None:
        self.batches += other.batches
        self.images += other.images
        self.rejected += other.rejected
        self.read_bytes += other.read_bytes
        self.read_s += other.read_s
        self.decode_s += other.decode_s
        self.convert_s += other.convert_s
        self.write_s += other.write_s
        self.slowest = heapq.nlargest(_SLOWEST, self.slowest + other.slowest)


@dataclass(frozen=True, kw_only=True)
class ShardReport:
    """A worker's report about a shard: `stats` since its last report, and its records as soon as they are durable."""

    stats: RunStats
    records: list[bytes] | None = None
