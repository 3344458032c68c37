"""Batches of random images: to measure the model without the loader, and to find the largest batch that fits."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from resolute.pipeline.loader.batch import Batch
from resolute.pipeline.plan.plan import BatchSpec, Plan
from resolute.train.learner import Learner
from resolute.train.model.outputs import CLASSES, Outputs

__all__ = ["synthetic", "synthetic_batch"]


def synthetic(
    spec: BatchSpec, *, device: torch.device, dtype: torch.dtype, times: float = 1.0, head: Outputs = CLASSES
) -> Batch:
    """A batch of random images (N, 3, res, res) like that of `spec`, with `times` as many samples and targets of 0."""
    count = round(times * len(spec))
    labels = torch.zeros(count, dtype=torch.int64, device=device)
    dense = head.target.kind != "class"
    targets = torch.zeros(count, len(head.target), device=device) if dense else labels
    images = torch.randn(count, 3, spec.res, spec.res, dtype=dtype, device=device)
    return Batch(
        images=images.to(memory_format=torch.channels_last),
        targets=targets,
        partner_labels=labels[:0] if dense else labels,
        lam=torch.ones(count, device=device),
        keys=np.zeros(count, np.int64),
        spec=dataclasses.replace(spec, ids=np.resize(spec.ids, count), global_size=round(times * spec.global_size)),
    )


def synthetic_batch(learner: Learner, plan: Plan, index: int, times: float = 1.0) -> Batch:
    """A batch of random images, `times` as large as batch `index` of the run."""
    ranks = learner.ranks
    spec = plan.batch(index, rank=ranks.rank, world_size=ranks.world_size)
    return synthetic(spec, device=learner.device, dtype=learner.image_dtype, times=times, head=learner.head)
