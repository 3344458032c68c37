"""Compares images decoded on a GPU with those decoded on the CPU."""

from __future__ import annotations

import itertools

import torch

from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.loader.loader import Loader
from resolute.pipeline.plan.plan import Plan
from resolute.pipeline.plan.stage import Stage

__all__ = ["difference"]

_BATCHES = 4
# Levels of 255 by which the images may differ in the mean: half of them, and each. Decoders and resizes round
# differently, and interpolate chroma differently beside a crop's border
_HALF_WITHIN, _ALL_WITHIN = 1.5, 8.0


def difference(shards: ShardSet, *, res: int, batch_size: int, device: str, threads: int) -> str | None:
    """Describe how training batches decoded on the GPU `device` differ from the CPU's; None if within tolerance.

    The images are only cropped, flipped and resized, since other operations can enlarge differences.
    """
    plan = Plan(shards, [Stage(res=res, epochs=1, batch_size=batch_size)], eval_batch_size=None)
    each = []
    with (
        Loader(plan, num_threads=threads, on_bad_sample="skip", world_size=1) as on_cpu,
        Loader(plan, device=device, decode="gpu", num_threads=threads, on_bad_sample="skip", world_size=1) as on_gpu,
    ):
        for expected, got in itertools.islice(zip(on_cpu, on_gpu, strict=True), _BATCHES):
            error = (got.images.cpu() - expected.images).abs()
            each.append(255 * 0.226 * error.mean(dim=(1, 2, 3)))  # 0.226: mean of the loader's default `std`
    levels = torch.cat(each)
    median, largest = float(levels.median()), float(levels.max())
    if median <= _HALF_WITHIN and largest <= _ALL_WITHIN:
        return None
    return (
        f"images differ from the CPU's by {median:.1f} levels of 255 in the median and {largest:.1f} at most, "
        f"expected {_HALF_WITHIN:g} and {_ALL_WITHIN:g}"
    )
