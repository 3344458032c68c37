"""Which samples, crops, flips and mixes make up batch i of the run?

The whole run (all stages and epochs, and the validation passes between them) is one sequence of batches,
known before it starts. `Plan.batch(i)` is a pure function of the shard set, the stages and the seed: no state,
no order of calls, nothing of the data's length in memory.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.shard_set import ShardSet
from pipeline.errors import ResoluteError

from .crops import CROP_UNIFORMS, centre_crops, random_crops
from .order import Order, sample_ids
from .rng import beta, stream_key, uniforms
from .sampling import CUTMIX, MIXUP, UNMIXED, cutmix_boxes, augment_params, mixes
from .stage import AUTO, Augment, Stage

__all__ = ["CUTMIX", "MIXUP", "UNMIXED", "BatchSpec", "Plan", "Segment", "batch_bounds"]

_FORMAT = 1  # of `Plan.identity`, and of how batches follow from it
_AUGMENT, _MIX = 2, 3  # purposes of random numbers; order.py has 0 and 1


@dataclass(frozen=True, kw_only=True)
class Pass:
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
    order: Order  # of training; validation reads as stored

    @property
    def batches(self) -> int:
        return -(-self.samples // self.batch_size)

    def bounds(self, k: int) -> tuple[int, int]:
        return batch_bounds(self.samples, self.batch_size, k)

    def max_batch(self, *, rank: int, world_size: int) -> int:
        """Samples of the largest batch of rank `rank`."""
        sizes = []
        for k in {0, max(0, self.batches - 2), self.batches - 1}:  # all others are as the first
            start, end = self.bounds(k)
            low, high = rank_bounds(start, end, rank=rank, world_size=world_size, pairs=self.split == "train")
            sizes.append(high - low)
        return max(sizes)

    def smallest(self) -> int:
        """Samples of its smallest batch."""
        last = (batch_bounds(self.samples, self.batch_size, k) for k in {0, max(0, self.batches - 2), self.batches - 1})
        return min(end - start for start, end in last)


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
    crops: NDArray[np.int32]  # (N, 4) x, y, width, height in px of the stored image
    flips: NDArray[np.bool_]  # (N,)
    partners: NDArray[np.int32]  # (N,) position in this batch of the image mixed in
    modes: NDArray[np.int32]  # (N,) UNMIXED, MIXUP or CUTMIX
    lam: NDArray[np.float32]  # (N,) weight of the sample's own image and label
    boxes: NDArray[np.int32]  # (N, 4) x, y, width, height in px of the output that cutmix takes over
    augment_params: Mapping[str, NDArray[np.generic]] = field(default_factory=dict)  # other augmentation: see draws.draw

    def __len__(self) -> int:
        return len(self.ids)


def batch_bounds(samples: int, batch_size: int, k: int) -> tuple[int, int]:
    """[start, end) of batch `k`: full batches, but the last two share what is left equally.

    So every sample is seen once and no training step ever gets a handful of them.
    """
    batches = -(-samples // batch_size)
    if k < batches - 2:
        return k * batch_size, (k + 1) * batch_size
    base = max(0, batches - 2) * batch_size
    middle = base + (samples - base + 1) // 2 if batches > 1 else samples
    return (base, middle) if k == max(0, batches - 2) else (middle, samples)


def rank_bounds(start: int, end: int, *, rank: int, world_size: int, pairs: bool) -> tuple[int, int]:
    """[low, high) of a batch's [start, end) that is rank `rank`'s; `pairs` of neighbours are never split.

    No rank's is empty if there is a sample (or a pair, of which the last may lack one) for each.
    """
    if not pairs:
        return start + rank * (end - start) // world_size, start + (rank + 1) * (end - start) // world_size
    count = (end - start + 1) // 2
    return start + 2 * (rank * count // world_size), min(end, start + 2 * ((rank + 1) * count // world_size))


class Plan:
    """The run as a sequence of batches. Cheap to build, immutable, safe to share between threads."""

    def __init__(
        self,
        shards: ShardSet,
        stages: Sequence[Stage],
        *,
        seed: int = 0,
        order: Order = "full",
        fraction_mode: Literal["rotate", "fixed"] = "rotate",
        eval_batch_size: int | None = 256,
        eval_every_epochs: int = 1,
        eval_crop_frac: float | None = None,
    ) -> None:
        """`order` is that of stages that have none of their own; see `pipeline.plan.order`.

        `eval_batch_size=None` leaves validation out; `eval_crop_frac` is the centre crop's part of the short side.

        Raises `ResoluteError` if a split is empty, `order` is none of the two, a batch size is still "auto", or
        `eval_res` is more than the open shards hold.
        """
        if order not in ("full", "block"):
            raise ResoluteError(
                f"order: got {order}, expected full or block; for auto ask `choose_order` and keep it"
            )
        if any(stage.batch_size == AUTO for stage in stages):
            raise ResoluteError(
                "stages.batch_size: got auto, expected a number: only training on a GPU finds one; put it in the recipe"
            )
        self.shards, self.stages, self.seed, self.order = shards, tuple(stages), seed, order
        self._fraction_mode, self._eval_batch_size = fraction_mode, eval_batch_size
        self._eval_every_epochs, self._eval_crop_frac = eval_every_epochs, eval_crop_frac
        needed = ("train",) if eval_batch_size is None else ("train", "val")
        for split in needed:
            if split not in shards.splits or not len(shards.splits[split]):
                remedy = "hold out a part with val (--val 0.1, make: VAL=0.1)" if shards.single_resolution else "rebuild it"
                raise ResoluteError(f"{shards.root}: split {split} has no samples, expected some; {remedy}")
        self.passes: list[Pass] = []
        total, first, step, epoch, offset = len(shards.splits["train"]), 0, 0, 0, 0
        epochs = sum(stage.epochs for stage in self.stages)

        def add(number: int, split: Literal["train", "val"], samples: int, batch_size: int) -> None:
            nonlocal first, step
            stage = self.stages[number]
            res = stage.res if split == "train" else stage.eval_res or stage.res
            stored_res = res if split == "train" else self._stored_res(stage.res, res)
            segment = Pass(split=split, stage=number, epoch=epoch, res=res, stored_res=stored_res, samples=samples,
                              batch_size=batch_size, first=first, first_step=step, offset=offset,
                              order=stage.order or order)  # fmt: skip
            self.passes.append(segment)
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
        self._ring: Order = "block" if any(segment.order == "block" for segment in self.passes) else "full"
        self._firsts = [segment.first for segment in self.passes]

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that decides the batches, as JSON has it: two plans have equal batches if these are equal.

        Of the shard set it holds what these batches read (`ShardSet.contents`), so that a resolution that is added to
        the set changes nothing.
        """
        stages: list[dict[str, Any]] = []
        for number, stage in enumerate(self.stages):
            stages.append({
                "res": stage.res, "epochs": stage.epochs, "batch_size": stage.batch_size, "fraction": stage.fraction,
                "order": stage.order or self.order,
                "eval_res": next((s.res for s in self.passes if s.stage == number and s.split == "val"), None),
                "augment": dataclasses.asdict(stage.augment),
            })  # fmt: skip
        resolutions = {segment.stored_res for segment in self.passes}
        identity = {
            "format": _FORMAT, "seed": self.seed, "order": self.order, "fraction_mode": self._fraction_mode,
            "eval_batch_size": self._eval_batch_size, "eval_every_epochs": self._eval_every_epochs,
            "eval_crop_frac": self._eval_crop_frac, "stages": stages, "shards": self.shards.contents(resolutions),
        }  # fmt: skip
        plain: dict[str, Any] = json.loads(json.dumps(identity))
        return plain

    @functools.cached_property
    def fingerprint(self) -> str:
        """12 hex digits over `identity`: the same plan has the same in every process and version."""
        text = json.dumps(self.identity, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def segment(self, index: int) -> Pass:
        if not 0 <= index < self.total_batches:
            raise IndexError(f"batch {index} of {self.total_batches}")
        return self.passes[bisect.bisect_right(self._firsts, index) - 1]

    def check_ranks(self, world_size: int) -> None:
        """Raises `ResoluteError` if some batch of the run has not enough samples for `world_size` ranks."""
        for segment in self.passes:
            train, smallest = segment.split == "train", segment.min_batch()
            if (smallest + 1) // 2 < world_size if train else smallest < world_size:
                raise ResoluteError(
                    f"epoch {segment.epoch}, {segment.split}: a batch of {smallest} samples cannot feed {world_size} ranks, "
                    f"expected {2 if train else 1} a rank; use a larger "
                    f"{'batch_size' if train else 'eval.batch_size'} or fewer ranks"
                )

    def batch(
        self, index: int, *, rank: int = 0, world_size: int = 1, replacements: Mapping[int, int] | None = None
    ) -> BatchSpec:
        """Rank `rank`'s part of batch `index`; the parts of all ranks, one after another, are the batch.

        In training, neighbours in the (random) order are each other's mix partners and are never split over ranks,
        so mixing needs no further image and does not depend on the number of ranks. In validation a rank may get a
        single sample. Every rank has the same number of batches, and none is empty (see `check_ranks`).
        `replacements` (sample -> sample) puts samples in the places of others that cannot be read.
        """
        segment = self.pass_at(index)
        k = index - segment.first
        start, end = segment.bounds(k)
        ids = self.ids(index, rank=rank, world_size=world_size)
        n = len(ids)
        modes, lam, boxes = np.zeros(n, np.int32), np.ones(n, np.float32), np.zeros((n, 4), np.int32)
        drawn: Mapping[str, NDArray[np.generic]] = {}
        if replacements:
            ids = np.array([replacements.get(i, i) for i in ids.tolist()], np.int64)
        stored = self.shards.splits[segment.split].stored[segment.stored_res][ids]
        sizes = np.stack([stored["width"], stored["height"]], axis=1).astype(np.int64)
        if segment.split == "train":
            augment = self.stages[segment.stage].augment
            key = stream_key(self.seed, _AUGMENT, segment.epoch)
            u = uniforms(key, ids, 1 + CROP_UNIFORMS)
            crops = random_crops(sizes, u[:, 1:], augment)
            flips = u[:, 0] < augment.flip_prob
            partners = np.minimum(np.arange(n) ^ 1, n - 1).astype(np.int32)
            drawn = augment_params(augment, seed=self.seed, epoch=segment.epoch, ids=ids, res=segment.res)
            if augment.mix_per == "sample" and augment.mixes:
                modes, lam, boxes = mixes(augment, seed=self.seed, epoch=segment.epoch, ids=ids, res=segment.res)
            else:
                modes[:], lam[:], boxes[:] = self._mix(segment, k, augment)
        else:
            crops = centre_crops(sizes, self._crop_frac(segment))
            flips = np.zeros(n, bool)
            partners = np.arange(n, dtype=np.int32)
        return BatchSpec(
            index=index, step=segment.first_step + (k if segment.split == "train" else 0),
            split=segment.split, stage=segment.stage, epoch=segment.epoch, res=segment.res,
            stored_res=segment.stored_res,
            last=k == segment.batches - 1, global_size=end - start, ids=ids, crops=crops, flips=flips,
            partners=partners, modes=modes, lam=lam, boxes=boxes, augment_params=drawn,
        )  # fmt: skip

    def _stored_res(self, trained: int, res: int) -> int:
        """The smallest open resolution that has the detail for `res` px; that of training if both are the same."""
        open_ = self.shards.splits["val"].stored
        if res == trained or res in open_:
            return res
        there = sorted(open_)
        for stored in there:
            if stored >= res:
                return stored
        raise ResoluteError(
            f"{self.shards.root}: nothing to validate at {res} px with, got {','.join(map(str, there))} px, expected "
            f"{res} or more; lower eval_res, or run {self.shards.command_that_adds([res])}"
        )

    def _crop_frac(self, segment: Pass) -> float:
        if self._eval_crop_frac is not None:
            return self._eval_crop_frac
        # why: at its own resolution the crop is exactly res x res stored pixels, not just nearly
        own = segment.res == segment.stored_res
        return segment.res / self.shards.short_side(segment.res) if own else 1 / self.shards.margin

    def ids(self, index: int, *, rank: int = 0, world_size: int = 1) -> NDArray[np.int64]:
        """The samples of `batch(index)`, (N,), and nothing else of it."""
        segment = self.pass_at(index)
        start, end = segment.bounds(index - segment.first)
        low, high = rank_bounds(start, end, rank=rank, world_size=world_size, pairs=segment.split == "train")
        if high <= low:
            self.check_ranks(world_size)
            raise AssertionError((index, rank, world_size))  # why: every part is empty only where check_ranks says so
        places = np.arange(low, high)
        if segment.split == "val":
            return places
        return sample_ids(
            segment.order, places, seed=self.seed, epoch=segment.epoch, samples=segment.samples,
            offset=segment.offset, total=len(self.shards.splits["train"]), ring=self._ring,
        )  # fmt: skip

    def _mix(self, segment: Pass, k: int, augment: Augment) -> tuple[int, float, tuple[int, ...]]:
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
        box = tuple(int(v) for v in cutmix_boxes(np.array([lam]), np.array([x]), np.array([y]), res)[0])
        return (mode, 1.0 - box[2] * box[3] / res**2, box) if box[2] and box[3] else none
