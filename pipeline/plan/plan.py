"""`Plan`: the complete run as one sequence of batches, known before it starts.

The sequence covers all stages and epochs and the validation passes between them. `Plan.batch(i)` is a pure function of
the shard set, the stages and the seed; it keeps no state, and its memory does not grow with the number of samples.
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
from .rng import stream_key, uniforms
from .sampling import augment_params, mix_params
from .stage import AUTO, Stage

__all__ = ["BatchSpec", "Pass", "Plan", "batch_bounds", "rank_bounds"]

_FORMAT = 1  # version of `Plan.identity` and of the algorithms that turn it into batches
_AUGMENT = 2  # stream purpose; order.py uses 0 and 1, sampling.py 3 and others


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A pass over a split: the training batches of one epoch, or one validation."""

    split: Literal["train", "val"]
    stage: int
    epoch: int  # 0-based, counted over the run
    res: int  # px: what the model sees
    stored_res: int  # px: resolution of the shards it is read from
    batch_size: int  # global, of its full batches
    samples: int
    first: int  # index of its first batch in the run
    first_step: int  # optimizer steps before it
    offset: int  # training: where its range begins on the ring of all samples (see order.py)
    order: Order  # training only; validation reads in stored order

    @property
    def batches(self) -> int:
        return -(-self.samples // self.batch_size)

    def bounds(self, k: int) -> tuple[int, int]:
        """[start, end) of its batch `k`, as positions in the pass."""
        return batch_bounds(self.samples, self.batch_size, k)

    def max_batch(self, *, rank: int, world_size: int) -> int:
        """Largest local batch of `rank`, in samples."""
        pairs = self.split == "train"
        bounds = (rank_bounds(*b, rank=rank, world_size=world_size, pairs=pairs) for b in self._unequal_bounds())
        return max(high - low for low, high in bounds)

    def min_batch(self) -> int:
        """Smallest global batch, in samples."""
        return min(end - start for start, end in self._unequal_bounds())

    def _unequal_bounds(self) -> list[tuple[int, int]]:
        """`bounds` of its first and last two batches; all others are as large as the first."""
        return [self.bounds(k) for k in sorted({0, max(0, self.batches - 2), self.batches - 1})]


@dataclass(frozen=True, kw_only=True)
class BatchSpec:
    """Everything about one batch except its pixels; N is the local batch size."""

    index: int  # in the run
    step: int  # training: its optimizer step; validation: optimizer steps before it
    split: Literal["train", "val"]
    stage: int
    epoch: int
    res: int  # px: what the model sees
    stored_res: int  # px: resolution of the shards it is read from
    last: bool  # whether it is the last of its pass
    global_size: int  # samples over all ranks
    ids: NDArray[np.int64]  # (N,) sample numbers in the split
    crops: NDArray[np.int32]  # (N, 4) x, y, width, height in px of the stored image
    flips: NDArray[np.bool_]  # (N,)
    partners: NDArray[np.int32]  # (N,) position in this batch of the image to mix with
    modes: NDArray[np.int32]  # (N,) UNMIXED, MIXUP or CUTMIX of sampling.py
    lam: NDArray[np.float32]  # (N,) weight of the sample's own image and label; 1 - lam is the partner's
    boxes: NDArray[np.int32]  # (N, 4) x, y, width, height in px of the output: the region cutmix takes from the partner
    # all other augmentation, see `sampling.augment_params`
    augment_params: Mapping[str, NDArray[np.generic]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)


def batch_bounds(samples: int, batch_size: int, k: int) -> tuple[int, int]:
    """[start, end) of batch `k` of a pass; the last two batches share the remaining samples equally.

    Every sample is used exactly once, and no training step has only a few samples.
    """
    batches = -(-samples // batch_size)
    if k < batches - 2:
        return k * batch_size, (k + 1) * batch_size
    base = max(0, batches - 2) * batch_size
    middle = base + (samples - base + 1) // 2 if batches > 1 else samples
    return (base, middle) if k == max(0, batches - 2) else (middle, samples)


def rank_bounds(start: int, end: int, *, rank: int, world_size: int, pairs: bool) -> tuple[int, int]:
    """[low, high) of rank `rank` within a batch's [start, end); with `pairs`, neighbouring pairs are not split.

    No rank gets an empty range if there are at least `world_size` samples (with `pairs`: pairs; the last may be half).
    """
    if not pairs:
        return start + rank * (end - start) // world_size, start + (rank + 1) * (end - start) // world_size
    count = (end - start + 1) // 2
    return start + 2 * (rank * count // world_size), min(end, start + 2 * ((rank + 1) * count // world_size))


class Plan:
    """The run as a sequence of batches. Cheap to build, immutable, thread-safe."""

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
        train: bool = True,
    ) -> None:
        """Lay out the passes of the run.

        order             sample order of stages that do not set their own; see `pipeline.plan.order`
        fraction_mode     stages with `fraction` < 1: "rotate" continues where the last epoch ended, "fixed" always uses
                          the same samples
        eval_batch_size   global; None: no validation
        eval_crop_frac    side of the centre crop as a fraction of the short side; None: what fits the stored margin
        train             False: validation only, see `evaluation`

        Raises `ResoluteError` if a split is empty, `order` is invalid, a batch size is still AUTO, or `eval_res` is
        larger than the open shards.
        """
        if order not in ("full", "block"):
            raise ResoluteError(f"order: got {order}, expected full or block; choose one")
        if any(stage.batch_size == AUTO for stage in stages):
            raise ResoluteError(
                "stages.batch_size: got auto, expected a number: only training on a GPU resolves auto; set one"
            )
        self.shards, self.stages, self.seed, self.order = shards, tuple(stages), seed, order
        self._fraction_mode, self._eval_batch_size = fraction_mode, eval_batch_size
        self._eval_every_epochs, self._eval_crop_frac = eval_every_epochs, eval_crop_frac
        for split in ("train",) * train + ("val",) * (eval_batch_size is not None):
            if split not in shards.splits or not len(shards.splits[split]):
                val = "hold out a part with val (--val 0.1, make: VAL=0.1)"
                remedy = val if shards.single_resolution else "rebuild it"
                raise ResoluteError(f"{shards.root}: split {split} has no samples, expected some; {remedy}")
        self.passes: list[Pass] = []
        total, first, step, epoch, offset = len(shards.splits["train"]) if train else 0, 0, 0, 0, 0
        epochs = sum(stage.epochs for stage in self.stages)

        def add(number: int, split: Literal["train", "val"], samples: int, batch_size: int) -> None:
            nonlocal first, step
            stage = self.stages[number]
            res = stage.res if split == "train" else stage.eval_res or stage.res
            stored_res = res if split == "train" else self._stored_res(res)
            pass_ = Pass(split=split, stage=number, epoch=epoch, res=res, stored_res=stored_res, samples=samples,
                              batch_size=batch_size, first=first, first_step=step, offset=offset,
                              order=stage.order or order)  # fmt: skip
            self.passes.append(pass_)
            first += pass_.batches
            step += pass_.batches if split == "train" else 0

        for number, stage in enumerate(self.stages):
            for _ in range(stage.epochs):
                samples = max(1, round(total * stage.fraction))
                if train:
                    add(number, "train", samples, stage.batch_size)
                if eval_batch_size is not None and ((epoch + 1) % eval_every_epochs == 0 or epoch + 1 == epochs):
                    add(number, "val", len(shards.splits["val"]), eval_batch_size)
                if train and fraction_mode == "rotate":
                    offset = (offset + samples) % total
                epoch += 1
        self.total_batches, self.total_steps = first, step
        self._ring: Order = "block" if any(pass_.order == "block" for pass_ in self.passes) else "full"
        self._firsts = [pass_.first for pass_ in self.passes]

    @classmethod
    def evaluation(
        cls, shards: ShardSet, resolutions: Sequence[int], *, split: str = "val", batch_size: int = 256,
        crop_frac: float | None = None,
    ) -> Plan:  # fmt: skip
        """A plan of validation passes only: pass i reads all of `split` and shows it at resolutions[i], in px.

        Its batches have stage i and the split "val", whatever `split` is; each resolution is read from the smallest
        stored one that is at least as large. `batch_size` and `crop_frac` are those of validation, see `Plan`.
        Raises `ResoluteError` for an unknown split or a resolution above all stored ones.
        """
        if split not in shards.splits:
            names = ", ".join(shards.splits)
            raise ResoluteError(f"{shards.root}: got split {split}, expected one of {names}; choose another")
        return cls(
            dataclasses.replace(shards, splits={"val": shards.splits[split]}),
            [Stage(res=res, epochs=1, batch_size=1) for res in resolutions],
            eval_batch_size=batch_size, eval_crop_frac=crop_frac, train=False,
        )  # fmt: skip

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that determines the batches, as JSON values; plans with equal identities have equal batches.

        Of the shard set it contains only what the batches read (`ShardSet.contents`), so adding a resolution to the
        set does not change it.
        """
        stages: list[dict[str, Any]] = []
        for number, stage in enumerate(self.stages):
            stages.append({
                "res": stage.res, "epochs": stage.epochs, "batch_size": stage.batch_size, "fraction": stage.fraction,
                "order": stage.order or self.order,
                "eval_res": next((s.res for s in self.passes if s.stage == number and s.split == "val"), None),
                "augment": dataclasses.asdict(stage.augment),
            })  # fmt: skip
        resolutions = {pass_.stored_res for pass_ in self.passes}
        identity = {
            "format": _FORMAT, "seed": self.seed, "order": self.order, "fraction_mode": self._fraction_mode,
            "eval_batch_size": self._eval_batch_size, "eval_every_epochs": self._eval_every_epochs,
            "eval_crop_frac": self._eval_crop_frac, "stages": stages, "shards": self.shards.contents(resolutions),
        }  # fmt: skip
        plain: dict[str, Any] = json.loads(json.dumps(identity))
        return plain

    @functools.cached_property
    def fingerprint(self) -> str:
        """12 hex digits over `identity`, the same in every process and version."""
        text = json.dumps(self.identity, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def pass_at(self, index: int) -> Pass:
        """The pass of batch `index`. Raises IndexError."""
        if not 0 <= index < self.total_batches:
            raise IndexError(f"batch {index} of {self.total_batches}")
        return self.passes[bisect.bisect_right(self._firsts, index) - 1]

    def check_ranks(self, world_size: int) -> None:
        """Raise `ResoluteError` if any batch of the run has too few samples for `world_size` ranks."""
        for pass_ in self.passes:
            train, smallest = pass_.split == "train", pass_.min_batch()
            if (smallest + 1) // 2 < world_size if train else smallest < world_size:
                raise ResoluteError(
                    f"epoch {pass_.epoch}, {pass_.split}: a batch of {smallest} samples cannot feed "
                    f"{world_size} ranks, expected {2 if train else 1} per rank; use a larger "
                    f"{'batch_size' if train else 'eval.batch_size'} or fewer ranks"
                )

    def batch(
        self, index: int, *, rank: int = 0, world_size: int = 1, replacements: Mapping[int, int] | None = None
    ) -> BatchSpec:
        """Rank `rank`'s part of batch `index`; the parts of all ranks concatenated are the global batch.

        In training, neighbours in the (random) order are mix partners of each other and are never split over ranks,
        so mixing needs no further images and does not depend on the number of ranks. In validation a rank may get a
        single sample. All ranks have the same number of batches, and none is empty (see `check_ranks`).
        `replacements` maps samples that cannot be read to those used in their place.
        """
        pass_ = self.pass_at(index)
        k = index - pass_.first
        start, end = pass_.bounds(k)
        ids = self.ids(index, rank=rank, world_size=world_size)
        n = len(ids)
        modes, lam, boxes = np.zeros(n, np.int32), np.ones(n, np.float32), np.zeros((n, 4), np.int32)
        params: Mapping[str, NDArray[np.generic]] = {}
        if replacements:
            ids = np.array([replacements.get(i, i) for i in ids.tolist()], np.int64)
        stored = self.shards.splits[pass_.split].stored[pass_.stored_res][ids]
        sizes = np.stack([stored["width"], stored["height"]], axis=1).astype(np.int64)
        if pass_.split == "train":
            augment = self.stages[pass_.stage].augment
            key = stream_key(self.seed, _AUGMENT, pass_.epoch)
            u = uniforms(key, ids, 1 + CROP_UNIFORMS)
            crops = random_crops(sizes, u[:, 1:], augment)
            flips = u[:, 0] < augment.flip_prob
            partners = np.minimum(np.arange(n) ^ 1, n - 1).astype(np.int32)
            params = augment_params(augment, seed=self.seed, epoch=pass_.epoch, ids=ids, res=pass_.res)
            if augment.mixes:
                modes, lam, boxes = mix_params(
                    augment, seed=self.seed, epoch=pass_.epoch, batch=k, ids=ids, res=pass_.res
                )
        else:
            crops = centre_crops(sizes, self._crop_frac(pass_))
            flips = np.zeros(n, bool)
            partners = np.arange(n, dtype=np.int32)
        return BatchSpec(
            index=index, step=pass_.first_step + (k if pass_.split == "train" else 0),
            split=pass_.split, stage=pass_.stage, epoch=pass_.epoch, res=pass_.res,
            stored_res=pass_.stored_res,
            last=k == pass_.batches - 1, global_size=end - start, ids=ids, crops=crops, flips=flips,
            partners=partners, modes=modes, lam=lam, boxes=boxes, augment_params=params,
        )  # fmt: skip

    def _stored_res(self, res: int) -> int:
        """The smallest open resolution of at least `res` px, from which validation at `res` px reads."""
        stored_resolutions = self.shards.splits["val"].stored
        if res in stored_resolutions:
            return res
        available = sorted(stored_resolutions)
        for stored in available:
            if stored >= res:
                return stored
        raise ResoluteError(
            f"{self.shards.root}: nothing to validate at {res} px with, got {','.join(map(str, available))} px, "
            f"expected {res} or more; lower eval_res, or run {self.shards.command_that_adds([res])}"
        )

    def _crop_frac(self, pass_: Pass) -> float:
        if self._eval_crop_frac is not None:
            return self._eval_crop_frac
        # why: at its own resolution the crop is exactly res x res stored pixels
        own = pass_.res == pass_.stored_res
        return pass_.res / self.shards.short_side(pass_.res) if own else 1 / self.shards.margin

    def ids(self, index: int, *, rank: int = 0, world_size: int = 1) -> NDArray[np.int64]:
        """The sample numbers (N,) of `batch(index)`, without the rest of its spec."""
        pass_ = self.pass_at(index)
        start, end = pass_.bounds(index - pass_.first)
        low, high = rank_bounds(start, end, rank=rank, world_size=world_size, pairs=pass_.split == "train")
        if high <= low:
            self.check_ranks(world_size)
            raise AssertionError((index, rank, world_size))  # unreachable: check_ranks raises first
        places = np.arange(low, high)
        if pass_.split == "val":
            return places
        return sample_ids(
            pass_.order, places, seed=self.seed, epoch=pass_.epoch, samples=pass_.samples,
            offset=pass_.offset, total=len(self.shards.splits["train"]), ring=self._ring,
        )  # fmt: skip
