"""Sampling by class: how often an epoch draws samples of each class, and which ones.

A draw is one use of a sample in an epoch. Samples are divided into groups: by their class, or, if they can have several
classes, by the rarest of them; samples without any class are a group of their own. With N samples in the split,

* every N consecutive draws of the run from the first on contain exactly `quotas[g]` draws of group g, evenly spread:
  an epoch of N draws has exactly its quotas, a shorter one its share of them, up to rounding;
* a group's draws go through its samples in one fixed random order, over and over, across epochs. So the samples of a
  group are drawn equally often, up to one draw, in every epoch and in any number of consecutive epochs.

A sample is drawn in proportion to its weight, the largest weight of its classes. That of a class with n samples is 1/n
for "balanced", so that all classes are drawn equally often, and 1/sqrt(n) for "sqrt": classes in proportion to sqrt(n).
Sources: both: Kang et al., arXiv 1910.09217, section 3; the largest weight of several classes: Gupta et al. (LVIS),
arXiv 1908.03195, appendix B.2.

Memory: 4 bytes per sample (while they are computed about 20), and for the order `windowed` 4 bytes per draw of up to
two epochs. A batch takes O(1) time, the first of a run O(N), the first of an epoch with `windowed` O(N log N).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from resolute.pipeline.dataset.target import Target
from resolute.pipeline.jit import compiled

from .permutation import stream_key
from .rng import U64, Stream, derive, half_bits, permute_index, uniforms

__all__ = ["ClassSampling", "EpochDraws", "Sampling", "quotas"]

Sampling = Literal["uniform", "balanced", "sqrt"]

_LAP_BITS = U64(32)  # a lap is divided into 2^32 ticks, more than it has draws
_CHUNK = 1 << 22  # numbers per step when targets are read


class ClassSampling:
    """The draws of a run from one split. Pure functions of the split's targets and the seed; thread-safe."""

    def __init__(self, samples: NDArray[np.void], target: Target, sampling: Sampling, *, seed: int) -> None:
        """Read the targets of a split once, `samples` being its records: O(N)."""
        self._samples, self._target, self._key = samples, target, U64(stream_key(seed, Stream.CLASS_ORDER))
        per_class = target.counts(samples)
        groups = target.strata(samples)
        self.sizes: NDArray[np.int64] = np.bincount(groups, minlength=len(target) + (target.kind == "labels"))
        rarest = self.sizes.copy()  # samples of the class by which a group is weighted
        rarest[: len(target)] = per_class
        divisor = np.maximum(rarest, 1.0)
        self.quotas = quotas(len(samples), self.sizes / (divisor if sampling == "balanced" else np.sqrt(divisor)))
        # why the smallest type: numpy sorts 16 bits several times faster
        small = groups.astype(np.min_scalar_type(len(self.sizes)))
        self._by_group = np.argsort(small, kind="stable").astype(np.uint32)
        self._first = np.concatenate([[0], np.cumsum(self.sizes)])
        phases = uniforms(stream_key(seed, Stream.CLASS_PHASE), np.arange(len(self.sizes)), 1)[:, 0]
        self._phases = (phases * 2.0**32).astype(np.uint64)
        self.epoch = functools.lru_cache(maxsize=2)(self._epoch)

    def _epoch(self, begun: int, samples: int, fixed: bool) -> EpochDraws:
        """The `samples` draws of an epoch with `begun` draws of the run before it.

        `fixed`: use only the first samples of each group, in proportion to the length of the epoch; those of a shorter
        epoch are among them.
        """
        before = self._drawn(begun)
        total = len(self._by_group)
        return EpochDraws(
            counts=self._drawn(begun + samples) - before,
            begun=before,
            available=np.maximum(1, -(-self.sizes * samples // total) if fixed else self.sizes),
            first=self._first,
            by_group=self._by_group,
            key=self._key,
        )

    def class_draws(self, *, ignored: bool = False) -> NDArray[np.float64]:
        """(C,) float64: draws of samples of each class in N draws, on average over the run.

        `ignored`: of the samples in which a label is ignored.
        """
        if self._target.kind == "class":
            return self.quotas.astype(np.float64)
        rates = np.repeat(self.quotas / np.maximum(self.sizes, 1), self.sizes)
        out, step = np.zeros(len(self._target)), max(1, _CHUNK // len(self._target))
        of = self._target.ignores_label if ignored else self._target.has_label
        for at in range(0, len(rates), step):
            records = self._samples[self._by_group[at : at + step]]
            out += rates[at : at + step] @ of(records)
        return out

    def _drawn(self, total: int) -> NDArray[np.int64]:
        """Draws of each group (groups,) int64 among the first `total` of the run; their sum is `total`.

        At tick x of a lap, group g has been drawn floor(x * quota / ticks + phase) times, with a random phase in [0, 1)
        for each group. The tick at which all of them sum to `total` is found by bisection; of groups that are drawn in
        the same tick, the last are first.
        """
        laps, total = divmod(total, len(self._by_group))
        low, high = 0, 1 << int(_LAP_BITS)  # the first tick with a sum of at least `total` is in (low, high] or 0
        while high - low > 1 and total:
            middle = (low + high) // 2
            low, high = (low, middle) if int(self._at_tick(middle).sum()) >= total else (middle, high)
        if not total:
            return laps * self.quotas
        drawn = self._at_tick(high)
        together = np.flatnonzero(drawn > self._at_tick(high - 1))
        drawn[together[: int(drawn.sum()) - total]] -= 1
        return laps * self.quotas + drawn

    def _at_tick(self, tick: int) -> NDArray[np.int64]:
        return ((U64(tick) * self.quotas.astype(np.uint64) + self._phases) >> _LAP_BITS).astype(np.int64)


@dataclass(frozen=True, kw_only=True, eq=False)
class EpochDraws:
    """The draws of one epoch, numbered from 0, group by group."""

    counts: NDArray[np.int64]  # (groups,) draws of each group
    begun: NDArray[np.int64]  # (groups,) draws of each group in the run before this epoch
    available: NDArray[np.int64]  # (groups,) samples of each group that this epoch may draw
    first: NDArray[np.int64]  # (groups + 1,) where each group begins in `by_group`
    by_group: NDArray[np.uint32]  # (N,) sample numbers
    key: np.uint64

    def ids(self, draws: NDArray[np.int64]) -> NDArray[np.int64]:
        """The sample numbers (n,) int64 of the draws (n,), each in [0, the sum of `counts`)."""
        out = np.empty(len(draws), np.int64)
        _ids(
            np.ascontiguousarray(draws, np.int64),
            np.cumsum(self.counts),
            self.counts,
            self.begun,
            self.available,
            self.first,
            self.by_group,
            self.key,
            out,
        )
        return out

    @functools.cached_property
    def stored_order(self) -> NDArray[np.uint32]:
        """The sample numbers of all draws, ascending."""
        ids = self.ids(np.arange(self.counts.sum())).astype(np.uint32)
        ids.sort()
        return ids


def quotas(total: int, weights: NDArray[np.float64]) -> NDArray[np.int64]:
    """Divide `total` in proportion to `weights` (G,) by the largest remainder: (G,) int64 with that sum.

    No part with a positive weight is 0. `total` is at least the number of these parts, and at least one is positive.
    """
    exact = total * weights / math.fsum(weights)  # why fsum: correctly rounded, so the same on every machine
    parts = np.maximum(np.floor(exact), weights > 0).astype(np.int64)
    rest = total - int(parts.sum())
    if rest >= 0:
        parts[np.argsort(parts - exact, kind="stable")[:rest]] += 1
    while rest < 0:  # several parts were raised to 1
        large = np.flatnonzero(parts > 1)
        large = large[np.argsort(-parts[large], kind="stable")][:-rest]
        parts[large] -= 1
        rest += len(large)
    return parts


@compiled
def _ids(
    draws: Any, ends: Any, counts: Any, begun: Any, available: Any, first: Any, by_group: Any, key: Any, out: Any
) -> None:
    for i in range(len(draws)):
        group = np.searchsorted(ends, draws[i], side="right")
        number = begun[group] + draws[i] - (ends[group] - counts[group])  # of this group's draws in the run
        size = first[group + 1] - first[group]
        place = permute_index(derive(key, U64(group)), number % available[group], size, half_bits(size))
        out[i] = by_group[first[group] + place]
