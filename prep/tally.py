"""How far is a run, and where did its time go?"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from .chunk import Chunk

__all__ = ["Tally"]

_SLOWEST = 12


@dataclass
class Tally:
    """Counts of images finished, seconds of the workers by kind, and the slowest images (s, split, key)."""

    images: int = 0
    rejects: int = 0
    read_bytes: int = 0
    read_s: float = 0.0
    decode_s: float = 0.0
    convert_s: float = 0.0  # resize and encode
    write_s: float = 0.0  # hash and write, beside the workers
    slowest: list[tuple[float, str, int]] = field(default_factory=list)

    def add(self, split: str, chunk: Chunk) -> None:
        self.merge(
            Tally(
                images=len(chunk.samples) + len(chunk.rejects),
                rejects=len(chunk.rejects),
                read_bytes=chunk.read_bytes,
                read_s=chunk.times.read_s,
                decode_s=chunk.times.decode_s,
                convert_s=chunk.times.convert_s,
                slowest=[(chunk.times.slow[0], split, chunk.times.slow[1])],
            )
        )

    def merge(self, other: Tally) -> None:
        self.images += other.images
        self.rejects += other.rejects
        self.read_bytes += other.read_bytes
        self.read_s += other.read_s
        self.decode_s += other.decode_s
        self.convert_s += other.convert_s
        self.write_s += other.write_s
        self.slowest = heapq.nlargest(_SLOWEST, self.slowest + other.slowest)
