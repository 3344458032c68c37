"""The product's training step, for benchmarks: on any loader's images, or on a batch of random numbers."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Generator
from contextlib import closing
from typing import Any

import numpy as np
import torch

from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.loader.batch import Batch
from resolute.pipeline.plan.stage import Stage
from resolute.train.learner import Learner
from resolute.train.recipe.schema import Recipe
from resolute.train.warmup import warm_up

from .loaders import child
from .loaders.job import Job
from .loaders.ours import full_batches, training_plan
from .loaders.registry import LoaderEntry

__all__ = ["Trainer", "small_recipe"]


def small_recipe(*stages: Stage, model: str, compiled: bool = False) -> Recipe:
    """A recipe with these stages of `model`, default values, and a learning rate too low to diverge."""
    tables = [
        {"res": stage.res, "epochs": stage.epochs, "batch_size": stage.batch_size, "fraction": stage.fraction}
        for stage in stages
    ]
    return Recipe.parse(
        {"model": {"name": model}, "optim": {"lr": 1e-3}, "precision": {"compile": compiled}, "stages": tables},
        name="benchmark",
    )


class Trainer:
    """Training steps of a model on batches of which only the images matter: all are of one class."""

    def __init__(
        self, shards: ShardSet, *, model: str, device: torch.device, batch_size: int, compiled: bool = False
    ) -> None:
        """Warmed up for `batch_size` at each resolution of `shards`. `compiled`: with `precision.compile`."""
        stages = [full_batches(shards, res, batches=1, batch_size=batch_size) for res in shards.resolutions]
        recipe = small_recipe(*stages, model=model, compiled=compiled)
        plan = training_plan(shards, list(recipe.stages))
        self._specs = {phase.res: plan.batch(phase.first) for phase in plan.phases}
        self._learner = Learner(recipe, classes=len(shards.target), total_steps=plan.total_steps, device=device)
        self._batch_size = batch_size
        self.warm_up(batch_size)

    @property
    def image_dtype(self) -> torch.dtype:
        """Of the images that the training step takes."""
        return self._learner.image_dtype

    def warm_up(self, batch_size: int) -> None:
        warm_up(self._learner, [("train", res, batch_size) for res in sorted(self._specs, reverse=True)])

    def rate(self, res: int, *, seconds: float) -> float:
        """Images/s on one batch of random numbers."""
        device = self._learner.device
        images = torch.randn(self._batch_size, 3, res, res, device=device, dtype=self.image_dtype)
        batches = itertools.repeat(images.to(memory_format=torch.channels_last))
        self.step(next(batches))
        return float(child.timed(batches, self.step, seconds=seconds, device=device)["images_per_s"])

    def live(self, stream: Generator[torch.Tensor, None, None], *, seconds: float, steps_before: int) -> dict[str, Any]:
        """`child.timed` of training on the images of a loader, after some steps that use up what it prefetched."""
        for images in itertools.islice(stream, steps_before):
            self.step(images)
        return child.timed(stream, self.step, seconds=seconds, device=self._learner.device)

    def step(self, images: torch.Tensor) -> int:
        """Train on (N, 3, res, res) images; returns N."""
        self._learner.train_step(self._batch(images))
        return len(images)

    def step_times(self, loader: LoaderEntry, job: Job) -> list[list[float]]:
        """Seconds of each training step at each resolution of the job, waiting for the batch included."""
        times = dict[int, list[float]]()
        module = child.adapter(dataclasses.replace(job, module=loader.module, variant=loader.variant))
        with closing(module.stream(job)) as stream:
            first = next(stream)  # why: the start of a run is no stage change
            child.synchronise(self._learner.device)
            before = time.perf_counter()
            for images in itertools.chain([first], stream):
                self.step(images)
                child.synchronise(self._learner.device)  # sync: ends the timed interval
                now = time.perf_counter()
                times.setdefault(images.shape[-1], []).append(now - before)
                before = now
        return [*times.values()]

    def _batch(self, images: torch.Tensor) -> Batch:
        labels = torch.zeros(len(images), dtype=torch.int64, device=images.device)
        spec = dataclasses.replace(self._specs[images.shape[-1]], global_size=len(images))
        return Batch(
            images=images,
            targets=labels,
            partner_labels=labels,
            lam=torch.ones_like(labels).float(),
            keys=np.zeros(len(images), np.int64),
            spec=spec,
        )
