"""Slow, simple oracles: the random numbers of `pipeline.plan.rng` in plain NumPy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from resolute.pipeline.plan.rng import stream_key

U64 = np.uint64
_LOW32, _SHIFT32 = U64(0xFFFFFFFF), U64(32)
_M0, _M1, _W0, _W1 = U64(0xD2511F53), U64(0xCD9E8D57), 0x9E3779B9, 0xBB67AE85


def philox(counter: NDArray[np.uint64], key: int) -> NDArray[np.uint32]:
    c0, c1, c2, c3 = (counter[..., i].astype(U64) for i in range(4))
    k0, k1 = key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF
    for _ in range(10):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (
            (p1 >> _SHIFT32) ^ c1 ^ U64(k0), p1 & _LOW32, (p0 >> _SHIFT32) ^ c3 ^ U64(k1), p0 & _LOW32,
        )  # fmt: skip
        k0, k1 = (k0 + _W0) & 0xFFFFFFFF, (k1 + _W1) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def uniforms(key: int, ids: NDArray[np.int64], count: int) -> NDArray[np.float64]:
    blocks = -(-count // 4)
    counter = np.zeros((len(ids), blocks, 4), U64)
    wide = ids.astype(U64)
    counter[..., 0] = np.arange(blocks, dtype=U64)
    counter[..., 1] = (wide & _LOW32)[:, None]
    counter[..., 2] = (wide >> _SHIFT32)[:, None]
    return philox(counter, key).reshape(len(ids), blocks * 4)[:, :count].astype(np.float64) * 2.0**-32


def permute(key: int, positions: NDArray[np.int64], n: int) -> NDArray[np.int64]:
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
