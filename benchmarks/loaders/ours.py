"""This project's loader: one plan and one loader over all resolutions. Variant "gpu": JPEGs are decoded on the GPU."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator

import numpy as np
import torch
from numpy.typing import NDArray

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.loader.loader import Loader
from resolute.pipeline.plan.plan import Plan
from resolute.pipeline.plan.stage import Stage

from .job import MEAN, STD, Job

__all__ = ["centre_crops", "full_batches", "open_shards", "stream", "training_plan"]


def open_shards(job: Job) -> ShardSet:
    """The job's shard set, at the job's resolutions."""
    return dataclasses.replace(ShardSet.open(job.shards), resolutions=job.resolutions)


def full_batches(shards: ShardSet, res: int, *, batches: int, batch_size: int) -> Stage:
    """A stage of at least `batches` batches at `res` px, all with exactly `batch_size` samples.

    Raises `ResoluteError` if the training split is smaller than one batch.
    """
    total = len(shards.splits["train"])
    if total < batch_size:
        raise ResoluteError(
            f"{shards.root}: got {total} training samples, expected a full batch of {batch_size}; "
            f"set --batch-size {total} or less"
        )
    epochs = math.ceil(batches / (total // batch_size))
    per_epoch = math.ceil(batches / epochs)  # never more than total // batch_size
    return Stage(res=res, epochs=epochs, batch_size=batch_size, fraction=min(1.0, per_epoch * batch_size / total))


def training_plan(shards: ShardSet, stages: list[Stage]) -> Plan:
    """These stages without validation passes."""
    return Plan(shards, stages, eval_batch_size=None)


def stream(job: Job) -> Generator[torch.Tensor, None, None]:
    shards = open_shards(job)
    stages = [full_batches(shards, res, batches=job.batches, batch_size=job.batch_size) for res in job.resolutions]
    with Loader(
        training_plan(shards, stages),
        device=job.device,
        decode="gpu" if job.variant == "gpu" and job.device != "cpu" else "cpu",
        dtype=getattr(torch, job.dtype),
        num_threads=job.workers,
    ) as loader:
        for batch in loader:
            yield batch.images


def centre_crops(job: Job, jpegs: list[bytes]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """(N, res, res, 3) in 0..255 and (N, 4) crops x, y, w, h: a validation batch, read by our own reader."""
    shards, (res,) = open_shards(job), job.resolutions
    stage = Stage(res=res, epochs=1, batch_size=2, fraction=min(1.0, 2 / len(shards.splits["train"])))
    plan = Plan(shards, [stage], eval_batch_size=len(jpegs), eval_crop_pct=job.crop_frac)
    with Loader(plan, device="cpu", num_threads=job.workers) as loader:
        batch = next(batch for batch in loader if batch.spec.split == "val")
    order = np.argsort(batch.spec.ids)
    assert np.array_equal(batch.spec.ids[order], np.arange(len(jpegs))), "validation is not in the order of the tars"
    pixels = batch.images.permute(0, 2, 3, 1) * torch.tensor(STD) + torch.tensor(MEAN)
    return (255 * pixels).numpy().astype(np.float32)[order], batch.spec.crops.astype(np.int64)[order]
