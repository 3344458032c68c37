"""Peers: torch's DataLoader with Pillow, and with torchvision's v2 tensor transforms.

Both use every free advantage: JPEGs read directly from the tar, files kept open, one endless shuffled epoch, four
prefetched batches per worker, pinned memory on a GPU. Each resolution has a new DataLoader.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Sampler
from torchvision import io as image_io
from torchvision import transforms
from torchvision.transforms import v2

from .job import MEAN, STD, Job
from .tars import Jpegs, Tars, endless

if TYPE_CHECKING:
    from pipeline.plan.stage import Augment

__all__ = ["centre_crops", "deliver", "pillow", "pillow_transform", "stream"]

_PREFETCH = 4  # batches per worker; torch's default is 2


class _Images(Dataset[tuple[Any, int]]):
    """Map-style data set of (transform(jpeg), label) of the stored images."""

    def __init__(self, jpegs: Jpegs, transform: Callable[[bytes], Any]) -> None:
        self._jpegs, self._transform = jpegs, transform

    def __len__(self) -> int:
        return len(self._jpegs)

    def __getitem__(self, sample: int) -> tuple[Any, int]:
        return self._transform(self._jpegs.jpeg(sample)), self._jpegs.labels[sample]


class _Shuffled(Sampler[list[int]]):
    """`batches` batches of sample numbers in their endless order."""

    def __init__(self, samples: int, *, batches: int, batch_size: int, seed: int) -> None:
        self._samples, self._batches, self._batch_size, self._seed = samples, batches, batch_size, seed

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[list[int]]:
        order = endless(self._samples, self._seed)
        for _ in range(self._batches):
            yield list(itertools.islice(order, self._batch_size))


def pillow(jpeg: bytes) -> Image.Image:
    return Image.open(io.BytesIO(jpeg)).convert("RGB")


def tensor(jpeg: bytes) -> torch.Tensor:
    """(3, height, width) uint8. Torchvision 0.29 warns that TorchCodec is to replace this, and still ships it."""
    return image_io.decode_image(torch.frombuffer(bytearray(jpeg), dtype=torch.uint8), image_io.ImageReadMode.RGB)


def pillow_transform(how: Job | Augment, res: int) -> Callable[[Image.Image], torch.Tensor]:
    return transforms.Compose([
        transforms.RandomResizedCrop(
            res, scale=how.crop_area, ratio=how.crop_ratio,
            interpolation=transforms.InterpolationMode.BILINEAR, antialias=True,
        ),
        transforms.RandomHorizontalFlip(how.flip_prob),
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


def deliver(
    jpegs: Jpegs, transform: list[Callable[[Any], Any]], *, batches: int, batch_size: int, workers: int, seed: int,
    device: torch.device,
) -> Generator[torch.Tensor, None, None]:  # fmt: skip
    """Yield `batches` batches on `device`; `transform`: functions applied to a JPEG one after another.

    Workers start with the first `next` and end with the generator (`contextlib.closing`).
    """
    on_gpu = device.type == "cuda"
    loader = DataLoader(
        _Images(jpegs, transforms.Compose(transform)), num_workers=workers, persistent_workers=True,
        batch_sampler=_Shuffled(len(jpegs), batches=batches, batch_size=batch_size, seed=seed),
        prefetch_factor=_PREFETCH, pin_memory=on_gpu,
    )  # fmt: skip
    for pixels, _ in loader:
        yield pixels.to(device, non_blocking=True) if on_gpu else pixels


def stream(job: Job) -> Generator[torch.Tensor, None, None]:
    for seed, res in enumerate(job.resolutions):
        yield from deliver(
            Tars(job.shards, res),
            [tensor, _tensor_transform(job, res)] if job.variant == "v2" else [pillow, pillow_transform(job, res)],
            batches=job.batches, batch_size=job.batch_size, workers=job.workers, seed=seed, device=torch.device("cpu"),
        )  # fmt: skip


def centre_crops(job: Job, jpegs: list[bytes]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """(N, res, res, 3) in 0..255 and (N, 4) windows x, y, w, h, with v2's functions."""
    (res,) = job.resolutions
    images, windows = [], []
    for jpeg in jpegs:
        pixels = tensor(jpeg) if job.variant == "v2" else pillow(jpeg)
        height, width = v2.functional.get_size(pixels)
        x, y, side, _ = window = job.window(width, height)
        done = v2.functional.resized_crop(pixels, y, x, side, side, [res, res], antialias=True)
        images.append(done.permute(1, 2, 0).numpy() if job.variant == "v2" else np.asarray(done))
        windows.append(window)
    return np.stack(images).astype(np.float32), np.array(windows, np.int64)
