"""The order of samples in the shards, a seeded permutation."""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

from resolute.pipeline.plan.permutation import permute, stream_key

__all__ = ["shuffled"]

_ORDER = 0x4F52_44  # identifies the random stream of the order


def shuffled(
    seed: int, split: str, count: int, keys: NDArray[np.int64] | None = None, *, generation: int = 0
) -> NDArray[np.int64]:
    """(n,) int64: index among the sorted images of each of the samples `keys` (None: all `count` of them).

    The images are those of a split in one generation, and `keys` counts from its first. Each generation has an order
    of its own.
    """
    keys = np.arange(count, dtype=np.int64) if keys is None else keys
    key = stream_key(seed, _ORDER, zlib.crc32(split.encode()), *([generation] if generation else []))
    return permute(key, keys, count)
