"""A loader's batches by epoch: the training batches of each, then its validation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from resolute.errors import ResoluteError
from resolute.pipeline.plan.plan import Phase, Plan

from .batch import Batch

__all__ = ["Epoch", "EpochBatches", "epochs"]


class BatchStream(Iterator[Batch], Protocol):
    """What epochs need of the `Loader`."""

    plan: Plan

    @property
    def position(self) -> int: ...  # index of the batch that `next()` returns next
    def _has_passed(self, end: int) -> bool:
        """Whether all batches before `end` have been returned or left out."""

    def _move_to(self, position: int) -> None:
        """Leave out the batches before `position`."""


class EpochBatches:
    """The training or the validation batches of an epoch. Iterating yields those that are left.

    It first moves the loader to them, past batches that the loader has not returned. Raises `ResoluteError` for batches
    that the loader has returned or left out, and for a validation before the first training batch of its epoch.
    """

    def __init__(self, loader: BatchStream, phase: Phase | None, *, before: Phase | None = None) -> None:
        """`before`: the training batches of the epoch, for those of its validation."""
        self._loader, self._before = loader, before
        self._first = 0 if phase is None else phase.first
        self._end = self._first + (0 if phase is None else phase.batches)

    def __len__(self) -> int:
        """Number of its batches, those that the loader has returned included."""
        return self._end - self._first

    @property
    def is_over(self) -> bool:
        """Whether no batch is left."""
        return self._loader.position >= self._end

    def __iter__(self) -> Iterator[Batch]:
        if len(self) and self._loader._has_passed(self._end):
            raise ResoluteError(
                f"Loader: a loop over {len(self)} batches of an epoch that have all been returned or left out; go on "
                f'to the next epoch, or go back with load_state_dict({{"next_batch": {self._first}}})'
            )
        before = self._before
        if len(self) and before is not None and self._loader.position <= before.first:
            raise ResoluteError(
                f"Loader: epoch.val before epoch.train in epoch {before.epoch}, which would leave out its "
                f"{before.batches} training batches; loop over epoch.train first"
            )
        return self._left()

    def _left(self) -> Iterator[Batch]:
        if len(self) and self._loader.position < self._first:
            self._loader._move_to(self._first)
        is_complete = self.is_over
        while self._loader.position < self._end:
            batch = next(self._loader)
            is_complete = self.is_over  # why before the yield: the caller may validate at the last training batch
            yield batch
        if not is_complete:
            raise ResoluteError(
                "Loader: a loop over the batches of an epoch goes on, but another one has moved the loader to batch "
                f"{self._loader.position}, past these; loop over one epoch after the other"
            )


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """An epoch of the run; `val` has no batches in an epoch without validation."""

    number: int  # 0-based, counted over the run
    stage: int
    res: int  # px, the largest of its training batches
    train: EpochBatches
    val: EpochBatches


def epochs(loader: BatchStream) -> Iterator[Epoch]:
    """Yield the epochs that have batches left, from the loader's position on."""
    phases: dict[int, dict[str, Phase]] = {}
    for phase in loader.plan.phases:
        phases.setdefault(phase.epoch, {})[phase.split] = phase
    for number, splits in phases.items():
        train = EpochBatches(loader, splits.get("train"))
        val = EpochBatches(loader, splits.get("val"), before=splits.get("train"))
        if not (train.is_over and val.is_over):
            about = splits.get("train") or splits["val"]
            yield Epoch(number=number, stage=about.stage, res=about.res, train=train, val=val)
