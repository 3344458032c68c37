"""What does torch's DataLoader deliver, with Pillow and with torchvision's own tensor transforms?

Both get what costs nothing: JPEGs read straight from the tar, files left open, one endless shuffled epoch, four
batches ahead a worker. A new DataLoader for each resolution.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import io as image_io
from torchvision import transforms
from torchvision.transforms import v2

from .job import MEAN, STD, Job
from .tars import Tars, endless

__all__ = ["Images", "centre_crops", "pillow", "pillow_transform", "stream"]

_PREFETCH = 4  # batches a worker; torch's default is 2


class Images(Dataset[tuple[Any, int]]):
    """(transform(jpeg), label) of each stored image."""

    def __init__(self, tars: Tars, transform: Callable[[bytes], Any]) -> None:
        self._tars, self._transform = tars, transform

    def __len__(self) -> int:
        return len(self._tars)

    def __getitem__(self, sample: int) -> tuple[Any, int]:
        return self._transform(self._tars.jpeg(sample)), self._tars.labels[sample]


def pillow(jpeg: bytes) -> Image.Image:
    return Image.open(io.BytesIO(jpeg)).convert("RGB")


def tensor(jpeg: bytes) -> torch.Tensor:
    """(3, height, width) uint8. Torchvision 0.29 warns that TorchCodec is to replace this, and still ships it."""
    return image_io.decode_image(torch.frombuffer(bytearray(jpeg), dtype=torch.uint8), image_io.ImageReadMode.RGB)


def pillow_transform(job: Job, res: int) -> Callable[[Image.Image], torch.Tensor]:
    return transforms.Compose([
        transforms.RandomResizedCrop(
            res, scale=job.crop_area, ratio=job.crop_ratio,
            interpolation=transforms.InterpolationMode.BILINEAR, antialias=True,
        ),
        transforms.RandomHorizontalFlip(job.flip_prob),
        transforms.ToTensor(),
        transforms.Normalize(MEAN, STD),
    ])  # fmt: skip


def _tensor_transform(job: Job, res: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Source: the order that torchvision's own guide to v2 recommends: uint8 until the end."""
    return v2.Compose([
        v2.RandomResizedCrop(res, scale=job.crop_area, ratio=job.crop_ratio, antialias=True),
        v2.RandomHorizontalFlip(job.flip_prob),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(MEAN, STD),
    ])  # fmt: skip


class _Both:
    """One function after another; a class, so that workers that are not forked can have it."""

    def __init__(self, first: Callable[[bytes], Any], then: Callable[[Any], torch.Tensor]) -> None:
        self._first, self._then = first, then

    def __call__(self, jpeg: bytes) -> torch.Tensor:
        return self._then(self._first(jpeg))


def stream(job: Job) -> Generator[torch.Tensor, None, None]:
    for seed, res in enumerate(job.resolutions):
        tars = Tars(job.shards, res)
        transform = (
            _Both(tensor, _tensor_transform(job, res))
            if job.variant == "v2"
            else _Both(pillow, pillow_transform(job, res))
        )
        loader = DataLoader(
            Images(tars, transform), batch_size=job.batch_size, num_workers=job.workers, prefetch_factor=_PREFETCH,
            sampler=endless(len(tars), job.batches * job.batch_size, seed).tolist(),
        )  # fmt: skip
        for pixels, _ in loader:
            yield pixels


def centre_crops(job: Job, jpegs: list[bytes]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """(N, res, res, 3) in 0..255 and (N, 4) windows x, y, w, h, with v2's functions."""
    (res,) = job.resolutions
    images, windows = [], []
    for jpeg in jpegs:
        pixels = tensor(jpeg) if job.variant == "v2" else pillow(jpeg)
        height, width = v2.functional.get_size(pixels)
        side = int(job.crop_frac * min(height, width))
        x, y = (width - side) // 2, (height - side) // 2
        done = v2.functional.resized_crop(pixels, y, x, side, side, [res, res], antialias=True)
        images.append(done.permute(1, 2, 0).numpy() if job.variant == "v2" else np.asarray(done))
        windows.append((x, y, side, side))
    return np.stack(images).astype(np.float32), np.array(windows, np.int64)
