"""In what order do samples lie in the shards, and how well are classes mixed there?"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from math import exp, floor, lgamma, log, log1p, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.plan.rng import permute, stream_key

__all__ = ["Mixing", "mixing", "shuffled"]

_ORDER = 0x4F52_44  # names the random stream of the order
WINDOW_SAMPLES = 256


def shuffled(seed: int, split: str, count: int, keys: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
    """(n,) int64: which of the `count` sorted paths is each of the samples `keys` (all of them if None)."""
    keys = np.arange(count, dtype=np.int64) if keys is None else keys
    key = stream_key(seed, _ORDER, zlib.crc32(split.encode()))
    return permute(key, keys, count)


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """Mean total-variation distance to the overall class mix: 0 is perfectly even, near 1 is sorted."""

    measured: float
    expected: float  # of a perfect shuffle


def mixing(labels: NDArray[Any], window: int = WINDOW_SAMPLES) -> Mixing:
    """How far the class mix of consecutive windows of samples is from the overall mix, on average.

    `labels` (N,) integers in shard order. Returns the mean total-variation distance over whole windows, and
    what independent draws would give: the mean absolute deviation of a binomial, in closed form, times the
    finite-population factor. A good shuffle measures within a few percent of it; sorted classes near 1.
    Source: De Moivre 1730, see Diaconis and Zabell, "Closed form summation for classical distributions",
    Statistical Science 6(3), 1991: E|X - np| = 2 (m+1) C(n, m+1) p^(m+1) (1-p)^(n-m), m = floor(np).
    """
    total = len(labels)
    window = min(window, total)
    if window < 1:
        return Mixing(measured=0.0, expected=0.0)
    counts = np.bincount(labels)
    share = counts / total
    windows = np.asarray(labels)[: total // window * window].reshape(-1, window)
    distances = [np.abs(np.bincount(row, minlength=len(share)) / window - share).sum() / 2 for row in windows]
    finite = sqrt((total - window) / max(1, total - 1))
    expected = sum(_mean_deviation(window, float(p)) for p in share if 0 < p < 1) / window / 2 * finite
    return Mixing(measured=float(np.mean(distances)), expected=expected)


def _mean_deviation(n: int, p: float) -> float:
    m = floor(n * p)
    if m >= n:
        return 0.0
    log_choose = lgamma(n + 1) - lgamma(m + 2) - lgamma(n - m)
    return 2 * (m + 1) * exp(log_choose + (m + 1) * log(p) + (n - m) * log1p(-p))
