"""GPU memory: the limit of `--gpu-memory-gib`, and the search for the largest batch size."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch

from resolute import cuda
from resolute.errors import ResoluteError
from resolute.pipeline.plan.plan import BatchSpec, Plan
from resolute.pipeline.plan.stage import AUTO
from resolute.train.learner import Learner
from resolute.train.out_of_memory import DoesNotFit, out_of_memory
from resolute.train.recipe.schema import Recipe
from resolute.train.synthetic import synthetic

__all__ = [
    "Probe",
    "cap_memory",
    "largest_that_fits",
    "loader_bytes",
    "real_steps",
    "with_batch_sizes",
]

_GIB = 2**30
_USABLE_FRAC = 0.95  # of the free memory is for steps and loader; the rest is lost to fragmentation
_DECODER_BYTES = _GIB // 2  # of DALI, whatever the batch; assumed, not measured
_IN_FLIGHT = 3 + 2  # batches: the loader's `batches_ahead`, the consumer's batch and the one before it

Probe = Callable[[int, int], bool]  # (stage, samples per step on this rank, 0: validation alone) -> whether they fit


def cap_memory(device: torch.device, gib: float) -> None:
    """Limit this process's tensors to `gib` GiB of GPU memory, to emulate a smaller GPU; 0 = no limit.

    CUDA's context and the loader's decoders need about 1 GiB in addition. Raises `ResoluteError` on a CPU and for more
    than the GPU has.
    """
    if gib and device.type != "cuda":
        raise ResoluteError(f"--gpu-memory-gib: got {gib:g} with device {device.type}, expected a GPU; omit it")
    if gib:
        total = cuda.total_bytes(device) / _GIB
        if not 0 < gib <= total:
            raise ResoluteError(
                f"--gpu-memory-gib: got {gib:g}, expected above 0 and at most the {total:.1f} of this GPU; lower it"
            )
        cuda.limit_memory(device, gib * _GIB)


def with_batch_sizes(
    recipe: Recipe,
    *,
    device: torch.device,
    saved_recipe: Callable[[], Any],
    probe: Callable[[Recipe], tuple[Plan, Probe]],
    world_size: int = 1,
    min_over_ranks: Callable[[int], int] = int,
) -> Recipe:
    """The recipe with every batch size of "auto" replaced by a number.

    `saved_recipe` returns the recipe values of the run's checkpoint, whose sizes are kept, or None. Otherwise the
    largest size that fits is searched: `probe` takes the recipe with small batches and returns its plan and a `Probe`;
    `min_over_ranks` gives every rank the minimum of all ranks' sizes. Raises `ResoluteError` on a CPU, and if not even
    one sample, or not the validation's batch, fits.
    """
    sizes: list[Any] = [stage.batch_size for stage in recipe.stages]
    if AUTO not in sizes:
        return recipe
    old = [stage["batch_size"] for stage in (saved_recipe() or {"stages": []})["stages"]]
    if len(old) == len(sizes):
        return _sized(recipe, [saved if size == AUTO else size for size, saved in zip(sizes, old, strict=True)])
    if device.type != "cuda":
        raise ResoluteError(
            f"stages[{sizes.index(AUTO)}].batch_size: got auto on a {device.type.upper()}, where the largest batch "
            "is not searched, expected a number; set one in the recipe"
        )
    small = world_size * max(8, recipe.optim.grad_accum_steps)
    plan, fits = probe(_sized(recipe, [small if size == AUTO else size for size in sizes]))
    for phase in sorted(plan.phases, key=lambda phase: -phase.res):  # why: a ramp's largest resolution counts
        number = phase.stage
        if phase.split == "train" and sizes[number] == AUTO:
            max_size = max(1, phase.samples // world_size)
            size = min_over_ranks(largest_that_fits(functools.partial(fits, number), max_size=max_size))
            if not size:
                val = next((each for each in plan.phases if (each.split, each.stage) == ("val", number)), None)
                if val is not None and not fits(number, 0):
                    raise DoesNotFit("val", val.res, -(-val.batch_size // world_size)).describe(plan, recipe, device)
                raise ResoluteError(
                    f"stages[{number}].batch_size: got auto, but not one sample of {phase.res} px fits into the GPU, "
                    "expected at least one; choose a smaller model or resolution"
                )
            sizes[number] = world_size * size
    return _sized(recipe, sizes)


def _sized(recipe: Recipe, sizes: list[Any]) -> Recipe:
    stages = zip(recipe.stages, sizes, strict=True)
    return dataclasses.replace(recipe, stages=tuple(dataclasses.replace(stage, batch_size=n) for stage, n in stages))


def largest_that_fits(fits: Callable[[int], bool], *, max_size: int) -> int:
    """The largest size for which `fits`: `max_size` itself, or a multiple of 8 (of 32 from 256 on) below; 0 if none.

    Doubles the size until it does not fit, then bisects the gap. Below 8, only powers of two are tried.
    """
    good, size = 0, min(8, max_size)
    while fits(size):
        good = size
        if good == max_size:
            return good
        size = min(2 * size, max_size)
    if not good:
        return next((n for n in (size >> 1, size >> 2, size >> 3) if n and fits(n)), 0)
    bad = size
    while True:
        unit = 32 if good >= 256 else 8
        between = (bad - 1 - good) // unit  # number of untested candidates
        if not between:
            return good
        size = good + (between + 1) // 2 * unit
        good, bad = (size, bad) if fits(size) else (good, size)


def real_steps(plan: Plan, learner: Learner, *, world_size: int) -> Probe:
    """A probe that runs two training steps of `learner` at a stage's largest resolution, which spoil the learner, and
    a step of the stage's validation.

    Two steps, because the optimizer's state exists only from the second on.
    """
    device = learner.device
    first = [plan.batch(plan.largest_batch(stage)) for stage in range(len(plan.stages))]
    val = {phase.stage: plan.batch(phase.first) for phase in plan.phases if phase.split == "val"}

    def fits(stage: int, count: int) -> bool:
        parts = [(first[stage], count)] if count else []
        parts += [(val[stage], -(-len(val[stage]) // world_size))] if stage in val else []
        available = min(cuda.available_bytes(device), cuda.memory_limit_bytes(device))
        beside = max(
            (loader_bytes(plan, spec, samples, dtype=learner.image_dtype) for spec, samples in parts), default=0
        )
        cuda.reset_peak_memory(device)
        batch = None
        try:
            with _no_autotuning():
                for spec, samples in parts:
                    batch = synthetic(
                        spec, device=device, dtype=learner.image_dtype, times=samples / len(spec), head=learner.head
                    )
                    for _ in range(2 if spec.split == "train" else 1):
                        learner.train_step(batch) if spec.split == "train" else learner.eval_step(batch)
                    batch = None
            cuda.synchronize(device)  # sync: the peak is known once the steps are done
            return cuda.peak_reserved_bytes(device) + beside <= _USABLE_FRAC * available
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            return False
        finally:
            del batch
            learner.optimizer.zero_grad(set_to_none=True)
            gc.collect()  # why: the error's frames are in reference cycles
            cuda.empty_cache()

    return fits


def loader_bytes(plan: Plan, spec: BatchSpec, samples: int, *, dtype: torch.dtype) -> int:
    """GPU memory of the loader for batches of `samples` images like those of `spec`: calculated, an upper estimate.

    Of every batch in flight, the images as stored and as resized, in 8 bits, and as the network gets them. Of one, what
    the resize (in float32) and the operations of a policy (in 8 bits) keep in between.
    """
    stored = plan.shards.splits[spec.split].stored[spec.stored_res][spec.ids]
    pixels, out = float((stored["width"].astype(float) * stored["height"]).mean()), spec.res**2
    in_flight = 3 * (pixels + (1 + dtype.itemsize) * out)
    return _DECODER_BYTES + round(samples * (_IN_FLIGHT * in_flight + 3 * (4 * pixels + 2 * out)))


@contextlib.contextmanager
def _no_autotuning() -> Iterator[None]:
    """Within the block, cuDNN does not time its algorithms, which takes seconds for each new shape."""
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
