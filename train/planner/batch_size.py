"""What fits into the memory of a GPU? A cap on it, the largest batch, and what to change after it ran out."""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
from collections.abc import Callable
from typing import Any

import torch

from pipeline import cuda
from pipeline.errors import ResoluteError
from pipeline.plan.plan import Plan
from pipeline.plan.stage import AUTO
from train.loop import Learner
from train.recipe.schema import Recipe

from .measure import synthetic

__all__ = ["DoesNotFit", "Probe", "cap_memory", "largest_that_fits", "real_steps", "with_batch_sizes"]

_GIB = 2**30
_ROOM_FRAC = 0.9  # of the free memory is a step's: the loader's decoders want some, and blocks of other sizes remain

Probe = Callable[[int, int], bool]  # (stage, samples a step on this rank): do they fit?


def cap_memory(device: torch.device, gib: float) -> None:
    """Let tensors of this process take at most `gib` GiB, as on a smaller GPU; 0 = all there is.

    CUDA's own memory and that of the loader's decoders, about 1 GiB, come on top.
    """
    if gib and device.type != "cuda":
        raise ResoluteError(f"--gpu-memory-gib: got {gib:g} with device {device.type}, expected a GPU; leave it out")
    if gib:
        there = cuda.total_bytes(device) / _GIB
        if not 0 < gib <= there:
            raise ResoluteError(
                f"--gpu-memory-gib: got {gib:g}, expected above 0 and at most the {there:.1f} of this GPU; lower it"
            )
        cuda.limit_memory(device, gib * _GIB)


def with_batch_sizes(
    recipe: Recipe, *, device: torch.device, saved_recipe: Callable[[], Any], probe: Callable[[Recipe], tuple[Plan, Probe]],
    world_size: int = 1, min_over_ranks: Callable[[int], int] = int,
) -> Recipe:  # fmt: skip
    """The recipe with a number for each "auto": that of `kept`, a checkpoint's recipe or None, else the most that fit.

    `probe` gets the recipe with small batches and returns its plan and what probes; `agree` gives every rank the least
    of all ranks' numbers. Raises `ResoluteError` on a CPU, and where not one sample fits.
    """
    sizes = [stage.batch_size for stage in recipe.stages]
    if AUTO not in sizes:
        return recipe
    old = [stage["batch_size"] for stage in (saved_recipe() or {"stages": []})["stages"]]
    if len(old) == len(sizes):
        return _sized(recipe, [size or before for size, before in zip(sizes, old, strict=True)])
    if device.type != "cuda":
        raise ResoluteError(
            f"stages[{sizes.index(AUTO)}].batch_size: got auto on a {device.type.upper()}, where memory does not bound "
            "a batch, expected a number; put one in the recipe"
        )
    plan, fits = probe(_sized(recipe, [size or 8 * world_size for size in sizes]))
    for segment in plan.segments:
        number = segment.stage
        if sizes[number] == AUTO:
            max_size = max(1, segment.samples // world_size)
            found = min_over_ranks(largest_that_fits(functools.partial(fits, number), max_size=max_size))
            if not found:
                raise ResoluteError(
                    f"stages[{number}].batch_size: got auto, but not one sample of {segment.res} px fits into the GPU, "
                    "expected some; choose a smaller model or resolution"
                )
            sizes[number] = world_size * found
    return _sized(recipe, sizes)


def _sized(recipe: Recipe, sizes: list[int]) -> Recipe:
    stages = zip(recipe.stages, sizes, strict=True)
    return dataclasses.replace(recipe, stages=tuple(dataclasses.replace(stage, batch_size=n) for stage, n in stages))


def largest_that_fits(fits: Callable[[int], bool], *, max_size: int) -> int:
    """The largest number up to `most`, or multiple of 8 (of 32 from 256 on) below it, for which `fits`; 0 if none.

    Powers of two up to one that does not fit, then halves of the gap. Below 8: powers of two.
    """
    good, size = 0, min(8, max_size)
    while fits(size):
        good = size
        if good == max_size:
            return good
        size = min(2 * size, max_size)
    if not good:
        smaller = itertools.takewhile(lambda n: n >= 1, (size >> k for k in itertools.count(1)))
        return next((n for n in smaller if fits(n)), 0)
    bad = size
    while True:
        unit = 32 if good >= 256 else 8
        between = (bad - 1 - good) // unit  # multiples of it that are neither
        if not between:
            return good
        size = good + (between + 1) // 2 * unit
        good, bad = (size, bad) if fits(size) else (good, size)


def real_steps(plan: Plan, learner: Learner, *, world_size: int) -> Probe:
    """Probes with two whole steps of `learner`, of no use afterwards: the second finds the optimizer's state there."""
    device = learner.device
    first = {s.stage: plan.batch(s.first) for s in reversed(plan.segments) if s.split == "train"}
    # why: where others join, each holds its gradients a second time, to send them
    sent = sum(p.numel() * p.element_size() for p in learner.network.parameters()) if world_size > 1 else 0

    def fits(stage: int, count: int) -> bool:
        room = min(cuda.available_bytes(device), cuda.memory_limit_bytes(device))
        cuda.reset_peak_memory(device)
        batch = None
        try:
            times = count / len(first[stage])
            batch = synthetic(first[stage], device=device, dtype=learner.image_dtype, times=times)
            for _ in range(2):
                learner.train_step(batch)
            cuda.synchronize(device)  # sync: what the steps took is known when they are done
            return cuda.peak_reserved_bytes(device) + sent <= _ROOM_FRAC * room
        except torch.OutOfMemoryError:
            return False
        finally:
            del batch
            learner.optimizer.zero_grad(set_to_none=True)
            gc.gather()  # why: what the error's frames hold is in cycles
            cuda.empty_cache()

    return fits


class DoesNotFit(Exception):
    """A step was out of memory."""

    def __init__(self, split: str, res: int, samples: int) -> None:
        """`samples`: of this rank."""
        super().__init__(split, res, samples)
        self.split, self.res, self.samples = split, res, samples

    def describe(self, plan: Plan, recipe: Recipe, device: torch.device) -> ResoluteError:
        stages = sorted({s.stage for s in plan.segments if (s.split, s.res) == (self.split, self.res)})
        each = self.samples
        if self.split == "val":
            advice = f"set eval.batch_size = {_half(recipe.eval.batch_size)}"
        else:
            parts, size = recipe.optim.accumulate, recipe.stages[stages[0]].batch_size
            each = -(-self.samples // parts)
            advice = (
                f'set batch_size = {_half(size)} there ("auto" finds the most that fit), or optim.accumulate = '
                f"{2 * parts}, which keeps the samples of a step"
            )
        return ResoluteError(
            f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}, {self.split}: out of memory with images of "
            f"{each}x3x{self.res}x{self.res}{_in_use(device)}, expected them to fit; {advice}"
        )


def _half(size: int) -> int:
    return size // 16 * 8 or max(1, size // 2)


def _in_use(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    values = (
        cuda.allocated_bytes(device), cuda.reserved_bytes(device), cuda.memory_limit_bytes(device),
        cuda.total_bytes(device),
    )  # fmt: skip
    used, saved_recipe, may, all_ = (f"{value / _GIB:.1f}" for value in values)
    return f" ({used} GiB in use, {kept} GiB with what torch keeps, of {may} GiB it may take; the GPU has {all_} GiB)"
