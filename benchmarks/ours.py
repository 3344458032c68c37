"""This project's loader as a benchmark subject: one plan of full training batches, drained as an iterator."""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Literal

import torch

from pipeline.dataset.shard_set import ShardSet
from pipeline.errors import ResoluteError
from pipeline.loader.loader import Loader
from pipeline.plan.order import Order
from pipeline.plan.plan import Plan
from pipeline.plan.stage import Stage

__all__ = ["full_batches", "our_batches", "train_plan"]


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


def train_plan(shards: ShardSet, stages: list[Stage], *, order: Order = "full") -> Plan:
    """These stages without validation passes."""
    return Plan(shards, stages, order=order, eval_batch_size=None)


def our_batches(
    plan: Plan, *, device: torch.device, threads: int, decode: Literal["cpu", "gpu"] | None = None
) -> Generator[torch.Tensor, None, None]:
    """Yield the images (N, 3, res, res) float32, normalised, on `device`, of all batches of `plan`.

    The loader starts with the first `next` and is closed with the generator (`contextlib.closing`).
    """
    with Loader(plan, device=device, threads=threads, decode=decode) as loader:
        for batch in loader:
            yield batch.images
