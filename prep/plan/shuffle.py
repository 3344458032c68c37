"""The order of samples in the shards, a seeded permutation, and a measure of how well it mixes the classes."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from math import exp, floor, lgamma, log, log1p, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resolute.pipeline.plan.rng import permute, stream_key

__all__ = ["Mixing", "mixing", "shuffled"]

_ORDER = 0x4F52_44  # identifies the random stream of the order
WINDOW_SAMPLES = 256


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


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """Mean total-variation distance of windows from the overall class mix: 0 is perfectly even, sorted is near 1."""

    measured: float
    expected: float  # for a random order


def mixing(labels: NDArray[Any], window: int = WINDOW_SAMPLES) -> Mixing:
    """Measure how far the class mix of consecutive windows of samples is from the overall mix, on average.

    `labels` (N,) are integers in shard order. Returns the mean total-variation distance over full windows, and its
    expectation for a random order: the mean absolute deviation of a binomial, in closed form, times the
    finite-population factor. A good shuffle is within a few percent of the latter; sorted classes are near 1.

    Source: De Moivre 1730, see Diaconis and Zabell, "Closed form summation for classical distributions", Statistical
    Science 6(3), 1991: E|X - np| = 2 (m+1) C(n, m+1) p^(m+1) (1-p)^(n-m), m = floor(np).
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
