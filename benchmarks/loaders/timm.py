"""Peer: timm's loader (`timm.data.create_loader`), also with its scheduled sizes.

It reads the stored images as a map-style data set, which scheduled sizes require. Colour jitter, on by default in timm,
is off. timm's prefetcher normalises the pixels in the main process.
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

from .dataloader import pillow
from .job import Job
from .tars import Tars, endless

__all__ = ["stream"]


class _Pictures(Dataset[tuple[Any, int]]):
    """The stored images in one long shuffled epoch, with `transform` set by timm."""

    def __init__(self, tars: Tars, total: int, seed: int) -> None:
        self._tars = tars
        self._order = np.fromiter(itertools.islice(endless(len(tars), seed), total), np.int64, total)
        self.transform: Callable[[Image.Image], Any] | None = None

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, place: int) -> tuple[Any, int]:
        sample = int(self._order[place])
        image = pillow(self._tars.jpeg(sample))
        return self.transform(image) if self.transform else image, self._tars.labels[sample]


def stream(job: Job) -> Generator[torch.Tensor, None, None]:
    """variant "scheduled": one loader over all resolutions, all read from the largest; else a loader for each."""
    common: dict[str, Any] = {
        "batch_size": job.batch_size, "is_training": True, "scale": job.crop_area, "ratio": job.crop_ratio,
        "hflip": job.flip_prob, "color_jitter": 0.0, "interpolation": "bilinear", "num_workers": job.workers,
        "device": torch.device("cpu"), "persistent_workers": True,
    }  # fmt: skip
    total = job.batches * job.batch_size
    if job.variant == "scheduled":
        largest = max(job.resolutions)
        pictures: Any = _Pictures(Tars(job.shards, largest), total, 0)
        loader: Any = create_loader(
            pictures, largest, input_size_choices=job.resolutions,
            batch_choice_schedule="progressive", batch_schedule_epochs=len(job.resolutions),
            batch_schedule_spread=0.0, batch_schedule_random_mix=0.0, num_batches=job.batches, **common,
        )  # fmt: skip
        for epoch in range(len(job.resolutions)):
            loader.batch_sampler.set_epoch(epoch)
            for pixels, _ in loader:
                yield pixels
        return
    for seed, res in enumerate(job.resolutions):
        pictures = _Pictures(Tars(job.shards, res), total, seed)
        for pixels, _ in create_loader(pictures, res, **common):
            yield pixels
