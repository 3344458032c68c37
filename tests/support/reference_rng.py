"""Slow, simple oracles: the random numbers of `pipeline.plan.rng` in plain NumPy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

U64 = np.uint64
_LOW32, _SHIFT32 = U64(0xFFFFFFFF), U64(32)
_M0, _M1, _W0, _W1 = U64(0xD2511F53), U64(0xCD9E8D57), 0x9E3779B9, 0xBB67AE85


def philox(counter: NDArray[np.uint64], key: int) -> NDArray[np.uint32]:
    c0, c1, c2, c3 = (counter[..., i].astype(U64) for i in range(4))
    k0, k1 = key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF
    for _ in range(10):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (
            (p1 >> _SHIFT32) ^ c1 ^ U64(k0),
            p1 & _LOW32,
            (p0 >> _SHIFT32) ^ c3 ^ U64(k1),
            p0 & _LOW32,
        )
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
