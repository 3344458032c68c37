"""This project's loader as a peer: one plan and one loader over all resolutions."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.ours import full_batches, our_batches, train_plan
from pipeline.dataset.shard_set import ShardSet
from pipeline.loader.loader import Loader
from pipeline.plan.plan import Plan
from pipeline.plan.stage import Stage

from .job import MEAN, STD, Job

__all__ = ["centre_crops", "stream"]


def stream(job: Job) -> Generator[torch.Tensor, None, None]:
    shards = ShardSet.open(Path(job.shards), resolutions=job.resolutions)
    stages = [full_batches(shards, res, batches=job.batches, batch_size=job.batch_size) for res in job.resolutions]
    yield from our_batches(train_plan(shards, stages), device=torch.device("cpu"), threads=job.workers)


def centre_crops(job: Job, jpegs: list[bytes]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """(N, res, res, 3) in 0..255 and (N, 4) windows x, y, w, h: a validation batch, read by our own reader."""
    (res,) = job.resolutions
    shards = ShardSet.open(Path(job.shards), resolutions=job.resolutions)
    stage = Stage(res=res, epochs=1, batch_size=2, fraction=min(1.0, 2 / len(shards.splits["train"])))
    plan = Plan(shards, [stage], eval_batch_size=len(jpegs), eval_crop_frac=job.crop_frac)
    with Loader(plan, device="cpu", threads=job.workers) as loader:
        batch = next(batch for batch in loader if batch.spec.split == "val")
    order = np.argsort(batch.spec.ids)
    assert np.array_equal(batch.spec.ids[order], np.arange(len(jpegs))), "validation is not in the order of the tars"
    pixels = batch.images.permute(0, 2, 3, 1) * torch.tensor(STD) + torch.tensor(MEAN)
    return (255 * pixels).numpy().astype(np.float32)[order], batch.spec.crops.astype(np.int64)[order]
