"""Which samples, crops, flips and mixes make up batch i of the run?

The whole run (all stages and epochs, and the validation passes between them) is one sequence of batches,
known before it starts. `Plan.batch(i)` is a pure function of the shard set, the stages and the seed: no state,
no order of calls, nothing of the data's length in memory.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .errors import ResoluteError
from .recipe import Augment, Stage
from .rng import beta, permute, stream_key, uniforms
from .shards import ShardSet

__all__ = ["CUTMIX", "MIXUP", "UNMIXED", "BatchSpec", "Plan", "Segment", "part_bounds"]

UNMIXED, MIXUP, CUTMIX = 0, 1, 2
_RING, _ORDER, _AUGMENT, _MIX = range(4)  # purposes of random numbers
_CROP_TRIES = 10  # Source: torchvision RandomResizedCrop.get_params


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One pass: the training batches of an epoch, or one validation of the model after it."""

    split: Literal["train", "val"]
    stage: int
    epoch: int  # over the whole run, 0-based
    res: int  # px: what the model sees
    stored_res: int  # px: of the shards it is read from
    batch_size: int  # of its full batches
    samples: int
    first: int  # index of its first batch in the run's sequence
    first_step: int  # optimizer steps of the run before it
    offset: int  # training: where on the ring of all samples this epoch's part begins

    @property
    def batches(self) -> int:
        return -(-self.samples // self.batch_size)

    def bounds(self, k: int) -> tuple[int, int]:
        return part_bounds(self.samples, self.batch_size, k)


@dataclass(frozen=True, kw_only=True)
class BatchSpec:
    """Everything about one batch but the pixels. N is this rank's part; px are of the named image."""

    index: int  # in the run's sequence
    step: int  # optimizer step it belongs to; for validation: steps done before it
    split: Literal["train", "val"]
    stage: int
    epoch: int
    res: int  # px: what the model sees
    stored_res: int  # px: of the shards it is read from
    last: bool  # of its segment
    global_size: int  # samples over all ranks
    ids: NDArray[np.int64]  # (N,) sample numbers in the split
    windows: NDArray[np.int32]  # (N, 4) x, y, width, height in px of the stored image
    flips: NDArray[np.bool_]  # (N,)
    partners: NDArray[np.int32]  # (N,) position in this batch of the image mixed in
    modes: NDArray[np.int32]  # (N,) UNMIXED, MIXUP or CUTMIX
    lam: NDArray[np.float32]  # (N,) weight of the sample's own image and label
    boxes: NDArray[np.int32]  # (N, 4) x, y, width, height in px of the output that cutmix takes over

    def __len__(self) -> int:
        return len(self.ids)


def part_bounds(samples: int, batch_size: int, k: int) -> tuple[int, int]:
    """[start, end) of batch `k`: full batches, but the last two share what is left equally.

    So every sample is seen once and no training step ever gets a handful of them.
    """
    batches = -(-samples // batch_size)
    if k < batches - 2:
        return k * batch_size, (k + 1) * batch_size
    base = max(0, batches - 2) * batch_size
    middle = base + (samples - base + 1) // 2 if batches > 1 else samples
    return (base, middle) if k == max(0, batches - 2) else (middle, samples)


class Plan:
    """The run as a sequence of batches. Cheap to build, immutable, safe to share between threads."""

    def __init__(
        self,
        shards: ShardSet,
        stages: Sequence[Stage],
        *,
        seed: int = 0,
        fraction_mode: Literal["rotate", "fixed"] = "rotate",
        eval_batch_size: int | None = 256,
        eval_every_epochs: int = 1,
        eval_crop_frac: float | None = None,
    ) -> None:
        """`eval_batch_size=None` leaves validation out; `eval_crop_frac` is the centre crop's part of the short side.

        Raises `ResoluteError` if a split is empty, or `eval_res` is more than the open shards hold.
        """
        self.shards, self.stages, self.seed = shards, tuple(stages), seed
        self._eval_crop_frac = eval_crop_frac
        needed = ("train",) if eval_batch_size is None else ("train", "val")
        for split in needed:
            if split not in shards.splits or not len(shards.splits[split]):
                raise ResoluteError(f"{shards.root}: split {split} has no samples, expected some; rebuild it")
        self.segments: list[Segment] = []
        total, first, step, epoch, offset = len(shards.splits["train"]), 0, 0, 0, 0
        epochs = sum(stage.epochs for stage in self.stages)

        def add(number: int, split: Literal["train", "val"], samples: int, batch_size: int) -> None:
            nonlocal first, step
            stage = self.stages[number]
            res = stage.res if split == "train" else stage.eval_res or stage.res
            stored_res = res if split == "train" else self._stored_res(stage.res, res)
            segment = Segment(split=split, stage=number, epoch=epoch, res=res, stored_res=stored_res, samples=samples,
                              batch_size=batch_size, first=first, first_step=step, offset=offset)  # fmt: skip
            self.segments.append(segment)
            first += segment.batches
            step += segment.batches if split == "train" else 0

        for number, stage in enumerate(self.stages):
            for _ in range(stage.epochs):
                part = max(1, round(total * stage.fraction))
                add(number, "train", part, stage.batch_size)
                if eval_batch_size is not None and ((epoch + 1) % eval_every_epochs == 0 or epoch + 1 == epochs):
                    add(number, "val", len(shards.splits["val"]), eval_batch_size)
                if fraction_mode == "rotate":
                    offset = (offset + part) % total
                epoch += 1
        self.total_batches, self.total_steps = first, step
        self._firsts = [segment.first for segment in self.segments]

    def segment(self, index: int) -> Segment:
        if not 0 <= index < self.total_batches:
            raise IndexError(f"batch {index} of {self.total_batches}")
        return self.segments[bisect.bisect_right(self._firsts, index) - 1]

    def batch(self, index: int, *, rank: int = 0, world: int = 1) -> BatchSpec:
        """Rank `rank`'s part of batch `index`; the parts of all ranks, one after another, are the batch.

        Neighbours in the (random) order are each other's mix partners and are never split over ranks, so
        mixing needs no further image and does not depend on the number of ranks.
        """
        segment = self.segment(index)
        k = index - segment.first
        start, end = segment.bounds(k)
        pairs = (end - start + 1) // 2
        low = start + 2 * (rank * pairs // world)
        high = min(end, start + 2 * ((rank + 1) * pairs // world))
        if high <= low:
            raise ResoluteError(
                f"batch {index}: {end - start} samples cannot feed {world} ranks, expected 2 a rank; "
                f"use a larger batch_size or fewer ranks"
            )
        n = high - low
        modes, lam, boxes = np.zeros(n, np.int32), np.ones(n, np.float32), np.zeros((n, 4), np.int32)
        ids = self._ids(segment, np.arange(low, high))
        stored = self.shards.splits[segment.split].stored[segment.stored_res][ids]
        sizes = np.stack([stored["width"], stored["height"]], axis=1).astype(np.int64)
        if segment.split == "train":
            augment = self.stages[segment.stage].augment
            key = stream_key(self.seed, _AUGMENT, segment.epoch)
            u = uniforms(key, ids, 3 + 2 * _CROP_TRIES)
            windows = random_crops(sizes, u[:, 1:], augment)
            flips = u[:, 0] < augment.flip_prob
            mode, weight, box = self._mix(segment, k, augment)
            modes[:], lam[:], boxes[:] = mode, weight, box
        else:
            windows = centre_crops(sizes, self._crop_frac(segment))
            flips = np.zeros(n, bool)
        partners = np.minimum(np.arange(n, dtype=np.int32) ^ 1, n - 1).astype(np.int32)
        return BatchSpec(
            index=index, step=segment.first_step + (k if segment.split == "train" else 0),
            split=segment.split, stage=segment.stage, epoch=segment.epoch, res=segment.res,
            stored_res=segment.stored_res,
            last=k == segment.batches - 1, global_size=end - start, ids=ids, windows=windows, flips=flips,
            partners=partners, modes=modes, lam=lam, boxes=boxes,
        )  # fmt: skip

    def _stored_res(self, trained: int, res: int) -> int:
        """The smallest open resolution that has the detail for `res` px; that of training if both are the same."""
        if res == trained:
            return res
        there = sorted(self.shards.splits["val"].stored)
        for stored in there:
            if stored >= res:
                return stored
        raise ResoluteError(
            f"{self.shards.root}: nothing to validate at {res} px with, got {','.join(map(str, there))} px, expected "
            f"{res} or more; run `make shards` with a larger RES, or lower eval_res"
        )

    def _crop_frac(self, segment: Segment) -> float:
        if self._eval_crop_frac is not None:
            return self._eval_crop_frac
        # why: at its own resolution the crop is exactly res x res stored pixels, not just nearly
        own = segment.res == segment.stored_res
        return segment.res / self.shards.short_side(segment.res) if own else 1 / self.shards.margin

    def _ids(self, segment: Segment, places: NDArray[np.int64]) -> NDArray[np.int64]:
        if segment.split == "val":
            return places
        total = len(self.shards.splits["train"])
        shuffled = permute(stream_key(self.seed, _ORDER, segment.epoch), places, segment.samples)
        return permute(stream_key(self.seed, _RING), (segment.offset + shuffled) % total, total)

    def _mix(self, segment: Segment, k: int, augment: Augment) -> tuple[int, float, tuple[int, int, int, int]]:
        """Mode, lam and cutmix box of a batch. Source: timm.data.mixup (rand_bbox, lam corrected to the box)."""
        none = (UNMIXED, 1.0, (0, 0, 0, 0))
        alphas = {MIXUP: augment.mixup_alpha, CUTMIX: augment.cutmix_alpha}
        if not any(alphas.values()):
            return none
        key = stream_key(self.seed, _MIX, segment.epoch)
        mixed, which, x, y = uniforms(key, np.asarray([k]), 4)[0]
        if mixed >= augment.mix_prob:
            return none
        cut = which < augment.cutmix_prob if all(alphas.values()) else augment.cutmix_alpha > 0
        mode = CUTMIX if cut else MIXUP
        lam = beta(stream_key(key, 1), k, alphas[mode])
        if mode == MIXUP:
            return mode, lam, (0, 0, 0, 0)
        res = segment.res
        half = int(res * np.sqrt(1.0 - lam)) // 2
        x0, x1 = np.clip([int(x * res) - half, int(x * res) + half], 0, res)
        y0, y1 = np.clip([int(y * res) - half, int(y * res) + half], 0, res)
        if x0 == x1 or y0 == y1:
            return none
        return mode, 1.0 - (x1 - x0) * (y1 - y0) / res**2, (x0, y0, x1 - x0, y1 - y0)


def random_crops(sizes: NDArray[np.int64], u: NDArray[np.float64], augment: Augment) -> NDArray[np.int32]:
    """Random-resized-crop windows (N, 4) x, y, w, h for `sizes` (N, 2) w, h and uniforms `u` (N, 22).

    Source: torchvision RandomResizedCrop.get_params: ten tries of (area, log ratio), then a centre crop.
    """
    width, height = sizes[:, :1], sizes[:, 1:]
    low, high = augment.crop_area
    area = width * height * (low + (high - low) * u[:, 2 : 2 + _CROP_TRIES])
    low, high = np.log(augment.crop_ratio)
    ratio = np.exp(low + (high - low) * u[:, 2 + _CROP_TRIES :])
    w, h = np.rint(np.sqrt(area * ratio)), np.rint(np.sqrt(area / ratio))
    good = (w >= 1) & (w <= width) & (h >= 1) & (h <= height)
    first = np.argmax(good, axis=1)
    rows = np.arange(len(sizes))
    w, h = w[rows, first], h[rows, first]
    failed = ~good[rows, first]
    if failed.any():  # long, thin images: the largest centred window of an allowed ratio
        side = sizes[failed].astype(np.float64)
        limited = np.clip(side[:, 0] / side[:, 1], *augment.crop_ratio)
        w[failed] = np.maximum(1, np.minimum(side[:, 0], np.rint(side[:, 1] * limited)))
        h[failed] = np.maximum(1, np.minimum(side[:, 1], np.rint(side[:, 0] / limited)))
    x = np.floor(u[:, 0] * (sizes[:, 0] - w + 1))
    y = np.floor(u[:, 1] * (sizes[:, 1] - h + 1))
    x[failed] = (sizes[failed, 0] - w[failed]) // 2
    y[failed] = (sizes[failed, 1] - h[failed]) // 2
    return np.stack([x, y, w, h], axis=1).astype(np.int32)


def centre_crops(sizes: NDArray[np.int64], frac: float) -> NDArray[np.int32]:
    """Validation windows (N, 4): centred squares whose side is `frac` of the short side, in px."""
    side = np.maximum(1, np.rint(sizes.min(axis=1) * frac)).astype(np.int64)
    corner = np.rint((sizes - side[:, None]) / 2)
    return np.concatenate([corner, side[:, None], side[:, None]], axis=1).astype(np.int32)
