"""Division of an epoch's samples into batches: the resolution and the size of each batch, in O(1).

`epoch_batches` is a pure function of a stage, the number of samples and, for drawn resolutions, the seed. The number of
batches never depends on the seed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .permutation import stream_key
from .rng import Stream, permute
from .stage import BatchShape, Stage

__all__ = ["BatchSequence", "each_epoch", "epoch_batches", "rank_bounds"]


@dataclass(frozen=True, kw_only=True)
class BatchSequence:
    """Consecutive batches of an epoch, all of one shape, or of several shapes in turn.

    With several, each group of `len(shapes)` consecutive batches has every shape once, in a random order. The last
    batches, between one and two groups of them, have the shapes in their own order, from number `rotation` on. Every
    sample is used exactly once. The last two batches share the remaining samples in proportion to their sizes, so no
    training step has only a few samples: of one shape, each has at least half a batch.
    """

    shapes: tuple[BatchShape, ...]
    samples: int
    start: int = 0  # position of its first sample in the epoch
    first: int = 0  # number of its first batch in the epoch
    rotation: int = 0
    key: int = 0  # of the random order; several shapes only

    @property
    def batches(self) -> int:
        return self._groups * len(self.shapes) + len(self._tail)

    def at(self, k: int) -> tuple[BatchShape, int, int]:
        """Shape of batch `k` of the sequence, and its [start, end) as positions in the epoch."""
        group, place = divmod(k, len(self.shapes))
        if group >= self._groups:
            shape, low, high = self._tail[k - self._groups * len(self.shapes)]
            return shape, self.start + low, self.start + high
        low = self.start + group * self._group_samples
        if len(self.shapes) == 1:
            return self.shapes[0], low, low + self._group_samples
        order = permute(stream_key(self.key, group), np.arange(len(self.shapes)), len(self.shapes)).tolist()
        low += sum(self.shapes[i].batch_size for i in order[:place])
        return self.shapes[order[place]], low, low + self.shapes[order[place]].batch_size

    @property
    def distinct_batches(self) -> Iterator[int]:
        """Numbers of batches of the sequence in which each combination of resolution and number of samples occurs."""
        yield from range(min(self._groups, 1) * len(self.shapes))
        yield from range(self._groups * len(self.shapes), self.batches)

    @functools.cached_property
    def _group_samples(self) -> int:
        return sum(shape.batch_size for shape in self.shapes)

    @functools.cached_property
    def _groups(self) -> int:
        """Groups of full batches in a random order."""
        return max(0, self.samples // self._group_samples - 1)

    @functools.cached_property
    def _tail(self) -> list[tuple[BatchShape, int, int]]:
        """The batches after these groups, at most two for each shape, with [start, end) in the sequence."""
        low, tail = self._groups * self._group_samples, list[tuple[BatchShape, int, int]]()
        while low < self.samples:
            shape = self.shapes[(self.rotation + len(tail)) % len(self.shapes)]
            tail.append((shape, low, min(low + shape.batch_size, self.samples)))
            low += shape.batch_size
        if len(tail) > 1:
            (before, start, _), (last, _, end) = tail[-2:]
            share = -(-(end - start) * before.batch_size // (before.batch_size + last.batch_size))
            tail[-2:] = [(before, start, start + share), (last, start + share, end)]
        return tail


def epoch_batches(
    stage: Stage, *, samples: int, epoch: int, seed: int = 0, run_epoch: int = 0
) -> tuple[BatchSequence, ...]:
    """The batches of epoch `epoch` of the stage, which is epoch `run_epoch` of the run; `samples` per epoch.

    A ramp by epoch divides the stage's epochs evenly among its resolutions, in their order, a ramp by step its samples;
    there each resolution but the last of an epoch has full batches only.
    """
    shapes = stage.shapes
    if len(shapes) == 1:
        return (BatchSequence(shapes=shapes, samples=samples),)
    if stage.res_schedule == "random":
        key = stream_key(seed, Stream.RES, run_epoch)
        return (BatchSequence(shapes=shapes, samples=samples, rotation=epoch, key=key),)
    if stage.res_schedule != "step":
        return (BatchSequence(shapes=(shapes[epoch * len(shapes) // stage.epochs],), samples=samples),)
    sequences, at = list[BatchSequence](), 0
    for number, shape in enumerate(shapes, 1):
        # position in this epoch at which the next resolution begins
        end = number * stage.epochs * samples // len(shapes) - epoch * samples
        count = (2 * (end - at) + shape.batch_size) // (2 * shape.batch_size)  # rounded to the nearest
        if count <= 0 and end < samples:
            continue
        rest = samples - at - count * shape.batch_size
        is_last = end >= samples or 2 * rest < shapes[number].batch_size  # why: no batch of only a few samples
        length = samples - at if is_last else count * shape.batch_size
        first = sum(sequence.batches for sequence in sequences)
        sequences.append(BatchSequence(shapes=(shape,), samples=length, start=at, first=first))
        if is_last:
            break
        at += length
    return tuple(sequences)


def each_epoch(
    stages: Sequence[Stage], *, samples: int, seed: int = 0
) -> Iterator[tuple[int, int, tuple[BatchSequence, ...]]]:
    """(stage number, samples, batches) of each epoch of a run on a set of `samples` training samples."""
    run_epoch = 0
    for number, stage in enumerate(stages):
        count = max(1, round(samples * stage.fraction))
        for epoch in range(stage.epochs):
            yield number, count, epoch_batches(stage, samples=count, epoch=epoch, seed=seed, run_epoch=run_epoch)
            run_epoch += 1


def rank_bounds(start: int, end: int, *, rank: int, world_size: int, pairs: bool) -> tuple[int, int]:
    """[low, high) of rank `rank` within a batch's [start, end); with `pairs`, neighbouring pairs are not split.

    No rank gets an empty range if there are at least `world_size` samples (with `pairs`: pairs; the last may be half).
    """
    if not pairs:
        return start + rank * (end - start) // world_size, start + (rank + 1) * (end - start) // world_size
    count = (end - start + 1) // 2
    return start + 2 * (rank * count // world_size), min(end, start + 2 * ((rank + 1) * count // world_size))
