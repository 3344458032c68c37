"""timm's loader (`timm.data.create_loader`), also with its scheduled sizes.

It reads the stored images as a map-style data set, which scheduled sizes require. Colour jitter, on by default in timm,
is off. timm's prefetcher normalises the pixels in the main process; without it (variant "plain"), workers do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import create_loader
from torch.utils.data import Dataset

from .dataloader import pillow, stored_images
from .job import Job
from .ours import open_shards
from .tars import Jpegs, endless

__all__ = ["stream"]


class _Images(Dataset[tuple[Any, int]]):
    """The stored images in one long shuffled epoch, with `transform` set by timm."""

    def __init__(self, jpegs: Jpegs, total: int, seed: int) -> None:
        self._jpegs = jpegs
        self._order = np.fromiter(itertools.islice(endless(len(jpegs), seed), total), np.int64, total)
        self.transform: Callable[[Image.Image], Any] | None = None

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, position: int) -> tuple[Any, int]:
        sample = int(self._order[position])
        image = pillow(self._jpegs.jpeg(sample))
        return self.transform(image) if self.transform else image, self._jpegs.labels[sample]


def stream(job: Job) -> Generator[torch.Tensor, None, None]:
    """variant "scheduled": one loader over all resolutions, all read from the largest; else a loader for each."""
    common: dict[str, Any] = {
        "batch_size": job.batch_size,
        "is_training": True,
        "scale": job.scale,
        "ratio": job.ratio,
        "hflip": job.flip_prob,
        "color_jitter": 0.0,
        "interpolation": "bilinear",
        "num_workers": job.workers,
        "device": torch.device("cpu"),
        "persistent_workers": True,
        "use_prefetcher": job.variant != "plain",
    }
    shards, total = open_shards(job), job.batches * job.batch_size
    if job.variant == "scheduled":
        largest = max(job.resolutions)
        images: Any = _Images(stored_images(shards, largest), total, 0)
        loader: Any = create_loader(
            images,
            largest,
            input_size_choices=job.resolutions,
            batch_choice_schedule="progressive",
            batch_schedule_epochs=len(job.resolutions),
            batch_schedule_spread=0.0,
            batch_schedule_random_mix=0.0,
            num_batches=job.batches,
            **common,
        )
        for epoch in range(len(job.resolutions)):
            loader.batch_sampler.set_epoch(epoch)
            for batch, _ in loader:
                yield batch
        return
    for seed, res in enumerate(job.resolutions):
        images = _Images(stored_images(shards, res), total, seed)
        for batch, _ in create_loader(images, res, **common):
            yield batch
