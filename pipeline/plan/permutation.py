"""Keys of random streams, and the permutation that a key selects: pure functions, in NumPy.

why apart from `rng`: numba, which that module needs, takes a fifth of a second to import, and prep starts without it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["FEISTEL_ROUNDS", "permute", "stream_key"]

U64 = np.uint64
_MASK64 = (1 << 64) - 1
# Source: SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
_STEP, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
FEISTEL_ROUNDS = 6
_CHUNK = 1 << 14  # places at a time: their arrays stay in the CPU's cache


def stream_key(*parts: int) -> int:
    """Hash integers (seed, purpose, epoch, ...) to a 64-bit key. Source: SplitMix64's finalizer."""
    key = 0
    for part in parts:
        key = _derived(key, part)
    return key


def permute(key: int, positions: NDArray[np.int64], n: int) -> NDArray[np.int64]:
    """Apply the permutation of [0, n) selected by `key` to `positions` (any shape, each in [0, n)): int64.

    A balanced Feistel network over the next power of four, applied again until the value is below n (fewer than
    four times on average). Temporary memory is constant.
    Source: Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002.
    """
    places = np.ascontiguousarray(positions, np.int64)
    out = np.empty(places.shape, np.int64)
    flat_places, flat_out = places.reshape(-1), out.reshape(-1)
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    rounds = [U64(_derived(stream_key(key), i)) for i in range(FEISTEL_ROUNDS)]
    for first in range(0, len(flat_places), _CHUNK):
        values = _feistel(flat_places[first : first + _CHUNK].astype(U64), half, rounds)
        while len(outside := np.flatnonzero(values >= n)):
            values[outside] = _feistel(values[outside], half, rounds)
        flat_out[first : first + _CHUNK] = values
    return out


def _feistel(values: NDArray[np.uint64], half: int, rounds: list[np.uint64]) -> NDArray[np.uint64]:
    """A permutation of the numbers of 2 * `half` bits, by the keys of the rounds."""
    bits, mask = U64(half), U64((1 << half) - 1)
    left, right = values >> bits, values & mask
    for key in rounds:
        mixed = right ^ key
        mixed ^= mixed >> U64(30)
        mixed *= U64(_MIX_1)
        mixed ^= mixed >> U64(27)
        mixed *= U64(_MIX_2)
        mixed ^= mixed >> U64(31)
        mixed &= mask
        left, right = right, left ^ mixed
    return (left << bits) | right


def _derived(key: int, part: int) -> int:
    key = (key ^ (part & _MASK64)) + _STEP & _MASK64
    key = (key ^ key >> 30) * _MIX_1 & _MASK64
    key = (key ^ key >> 27) * _MIX_2 & _MASK64
    return key ^ key >> 31
