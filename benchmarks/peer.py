"""What does one use without us? torch's DataLoader and Pillow, on the very same stored images.

It gets every advantage that costs nothing: JPEGs read straight from the tar at their offset with files left
open, no epoch ends (its batches come from one endless shuffled sequence), four batches ahead a worker, and pinned
memory on a GPU.
"""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Generator, Iterator

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Sampler
from torchvision import transforms

from pipeline.recipe import Augment
from pipeline.shards import ShardSet

__all__ = ["MEAN", "STD", "StoredImages", "peer_batches"]

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # Source: timm IMAGENET_DEFAULT_MEAN and _STD
_PREFETCH = 4  # batches a worker; torch's default is 2


class StoredImages(Dataset[tuple[torch.Tensor, int]]):
    """The training split as stored for `res` px, randomly cropped and flipped as our stages do by default."""

    def __init__(self, shards: ShardSet, res: int) -> None:
        split = shards.splits["train"]
        self._stored = np.array(split.stored[res])  # why: a copy in memory is faster than the mapped file
        self._labels = split.samples["label"].astype(int).tolist()
        self._paths = [shards.path(res, shard) for shard in split.shards]
        self._files: dict[int, int] = {}  # shard number -> file descriptor, opened by the worker that needs it
        self._augment = _augmentation(res)

    def __len__(self) -> int:
        return len(self._stored)

    def image(self, sample: int) -> Image.Image:
        """The stored image of a sample, decoded, RGB."""
        record = self._stored[sample]
        shard = int(record["shard"])
        if shard not in self._files:
            self._files[shard] = os.open(self._paths[shard], os.O_RDONLY)
        data = os.pread(self._files[shard], int(record["nbytes"]), int(record["offset"]))
        return Image.open(io.BytesIO(data)).convert("RGB")

    def __getitem__(self, sample: int) -> tuple[torch.Tensor, int]:
        """(3, res, res) float32, normalised; and the label."""
        return self._augment(self.image(sample)), self._labels[sample]

    def __del__(self) -> None:
        for file in getattr(self, "_files", {}).values():
            os.close(file)


def _augmentation(res: int) -> transforms.Compose:
    augment = Augment()
    return transforms.Compose([
        transforms.RandomResizedCrop(
            res, scale=augment.crop_area, ratio=augment.crop_ratio,
            interpolation=transforms.InterpolationMode.BILINEAR, antialias=True,
        ),
        transforms.RandomHorizontalFlip(augment.flip_prob),
        transforms.ToTensor(),
        transforms.Normalize(MEAN, STD),
    ])  # fmt: skip


class _Shuffled(Sampler[list[int]]):
    """`batches` batches of sample numbers, from one random permutation after another."""

    def __init__(self, samples: int, *, batches: int, batch_size: int, seed: int) -> None:
        self._samples, self._batches, self._batch_size, self._seed = samples, batches, batch_size, seed

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[list[int]]:
        order = self._endless()
        for _ in range(self._batches):
            yield list(itertools.islice(order, self._batch_size))

    def _endless(self) -> Iterator[int]:
        rng = np.random.default_rng(self._seed)
        while True:
            yield from rng.permutation(self._samples).tolist()


def peer_batches(
    shards: ShardSet, resolutions: list[int], *, batches: int, batch_size: int, device: torch.device, workers: int
) -> Generator[torch.Tensor, None, None]:
    """Images (N, 3, res, res) float32, normalised, on `device`: `batches` at each resolution.

    A new data set and DataLoader for each resolution, made when the one before has ended. Its workers start with
    the first `next` and end with the generator (`contextlib.closing`).
    """
    on_gpu = device.type == "cuda"
    for seed, res in enumerate(resolutions):
        images = StoredImages(shards, res)
        order = _Shuffled(len(images), batches=batches, batch_size=batch_size, seed=seed)
        loader = DataLoader(
            images, batch_sampler=order, num_workers=workers, persistent_workers=True, prefetch_factor=_PREFETCH,
            pin_memory=on_gpu,
        )  # fmt: skip
        for pixels, _ in loader:
            yield pixels.to(device, non_blocking=True) if on_gpu else pixels
