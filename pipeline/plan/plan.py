"""`Plan`: the complete run as one sequence of batches, known before it starts.

The sequence covers all stages and epochs and the validations between them. `Plan.batch(i)` is a pure function of
the shard set, the stages and the seed; it keeps no state. Its memory does not grow with the number of samples, unless
these are sampled by class (see `class_sampling.py`).
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.settings import checked, definitions

from .augment_params import AugmentOps, used_ops
from .batching import BatchSequence, each_epoch, rank_bounds
from .class_sampling import ClassSampling, EpochDraws, Sampling
from .order import Order, sample_ids
from .rows import train_rows, validation_rows
from .stage import AUTO, SIZED_AT, Augment, BatchShape, BatchSize, Count, Fraction, Seed, Stage, unused_augment_keys

__all__ = ["BatchSpec", "Phase", "Plan"]

_FORMAT = 1  # version of `Plan.config` and of the algorithms that turn it into batches
_CHUNK = 1 << 20  # samples per step when the classes of an epoch are counted


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A phase of a run: the training batches of one epoch, or one validation."""

    split: Literal["train", "val"]
    stage: int
    epoch: int  # 0-based, counted over the run
    sequences: tuple[BatchSequence, ...]  # its batches, with their resolutions and sizes
    samples: int
    first: int  # index of its first batch in the run
    first_step: int  # optimizer steps before it
    first_sample: int  # training samples of the run before it
    offset: int  # training: where its range begins on the ring of all samples (see order.py)
    order: Order  # training only; validation reads in stored order

    @functools.cached_property
    def batches(self) -> int:
        return sum(sequence.batches for sequence in self.sequences)

    @functools.cached_property
    def shapes(self) -> tuple[BatchShape, ...]:
        """Resolutions and sizes of its full batches, in the order of their first use, each once."""
        return tuple(dict.fromkeys(shape for sequence in self.sequences for shape in sequence.shapes))

    @property
    def res(self) -> int:
        """The largest resolution of its batches, px."""
        return max(shape.res for shape in self.shapes)

    @property
    def batch_size(self) -> int:
        """The largest size of its full batches, in samples over all ranks."""
        return max(shape.batch_size for shape in self.shapes)

    def batch_at(self, k: int) -> tuple[int, int, int]:
        """Resolution (px) of its batch `k`, and its [start, end) as positions in the phase."""
        sequence = self.sequences[bisect.bisect_right(self._sequence_firsts, k) - 1]
        shape, start, end = sequence.at(k - sequence.first)
        return shape.res, start, end

    @functools.cached_property
    def distinct_batches(self) -> tuple[int, ...]:
        """Numbers of batches in which each combination of resolution and number of samples occurs."""
        return tuple(sequence.first + k for sequence in self.sequences for k in sequence.distinct_batches)

    def local_shapes(self, *, rank: int, world_size: int) -> dict[tuple[int, int], int]:
        """Samples of `rank`'s part of a batch, by resolution (px) and samples of the batch."""
        batches, pairs = map(self.batch_at, self.distinct_batches), self.split == "train"
        bounds = {
            (res, end - start): rank_bounds(start, end, rank=rank, world_size=world_size, pairs=pairs)
            for res, start, end in batches
        }
        return {shape: high - low for shape, (low, high) in bounds.items()}

    def min_batch(self) -> int:
        """Smallest global batch, in samples."""
        return min(end - start for _, start, end in map(self.batch_at, self.distinct_batches))

    @functools.cached_property
    def _sequence_firsts(self) -> list[int]:
        return [sequence.first for sequence in self.sequences]


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
    last: bool  # whether it is the last of its phase
    global_size: int  # samples over all ranks
    ids: NDArray[np.int64]  # (N,) sample numbers in the split
    rows: NDArray[np.void]  # (N,) crop, flips and all augmentation of each sample, see `rows.row_dtype`

    @functools.cached_property
    def crops(self) -> NDArray[np.int32]:
        """(N, 4) x, y, width, height in px of the stored image."""
        return self.rows["crop"].copy()

    @functools.cached_property
    def flips(self) -> NDArray[np.bool_]:
        """(N,) whether an image is flipped horizontally."""
        return self.rows["hflip"].astype(bool)

    @functools.cached_property
    def partners(self) -> NDArray[np.int32]:
        """(N,) position in this batch of the image to mix with."""
        return self.rows["partner"].copy()

    @functools.cached_property
    def modes(self) -> NDArray[np.int32]:
        """(N,) UNMIXED, MIXUP or CUTMIX of `augment_params.py`."""
        return self.rows["mode"].copy()

    @functools.cached_property
    def lam(self) -> NDArray[np.float32]:
        """(N,) weight of the sample's own image and label; 1 - lam is the partner's."""
        return self.rows["lam"].copy()

    @functools.cached_property
    def boxes(self) -> NDArray[np.int32]:
        """(N, 4) x, y, width, height in px of the output: the region that cutmix takes from the partner."""
        return self.rows["box"].copy()

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return (
            f"BatchSpec {self.index}: {len(self)} of {self.global_size} samples at {self.res} px, {self.split}, "
            f"stage {self.stage}, epoch {self.epoch}"
        )


def _check_flips(stages: Sequence[Stage], *, rotates: bool, uniform: bool) -> None:
    """Raise `ResoluteError` if flips alternate by epoch in a stage whose epochs do not see each sample once."""
    for number, stage in enumerate(stages):
        alternates = any(augment.flip_mode == "alternate" for augment in stage.augments.values())
        if alternates and not (uniform and (stage.fraction == 1 or not rotates)):
            got = f"fraction {stage.fraction:g}" if uniform else "data.sampling by class"
            raise ResoluteError(
                f"augment.flip_mode: got alternate with {got} in stage {number}, expected epochs that use the same "
                'samples once each (fraction = 1, or data.fraction_mode = "fixed"); choose random'
            )


def _refuse_unused_keys(
    stages: Sequence[Stage],
    *,
    order: Order,
    fraction_mode: str,
    eval_batch_size: int | None,
    eval_every_epochs: int,
    eval_crop_pct: float | None,
) -> None:
    """Raise `ResoluteError` for a setting without effect. Recipes, whose stages are of another class, have been checked
    with what their files say."""
    if any(type(stage) is not Stage for stage in stages):
        return
    augments = [augment for stage in stages for augment in stage.augments.values()]
    reasons = unused_augment_keys(augments)
    for key in definitions(Augment):
        is_set = any(getattr(augment, key.name) != key.default for augment in augments)
        if is_set and key.name in reasons:
            raise ResoluteError(f"augment.{key.name}: without effect, {reasons[key.name]}; remove it")
    no_validation = eval_batch_size is None and "eval_batch_size is None, so there is no validation"
    for name, reason in {
        "Plan.fraction_mode": fraction_mode != "rotate"
        and all(stage.fraction == 1.0 for stage in stages)
        and "every fraction is 1",
        "Plan.order": order != "shuffled" and all(stage.order for stage in stages) and "every stage has its own",
        "Plan.eval_every_epochs": eval_every_epochs != 1 and no_validation,
        "Plan.eval_crop_pct": eval_crop_pct is not None and no_validation,
        "stages.eval_res": any(stage.eval_res for stage in stages) and no_validation,
    }.items():
        if reason:
            raise ResoluteError(f"{name}: without effect, {reason}; remove it")


def _augment_config(augment: Augment) -> dict[str, Any]:
    """The settings as values of `Plan.config`; without those, younger than its format, that are off."""
    off = {"crop_mode": "resized", "shift_px": 0, "flip_mode": "random", "magnitude_std": 0.0, "op_prob": 1.0}
    config = {name: value for name, value in dataclasses.asdict(augment).items() if off.get(name) != value}
    # why: an earlier version used the same px at every resolution
    return config | ({"sized_at": SIZED_AT} if augment.has_sizes else {})


class Plan:
    """The run as a sequence of batches. Cheap to build, immutable, thread-safe."""

    @checked("Plan")
    def __init__(
        self,
        shards: ShardSet,
        stages: Sequence[Stage],
        *,
        augment: Augment | None = None,
        seed: Seed = 0,
        order: Order = "shuffled",
        fraction_mode: Literal["rotate", "fixed"] = "rotate",
        sampling: Sampling = "uniform",
        eval_batch_size: BatchSize | None = 256,
        eval_every_epochs: Count = 1,
        eval_crop_pct: Fraction | None = None,
        train: bool = True,
    ) -> None:
        """Lay out the phases of the run.

        augment           augmentation of stages that do not set their own; None: `Augment()`
        order             sample order of stages that do not set their own; see `pipeline.plan.order`
        fraction_mode     stages with `fraction` < 1: "rotate" continues where the last epoch ended, "fixed" always uses
                          the same samples
        sampling          "uniform": each sample once per (full) epoch; else as `ClassSampling` draws them: an epoch is
                          as long, but may use a sample several times, with different crops and augmentation
        eval_batch_size   global; None: no validation
        eval_crop_pct    side of the centre crop as a fraction of the short side; None: what fits the stored margin
        train             False: validation only, see `evaluation`

        A batch is read from the smallest open resolution that is at least its own; crops are random fractions of an
        image, so they are the same part of it at each stored size, up to rounding.

        Raises `ResoluteError` if an argument is invalid, a split is empty or smaller than a batch, the samples have no
        classes to sample by, flips cannot alternate, a batch size is still AUTO, a stage has too few steps for its
        resolutions, or a resolution is larger than those of the open shards.
        """
        if not isinstance(shards, ShardSet):
            raise ResoluteError(f"Plan.shards: got {shards!r}, expected a ShardSet; open it with ShardSet.open")
        if not isinstance(stages, Sequence) or not stages or not all(isinstance(stage, Stage) for stage in stages):
            raise ResoluteError(f"Plan.stages: got {stages!r}, expected a list of at least one Stage; correct it")
        if augment is not None:
            if all(stage.augment is not None for stage in stages):
                raise ResoluteError("Plan.augment: without effect, every stage has its own; remove it")
            stages = [dataclasses.replace(stage, augment=stage.augment or augment) for stage in stages]
        if sampling != "uniform" and shards.target.kind == "values":
            raise ResoluteError(
                f"data.sampling: got {sampling}, but the targets of {shards.root} are values, expected classes; "
                "leave it out"
            )
        _refuse_unused_keys(
            stages,
            order=order,
            fraction_mode=fraction_mode,
            eval_batch_size=eval_batch_size,
            eval_every_epochs=eval_every_epochs,
            eval_crop_pct=eval_crop_pct,
        )
        _check_flips(stages, rotates=fraction_mode == "rotate", uniform=sampling == "uniform")
        if any(stage.batch_size == AUTO for stage in stages):
            raise ResoluteError(
                "stages.batch_size: got auto, expected a number: only training on a GPU resolves auto; set one"
            )
        self.shards, self.stages, self.seed, self.order = shards, tuple(stages), seed, order
        self._fraction_mode, self._eval_batch_size, self.sampling = fraction_mode, eval_batch_size, sampling
        self._eval_every_epochs, self._eval_crop_pct = eval_every_epochs, eval_crop_pct
        for split in ("train",) * train + ("val",) * (eval_batch_size is not None):
            if split not in shards.splits or not len(shards.splits[split]):
                how = "VAL_FRAC=0.1 (make shards)"
                remedy = f"hold out a part with {how}, or a fold (FOLDS=5)" if split == "val" else "rebuild it"
                raise ResoluteError(f"{shards.root}: split {split} has no samples, expected some; {remedy}")
        self.phases: list[Phase] = []
        total = len(shards.splits["train"]) if train else 0
        first, step, first_sample, epoch, offset = 0, 0, 0, 0, 0
        epochs = sum(stage.epochs for stage in self.stages)

        def add(
            number: int, split: Literal["train", "val"], samples: int, sequences: tuple[BatchSequence, ...]
        ) -> None:
            nonlocal first, step, first_sample
            stage = self.stages[number]
            phase = Phase(
                split=split,
                stage=number,
                epoch=epoch,
                sequences=sequences,
                samples=samples,
                first=first,
                first_step=step,
                first_sample=first_sample,
                offset=offset,
                order=stage.order or order,
            )
            self.phases.append(phase)
            first += phase.batches
            step += phase.batches if split == "train" else 0
            first_sample += samples if split == "train" else 0

        for number, samples, sequences in each_epoch(self.stages, samples=total, seed=seed):
            if train:
                add(number, "train", samples, sequences)
            if eval_batch_size is not None and ((epoch + 1) % eval_every_epochs == 0 or epoch + 1 == epochs):
                val, shape = len(shards.splits["val"]), BatchShape(self.stages[number].validation_res, eval_batch_size)
                add(number, "val", val, (BatchSequence(shapes=(shape,), samples=val),))
            if train and fraction_mode == "rotate":
                offset = (offset + samples) % total
            epoch += 1
        self.total_batches, self.total_steps = first, step
        self._check_shapes()
        self._ring: Order = "windowed" if any(phase.order == "windowed" for phase in self.phases) else "shuffled"
        self._firsts = [phase.first for phase in self.phases]

    @classmethod
    @checked("Plan.evaluation")
    def evaluation(
        cls,
        shards: ShardSet,
        resolutions: Sequence[int],
        *,
        split: str = "val",
        batch_size: BatchSize = 256,
        crop_pct: Fraction | None = None,
    ) -> Plan:
        """A plan of validations only: phase i reads all of `split` and shows it at resolutions[i], in px.

        Its batches have stage i and the split "val", whatever `split` is; each resolution is read from the smallest
        stored one that is at least as large. `batch_size` and `crop_pct` are those of validation, see `Plan`.
        Raises `ResoluteError` for an unknown split or a resolution above all stored ones.
        """
        if split not in shards.splits:
            names = ", ".join(shards.splits)
            raise ResoluteError(f"{shards.root}: got split {split}, expected one of {names}; choose another")
        return cls(
            dataclasses.replace(shards, splits={"val": shards.splits[split]}),
            [Stage(res=res, epochs=1, batch_size=1) for res in resolutions],
            eval_batch_size=batch_size,
            eval_crop_pct=crop_pct,
            train=False,
        )

    def __repr__(self) -> str:
        epochs = ", ".join(f"{stage.epochs} at {stage.res_text}" for stage in self.stages)
        val = self.total_batches - self.total_steps
        return f"Plan: epochs {epochs}; batches {self.total_steps} train, {val} val"

    @property
    def config(self) -> dict[str, Any]:
        """Everything that determines the batches, as JSON values; plans with equal ones have equal batches.

        Of the shard set it contains only what the batches read (`ShardSet.contents`), so adding a resolution to the
        set does not change it.
        """
        stages: list[dict[str, Any]] = []
        for number, stage in enumerate(self.stages):
            augments = [_augment_config(augment) for augment in stage.augments.values()]
            stages.append(
                {
                    **_shapes_config(stage),
                    "epochs": stage.epochs,
                    "fraction": stage.fraction,
                    "order": stage.order or self.order,
                    "eval_res": next((s.res for s in self.phases if s.stage == number and s.split == "val"), None),
                    "augment": augments if any(augment != augments[0] for augment in augments) else augments[0],
                }
            )
        resolutions = {self.stored_res(phase.split, shape.res) for phase in self.phases for shape in phase.shapes}
        config = {
            "format": _FORMAT,
            "seed": self.seed,
            "order": self.order,
            "fraction_mode": self._fraction_mode,
            "eval_batch_size": self._eval_batch_size,
            "eval_every_epochs": self._eval_every_epochs,
            "eval_crop_pct": self._eval_crop_pct,
            "stages": stages,
            "shards": self.shards.contents(resolutions),
            **({} if self.sampling == "uniform" else {"sampling": self.sampling}),
        }
        plain: dict[str, Any] = json.loads(json.dumps(config))
        return plain

    @functools.cached_property
    def fingerprint(self) -> str:
        """12 hex digits over `config`, the same in every process and version."""
        text = json.dumps(self.config, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def first_phase(self, split: str, stage: int) -> Phase:
        """The first phase of a stage over `split`; StopIteration if there is none."""
        return next(phase for phase in self.phases if (phase.split, phase.stage) == (split, stage))

    def largest_batch(self, stage: int) -> int:
        """Index of a training batch of the stage with its largest resolution, and the most samples at that."""
        batches = (
            (phase.batch_at(k), phase.first + k)
            for phase in self.phases
            if (phase.split, phase.stage) == ("train", stage)
            for k in phase.distinct_batches
        )
        return max(batches, key=lambda batch: (batch[0][0], batch[0][2] - batch[0][1], -batch[1]))[1]

    def phase_at(self, index: int) -> Phase:
        """The phase of batch `index`. Raises IndexError."""
        if not 0 <= index < self.total_batches:
            raise IndexError(f"batch {index} of {self.total_batches}")
        return self.phases[bisect.bisect_right(self._firsts, index) - 1]

    def check_ranks(self, world_size: int) -> None:
        """Raise `ResoluteError` if any batch of the run has too few samples for `world_size` ranks."""
        for phase in self.phases:
            train, smallest = phase.split == "train", phase.min_batch()
            if (smallest + 1) // 2 < world_size if train else smallest < world_size:
                whole = len(self.shards.splits[phase.split])
                advice = f"use a larger {'batch_size' if train else 'eval.batch_size'} or fewer ranks"
                if whole < (2 if train else 1) * world_size:  # whatever the batch size
                    advice = f"the split has {whole}: use fewer ranks, or more photos"
                raise ResoluteError(
                    f"epoch {phase.epoch}, {phase.split}: a batch of {smallest} samples cannot feed "
                    f"{world_size} ranks, expected {2 if train else 1} per rank; {advice}"
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
        phase = self.phase_at(index)
        k = index - phase.first
        res, start, end = phase.batch_at(k)
        stored_res = self.stored_res(phase.split, res)
        draws, ids = self._draws(index, rank=rank, world_size=world_size)
        if replacements:
            ids = np.array([replacements.get(i, i) for i in ids.tolist()], np.int64)
        stored = self.shards.splits[phase.split].stored[stored_res][ids]
        slots = self.augment_ops.slots
        if phase.split == "train":
            rows = train_rows(
                self.stages[phase.stage].augments[res],
                slots,
                seed=self.seed,
                epoch=phase.epoch,
                res=res,
                batch=k,
                index=index,
                ids=ids,
                counters=ids if self.sampling == "uniform" else draws,
                stored=stored,
            )
        else:
            frac = self._crop_pct(res, stored_res)
            rows = validation_rows(frac, slots=len(slots), res=res, index=index, stored=stored)
        return BatchSpec(
            index=index,
            step=phase.first_step + (k if phase.split == "train" else 0),
            split=phase.split,
            stage=phase.stage,
            epoch=phase.epoch,
            res=res,
            stored_res=stored_res,
            last=k == phase.batches - 1,
            global_size=end - start,
            ids=ids,
            rows=rows,
        )

    @functools.cached_property
    def augment_ops(self) -> AugmentOps:
        """What the graph of the run must support."""
        return used_ops([augment for stage in self.stages for augment in stage.augments.values()])

    def stored_res(self, split: str, res: int) -> int:
        """The smallest open resolution of at least `res` px, from which batches at `res` px read."""
        stored = self.shards.splits[split].stored
        if res in stored:
            return res
        if larger := [available for available in stored if available >= res]:
            return min(larger)
        if res <= max(self.shards.resolutions, default=0):
            raise ResoluteError(
                f"{self.shards.root}: {res} px is not open, got {sorted(stored)}; name it in ShardSet.open"
            )
        what, keys = ("train", "res") if split == "train" else ("validate", "eval_res")
        evaluates = f"{keys} of a stage" + ", RES of `eval`" * (split == "val")
        raise ResoluteError(
            f"{self.shards.root}: too small to {what} at {res} px, got images for "
            f"{','.join(map(str, sorted(stored)))} px, expected {res} px or more; choose a lower "
            f"{'validation ' * (split == 'val')}resolution ({evaluates}), or run "
            f"{self.shards.command_that_adds([res])}"
        )

    def res_at(self, index: int) -> tuple[int, int]:
        """Resolution of batch `index`, px, and the stored one that it reads."""
        phase = self.phase_at(index)
        res, _, _ = phase.batch_at(index - phase.first)
        return res, self.stored_res(phase.split, res)

    def _check_shapes(self) -> None:
        """Raise `ResoluteError` if a batch is larger than an epoch, a resolution too large for the open shards, or a
        stage does not reach it."""
        for phase in self.phases:
            if phase.split == "train" and phase.batch_size > phase.samples:
                more = ", or raise its fraction" * (self.stages[phase.stage].fraction < 1)
                raise ResoluteError(
                    f"stages[{phase.stage}].batch_size: got {phase.batch_size}, expected at most {phase.samples}, the "
                    f"training samples of an epoch; lower it{more}"
                )
        reached: dict[int, set[int]] = {}
        for phase in sorted(self.phases, key=lambda phase: phase.split):  # why: training is the more useful message
            for shape in phase.shapes:
                self.stored_res(phase.split, shape.res)
            if phase.split == "train" and len(self.stages[phase.stage].resolutions) > 1:
                used = {res for res, _ in phase.local_shapes(rank=0, world_size=1)}
                reached[phase.stage] = reached.get(phase.stage, set()) | used
        for number, resolutions in reached.items():
            if missing := [res for res in self.stages[number].resolutions if res not in resolutions]:
                raise ResoluteError(
                    f"stages[{number}].res: its steps are too few for {len(self.stages[number].resolutions)} "
                    f"resolutions, got none at {missing[0]} px, expected some; use fewer resolutions, smaller batches "
                    "or more epochs"
                )

    def _crop_pct(self, res: int, stored_res: int) -> float:
        if self._eval_crop_pct is not None:
            return self._eval_crop_pct
        # why: at its own resolution the crop is exactly res x res stored pixels
        return res / self.shards.short_side(res) if res == stored_res else 1 / self.shards.margin

    def ids(self, index: int, *, rank: int = 0, world_size: int = 1) -> NDArray[np.int64]:
        """The sample numbers (N,) of `batch(index)`, without the rest of its spec."""
        return self._draws(index, rank=rank, world_size=world_size)[1]

    def class_counts(self, epoch: int) -> NDArray[np.int64]:
        """(C,) int64: how many of an epoch's training samples have each class; (0,) for values.

        A sample that is used twice counts twice. Of a complete set or sampled classes O(C), else O(samples).
        """
        phase = next(phase for phase in self.phases if (phase.split, phase.epoch) == ("train", epoch))
        target, samples = self.shards.target, self.shards.splits["train"].samples
        if self.sampling == "uniform" and phase.samples == len(samples):
            return self.class_samples
        if self.sampling != "uniform" and target.kind == "class":
            return self._epoch_draws(phase).counts
        counts = np.zeros(len(target.classes), np.int64)
        for low in range(0, phase.samples if len(counts) else 0, _CHUNK):
            places = np.arange(low, min(low + _CHUNK, phase.samples))
            counts += target.counts(samples[self._sample_ids(phase, places)[1]])
        return counts

    def mean_class_counts(self) -> NDArray[np.float64]:
        """(C,) float64: how many samples of a full epoch have each class, on average over the run."""
        uniform = self.sampling == "uniform"
        return self.class_samples.astype(np.float64) if uniform else self._class_sampling.class_draws()

    def mean_ignored_counts(self) -> NDArray[np.float64]:
        """(C,) float64: in how many samples of a full epoch each label is ignored, on average over the run."""
        target, samples = self.shards.target, self.shards.splits["train"].samples
        if not target.ignored or self.sampling == "uniform":
            return target.ignored_counts(samples).astype(np.float64)
        return self._class_sampling.class_draws(ignored=True)

    @functools.cached_property
    def class_samples(self) -> NDArray[np.int64]:
        """(C,) int64: how many training samples have each class; (0,) for values. O(N) on first use."""
        return self.shards.target.counts(self.shards.splits["train"].samples)

    def _draws(self, index: int, *, rank: int, world_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Numbers (N,) of the draws of `batch(index)` in their epoch, and the samples (N,) drawn."""
        phase = self.phase_at(index)
        _, start, end = phase.batch_at(index - phase.first)
        low, high = rank_bounds(start, end, rank=rank, world_size=world_size, pairs=phase.split == "train")
        if high <= low:
            self.check_ranks(world_size)
            raise AssertionError((index, rank, world_size))  # unreachable: check_ranks raises first
        places = np.arange(low, high)
        return (places, places) if phase.split == "val" else self._sample_ids(phase, places)

    def _sample_ids(self, phase: Phase, places: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Draws and samples at `places` (N,) of a training phase."""
        if self.sampling == "uniform":
            ids = sample_ids(
                phase.order,
                places,
                seed=self.seed,
                epoch=phase.epoch,
                samples=phase.samples,
                offset=phase.offset,
                total=len(self.shards.splits["train"]),
                ring=self._ring,
            )
            return ids, ids
        draws = sample_ids(
            phase.order,
            places,
            seed=self.seed,
            epoch=phase.epoch,
            samples=phase.samples,
            offset=0,
            total=phase.samples,
        )
        epoch = self._epoch_draws(phase)
        # why in stored order: a block of draws is then read from one place of the set
        return draws, epoch.ids(draws) if phase.order == "shuffled" else epoch.stored_order[draws].astype(np.int64)

    def _epoch_draws(self, phase: Phase) -> EpochDraws:
        return self._class_sampling.epoch(phase.first_sample, phase.samples, self._fraction_mode == "fixed")

    @functools.cached_property
    def _class_sampling(self) -> ClassSampling:
        """Computed on first use: it reads the targets of all training samples."""
        shards = self.shards
        return ClassSampling(shards.splits["train"].samples, shards.target, self.sampling, seed=self.seed)


def _shapes_config(stage: Stage) -> dict[str, Any]:
    """The resolutions and batch sizes of a stage as values of `Plan.config`."""
    if len(stage.shapes) == 1:
        return {"res": stage.max_res, "batch_size": stage.batch_size_at(stage.max_res)}
    sizes = [shape.batch_size for shape in stage.shapes]
    return {
        "res": list(stage.resolutions),
        "batch_size": sizes[0] if len({*sizes}) == 1 else sizes,
        "res_schedule": stage.res_schedule or "epoch",
    }
