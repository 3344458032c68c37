"""How does a random number follow from (seed, epoch, sample) alone?

Two counter-based primitives, both vectorised and both free of state, so that order and augmentation never
depend on worker count, rank count or where a run was cut:

* `uniforms`: Philox4x32-10, numbers for a key and a counter;
* `permute`: a Feistel network with cycle walking, one element of a permutation in O(1) memory.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["beta", "permute", "philox", "stream_key", "uniforms"]

U64 = np.uint64
_LOW32 = U64(0xFFFFFFFF)
_SHIFT32 = U64(32)
# Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Random123).
_M0, _M1 = U64(0xD2511F53), U64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_MASK64 = (1 << 64) - 1


def philox(counter: NDArray[np.uint64], key: int) -> NDArray[np.uint32]:
    """Philox4x32-10: `counter` (..., 4) of 32-bit words in uint64, 64-bit `key` -> (..., 4) uint32."""
    c0, c1, c2, c3 = (counter[..., i].astype(U64) for i in range(4))
    k0, k1 = key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (
            (p1 >> _SHIFT32) ^ c1 ^ U64(k0),
            p1 & _LOW32,
            (p0 >> _SHIFT32) ^ c3 ^ U64(k1),
            p0 & _LOW32,
        )
        k0, k1 = (k0 + _W0) & 0xFFFFFFFF, (k1 + _W1) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def stream_key(*parts: int) -> int:
    """One 64-bit key from a few integers (seed, purpose, epoch ...). Source: SplitMix64's finalizer."""
    key = 0
    for part in parts:
        key = (key ^ (part & _MASK64)) + 0x9E3779B97F4A7C15 & _MASK64
        key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
        key = (key ^ key >> 27) * 0x94D049BB133111EB & _MASK64
        key ^= key >> 31
    return key


def uniforms(key: int, ids: NDArray[np.int64], count: int) -> NDArray[np.float64]:
    """`count` numbers in [0, 1) for each of `ids` (N,), 32 bits each: (N, count) float64."""
    blocks = -(-count // 4)
    counter = np.zeros((len(ids), blocks, 4), U64)
    wide = ids.astype(U64)
    counter[..., 0] = np.arange(blocks, dtype=U64)
    counter[..., 1] = (wide & _LOW32)[:, None]
    counter[..., 2] = (wide >> _SHIFT32)[:, None]
    return philox(counter, key).reshape(len(ids), blocks * 4)[:, :count].astype(np.float64) * 2.0**-32


def beta(key: int, index: int, alpha: float) -> float:
    """One draw of Beta(alpha, alpha) for counter `index`.

    Source: M. D. Jöhnk, "Erzeugung von betaverteilten und gammaverteilten Zufallszahlen", Metrika 8, 1964:
    accept u^(1/a) / (u^(1/a) + v^(1/a)) where the sum is at most 1. Accepts half the pairs at alpha = 1,
    nearly all at small alpha.
    """
    attempt = 0
    while True:
        pairs = uniforms(stream_key(key, attempt), np.asarray([index]), 64).reshape(-1, 2)
        x, y = (np.maximum(pairs, 2.0**-33) ** (1.0 / alpha)).T
        good = np.flatnonzero((x + y <= 1.0) & (x + y > 0.0))
        if len(good):
            return float(x[good[0]] / (x[good[0]] + y[good[0]]))
        attempt += 1


def permute(key: int, positions: NDArray[np.int64], n: int) -> NDArray[np.int64]:
    """Images of `positions` (any shape, each in [0, n)) under the permutation of [0, n) named by `key`.

    A balanced Feistel network over the next power of four, walked until the value falls below n (under
    four rounds of the walk on average). O(1) memory: nothing of length n exists.
    Source: Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002.
    """
    half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
    half, mask = U64(half_bits), U64((1 << half_bits) - 1)
    keys = [U64(stream_key(key, i)) for i in range(6)]
    out = np.array(positions, dtype=U64)
    walking = np.ones(out.shape, bool)
    with np.errstate(over="ignore"):
        while walking.any():
            left, right = out[walking] >> half, out[walking] & mask
            for k in keys:
                left, right = right, left ^ (_mix(right ^ k) & mask)
            out[walking] = left << half | right
            walking = out >= U64(n)
    return out.astype(np.int64)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ x >> U64(30)) * U64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> U64(27)) * U64(0x94D049BB133111EB)
    return x ^ x >> U64(31)
