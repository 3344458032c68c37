"""Learning rate and momentum as pure functions of the optimizer step, for every kind of schedule.

Nothing here has state, so the values are exact after any resume.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch

from resolute.pipeline.plan.batching import each_epoch
from resolute.train.recipe.schema import Optim, Schedule
from resolute.train.recipe.sections import (
    CosineSchedule,
    FlatCosineSchedule,
    LinearSchedule,
    OneCycleSchedule,
    StepSchedule,
)
from resolute.train.recipe.stages import RecipeStage

_PCT_START, _DIV, _FINAL_DIV = 0.25, 10.0, 1e3  # defaults. Source: fastai's `fit_one_cycle`, torch's OneCycleLR

__all__ = ["OneCycle", "Rates", "WarmDecay", "epoch_samples", "epoch_steps", "peak_momentum"]


def epoch_samples(stages: Sequence[RecipeStage], samples: int) -> list[int]:
    """Training samples of each epoch for a set of `samples`; equal to those of `Plan`."""
    return [count for _, count, _ in each_epoch(stages, samples=samples)]


def epoch_steps(stages: Sequence[RecipeStage], samples: int) -> list[int]:
    """Optimizer steps of each epoch for a set of `samples`; equal to those of `Plan`."""
    return [sum(run.batches for run in runs) for _, _, runs in each_epoch(stages, samples=samples)]


Curve = Callable[[float], tuple[float, float]]  # step -> (learning rate, momentum)
_Restarting = OneCycleSchedule | CosineSchedule
_Curved = _Restarting | LinearSchedule | FlatCosineSchedule  # all but StepSchedule


class Rates:
    """Learning rate and momentum of each step of the run; `apply` sets them in an optimizer.

    `epoch_steps`: optimizer steps of each epoch, needed by kinds that depend on epochs or stages, by `warmup_epochs`
    and by `progress` of samples or epochs. `epoch_samples`: training samples of each epoch, needed by `progress` of
    samples.
    """

    def __init__(
        self,
        schedule: Schedule,
        optim: Optim,
        stages: Sequence[RecipeStage],
        *,
        total_steps: int,
        epoch_steps: Sequence[int] = (),
        epoch_samples: Sequence[int] = (),
    ) -> None:
        steps = list(epoch_steps) or [total_steps]
        epochs = sum(stage.epochs for stage in stages)
        needs_epochs = (
            isinstance(schedule, StepSchedule)
            or schedule.warmup_epochs is not None
            or (isinstance(schedule, _Restarting) and schedule.restart_each_stage)
        )
        if sum(steps) != total_steps or (needs_epochs and len(steps) != epochs):
            raise ValueError(f"got epochs of {steps} steps, expected {epochs} epochs, {total_steps} steps in all")
        self._x_axis: _XAxis | None = None
        if not isinstance(schedule, StepSchedule) and schedule.progress != "steps":
            weights = epoch_samples if schedule.progress == "samples" else [1] * len(steps)
            self._x_axis = _XAxis(steps, weights)
        self._pieces = self._curves(schedule, optim, stages, steps)
        self._firsts = [first for first, _ in self._pieces]
        self._has_momentum = bool(optim.momentum)  # why not the group's: it is 0 at the peak if `base_momentum` is
        base = schedule.base_batch or stages[0].shapes[0].batch_size
        power = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}[schedule.batch_rule]
        self._factors = [
            {
                shape.res: stage.optim.get("lr_scale", optim.lr_scale) * (shape.batch_size / base) ** power
                for shape in stage.shapes
            }
            for stage in stages
        ]

    def _curves(
        self, schedule: Schedule, optim: Optim, stages: Sequence[RecipeStage], steps: list[int]
    ) -> list[tuple[int, Curve]]:
        """The run as pieces: (first step, curve over the steps since then). `steps`: of each epoch."""
        borders = [0, *accumulate(steps)]  # first step of each epoch, and the end of the run
        if isinstance(schedule, StepSchedule):
            momentum = _momentum(optim)
            marks = [0, *(borders[epoch] for epoch in schedule.milestone_epochs)]
            return [(first, _constant(optim.lr * schedule.gamma**i, momentum)) for i, first in enumerate(marks)]
        marks = [0, borders[-1]]
        if isinstance(schedule, _Restarting) and schedule.restart_each_stage:
            marks = [borders[epoch] for epoch in accumulate((stage.epochs for stage in stages), initial=0)]
        rise: float | None = None
        if schedule.warmup_epochs is not None:
            rise = _steps_of(schedule.warmup_epochs, steps)
            rise = self._x_axis.at(rise) if self._x_axis is not None else rise
        pieces: list[tuple[int, Curve]] = []
        for first, end in pairwise(marks):
            if isinstance(schedule, OneCycleSchedule):
                curve = OneCycle(schedule, optim, total_steps=end - first, rise=rise).at
            else:
                curve = WarmDecay(schedule, optim, total_steps=end - first, rise=rise).at
            pieces.append((first, curve))
        return pieces

    def at(self, step: int) -> tuple[float, float]:
        """(learning rate before the stage's factor, momentum) of optimizer step `step`, 0-based."""
        if self._x_axis is not None:
            return self._pieces[0][1](self._x_axis.at(step))
        first, curve = self._pieces[bisect.bisect_right(self._firsts, step) - 1]
        return curve(step - first)

    def factor(self, stage: int, res: int | None = None) -> float:
        """The stage's factor on the learning rate of batches at `res` px (None: its first resolution).

        `optim.lr_scale` times the factor of `schedule.batch_rule`.
        """
        factors = self._factors[stage]
        return next(iter(factors.values())) if res is None else factors[res]

    def apply(self, optimizer: torch.optim.Optimizer, step: int, *, stage: int, res: int | None = None) -> float:
        """Set rate and momentum of every parameter group for `step`; returns the rate before the groups' factors."""
        lr, momentum = self.at(step)
        lr *= self.factor(stage, res)
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)  # of `optim.layer_decay` and `head_lr_scale`
            if "momentum" in group and self._has_momentum:
                group["momentum"] = momentum
            elif "betas" in group:
                group["betas"] = (momentum, group["betas"][1])
        return lr


class _XAxis:
    """Maps a step to its position on a curve over samples or epochs, as a fractional step of 0 to total - 1."""

    def __init__(self, steps: Sequence[int], weights: Sequence[int]) -> None:
        """`steps`: steps of each epoch. `weights`: each epoch's share of the curve, in any unit."""
        if len(weights) != len(steps):
            raise ValueError(f"got {len(weights)} weights for {len(steps)} epochs, expected one per epoch")
        self._first_steps, self._before = [0, *accumulate(steps)], [0, *accumulate(weights)]
        self._steps, self._weights = steps, weights
        last = self._done(sum(steps) - 1)
        self._scale = (sum(steps) - 1) / last if last else 0.0  # the last step is the end of the curve

    def _done(self, step: float) -> float:
        epoch = bisect.bisect_right(self._first_steps, step) - 1
        return self._before[epoch] + self._weights[epoch] * (step - self._first_steps[epoch]) / self._steps[epoch]

    def at(self, step: float) -> float:
        return self._scale * self._done(step)


def _steps_of(epochs: float, steps: Sequence[int]) -> float:
    """The steps of the first `epochs` epochs, which may be a fraction, if the epochs have `steps` steps."""
    complete = int(epochs)
    return sum(steps[:complete]) + (epochs - complete) * (steps[complete] if complete < len(steps) else 0)


def _constant(lr: float, momentum: float) -> Curve:
    return lambda step: (lr, momentum)


class OneCycle:
    """The learning rate rises once and falls once; the momentum does the opposite.

    Source: Smith and Topin, arXiv 1708.07120, in the cosine form of torch.optim.lr_scheduler.OneCycleLR.
    """

    def __init__(
        self, schedule: OneCycleSchedule, optim: Optim, *, total_steps: int, rise: float | None = None
    ) -> None:
        """`rise`: steps with a rising learning rate; None: the fraction `pct_start` of all."""
        self._first, self._peak, self._last = _ends(schedule, optim, warms_up=True)
        self._high, self._low = _momentum(optim), peak_momentum(schedule, optim)
        pct_start = _PCT_START if schedule.pct_start is None else schedule.pct_start
        self._rise = max(1.0, (pct_start * total_steps if rise is None else rise) - 1)
        self._fall = max(1.0, total_steps - 1 - self._rise)

    def at(self, step: float) -> tuple[float, float]:
        """(learning rate, momentum) of step `step`, 0-based."""
        if step <= self._rise:
            done = step / self._rise
            return _cosine(self._first, self._peak, done), _cosine(self._high, self._low, done)
        done = min(1.0, (step - self._rise) / self._fall)
        return _cosine(self._peak, self._last, done), _cosine(self._low, self._high, done)


class WarmDecay:
    """A linear warm-up and a constant part, which may be absent, then a decay along half a cosine or a line; constant
    momentum.

    Source: Loshchilov and Hutter, SGDR, arXiv 1608.03983, eq. 5; warm-up: Goyal et al., arXiv 1706.02677; constant
    part: fastai's `fit_flat_cos`.
    """

    def __init__(
        self,
        schedule: CosineSchedule | LinearSchedule | FlatCosineSchedule,
        optim: Optim,
        *,
        total_steps: int,
        rise: float | None = None,
    ) -> None:
        """`rise`: warm-up steps; None: the fraction `pct_start` of all."""
        self._curve = _line if isinstance(schedule, LinearSchedule) else _cosine
        self._rise = warm = round((schedule.pct_start or 0.0) * total_steps if rise is None else rise)
        flat = round(schedule.flat_until * total_steps) if isinstance(schedule, FlatCosineSchedule) else 0
        self._flat_end = max(warm, flat)
        self._fall = max(1, total_steps - self._flat_end)
        self._first, self._peak, self._last = _ends(schedule, optim, warms_up=bool(warm))
        self._momentum = _momentum(optim)

    def at(self, step: float) -> tuple[float, float]:
        """(learning rate, momentum) of step `step`, 0-based."""
        if step < self._rise:
            return self._first + (self._peak - self._first) * step / self._rise, self._momentum
        return self._curve(self._peak, self._last, max(0.0, step - self._flat_end) / self._fall), self._momentum


def peak_momentum(schedule: Schedule, optim: Optim) -> float:
    """The momentum, or first beta, at the learning rate's peak."""
    momentum = _momentum(optim)
    return min(schedule.base_momentum, momentum) if isinstance(schedule, OneCycleSchedule) else momentum


def _ends(schedule: _Curved, optim: Optim, *, warms_up: bool) -> tuple[float, float, float]:
    """The first, highest and last learning rate; without a warm-up, the first is the highest."""
    first = peak = optim.lr
    if warms_up:
        first = peak / _DIV if schedule.first_lr is None else schedule.first_lr
    return first, peak, first / _FINAL_DIV if schedule.last_lr is None else schedule.last_lr


def _momentum(optim: Optim) -> float:
    assert optim.betas is not None  # why: `Optim` has replaced it
    return optim.betas[0] if optim.uses_betas else optim.momentum


def _cosine(start: float, end: float, done: float) -> float:
    return end + (start - end) / 2.0 * (1.0 + math.cos(math.pi * done))


def _line(start: float, end: float, done: float) -> float:
    return start + (end - start) * done
