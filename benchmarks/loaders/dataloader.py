"""torch's DataLoader with torchvision's transforms. A variant is the decoder's name, and words after it:

pillow       Pillow's images, and torchvision's transforms of these
torchvision  torchvision's decoder and v2 transforms of tensors
simplejpeg   simplejpeg's decoder, and the same transforms
-uint8       workers deliver uint8, which `normalised_on_device` turns into the batches that train
-sized       one DataLoader, whose sampler yields the resolution with each sample; else each resolution has a new one

All get every advantage that costs nothing: JPEGs read directly from the tar, files kept open, one endless shuffled
epoch, four prefetched batches per worker, pinned memory on a GPU.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import numpy as np
import simplejpeg
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Sampler
from torchvision import io as image_io
from torchvision import transforms
from torchvision.transforms import v2

from resolute.pipeline.dataset.shard_set import ShardSet

from .job import MEAN, STD, Job
from .on_device import normalised_on_device
from .ours import open_shards
from .tars import Jpegs, endless

__all__ = ["centre_crops", "pillow", "pillow_transform", "stored_images", "stream", "tensor", "tensor_transform"]

_PREFETCH = 4  # batches per worker; torch's default is 2


class _Images(Dataset[tuple[Any, int]]):
    """Map-style data set of (transform(jpeg), label) of the stored images, by (resolution, sample)."""

    def __init__(self, stored: dict[int, tuple[Jpegs, Callable[[bytes], Any]]]) -> None:
        """`stored`: {resolution: (images, transform)}."""
        self._stored = stored

    def __len__(self) -> int:
        return sum(len(jpegs) for jpegs, _ in self._stored.values())

    def __getitem__(self, item: tuple[int, int]) -> tuple[Any, int]:
        res, sample = item
        jpegs, transform = self._stored[res]
        return transform(jpegs.jpeg(sample)), jpegs.labels[sample]


class _Shuffled(Sampler[list[tuple[int, int]]]):
    """`batches` batches of (resolution, sample) at each of `resolutions`, the samples in their endless order."""

    def __init__(self, resolutions: Sequence[int], samples: int, *, batches: int, batch_size: int, seed: int) -> None:
        self._resolutions, self._samples, self._batches = resolutions, samples, batches
        self._batch_size, self._seed = batch_size, seed

    def __len__(self) -> int:
        return len(self._resolutions) * self._batches

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        order = endless(self._samples, self._seed)
        for res in self._resolutions:
            for _ in range(self._batches):
                yield [(res, sample) for sample in itertools.islice(order, self._batch_size)]


def stored_images(shards: ShardSet, res: int) -> Jpegs:
    """The training split as stored at `res` px, located by this project's index.

    why: reading a large set's labels from its tars takes seconds, which would count as cost of a change.
    """
    split = shards.splits["train"]
    stored = np.array(split.stored[res])
    ranges = np.stack([stored[name].astype(np.int64) for name in ("shard", "offset", "nbytes")], axis=1)
    labels = split.samples["label"] if "label" in (split.samples.dtype.names or ()) else np.zeros(len(split), np.int64)
    return Jpegs([shards.path(res, shard) for shard in split.shards], ranges, labels.tolist())


def pillow(jpeg: bytes) -> Image.Image:
    return Image.open(io.BytesIO(jpeg)).convert("RGB")


def tensor(jpeg: bytes) -> torch.Tensor:
    """(3, height, width) uint8. Torchvision 0.29 warns that TorchCodec is to replace this, and still ships it."""
    return image_io.decode_image(torch.frombuffer(bytearray(jpeg), dtype=torch.uint8), image_io.ImageReadMode.RGB)


def _simplejpeg(jpeg: bytes) -> torch.Tensor:
    """(3, height, width) uint8, in channels_last order."""
    return torch.from_numpy(simplejpeg.decode_jpeg(jpeg, "RGB")).permute(2, 0, 1)


_DECODERS: dict[str, Callable[[bytes], Any]] = {"pillow": pillow, "torchvision": tensor, "simplejpeg": _simplejpeg}


def pillow_transform(job: Job, res: int) -> Callable[[Image.Image], torch.Tensor]:
    return transforms.Compose(
        [
            transforms.RandomResizedCrop(
                res,
                scale=job.scale,
                ratio=job.ratio,
                interpolation=transforms.InterpolationMode.BILINEAR,
                antialias=True,
            ),
            transforms.RandomHorizontalFlip(job.flip_prob),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )


def tensor_transform(job: Job, res: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Source: the order that torchvision's own guide to v2 recommends: uint8 until the end."""
    steps: list[Any] = [
        v2.RandomResizedCrop(res, scale=job.scale, ratio=job.ratio, antialias=True),
        v2.RandomHorizontalFlip(job.flip_prob),
    ]
    if "uint8" not in job.variant:
        steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    return v2.Compose(steps)


def stream(job: Job) -> Generator[torch.Tensor, None, None]:
    shards, device, (decoder, *words) = open_shards(job), torch.device(job.device), job.variant.split("-")
    transform: Callable[[Job, int], Any] = pillow_transform if decoder == "pillow" else tensor_transform
    parts = [job.resolutions] if "sized" in words else [(res,) for res in job.resolutions]
    for seed, resolutions in enumerate(parts):
        order = _Shuffled(
            resolutions, len(shards.splits["train"]), batches=job.batches, batch_size=job.batch_size, seed=seed
        )
        loader = DataLoader(
            _Images(
                {
                    res: (stored_images(shards, res), transforms.Compose([_DECODERS[decoder], transform(job, res)]))
                    for res in resolutions
                }
            ),
            num_workers=job.workers,
            persistent_workers=True,
            batch_sampler=order,
            prefetch_factor=_PREFETCH,
            pin_memory=device.type != "cpu",
        )
        if "uint8" in words:
            dtype = getattr(torch, job.dtype)
            yield from (images for images, _ in normalised_on_device(loader, device=device, dtype=dtype))
        else:
            yield from (images.to(device, non_blocking=True) for images, _ in loader)
        del loader  # why: its workers end before the next ones start


def centre_crops(job: Job, jpegs: list[bytes]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """(N, res, res, 3) in 0..255 and (N, 4) crops x, y, w, h, with v2's functions."""
    (res,), decode = job.resolutions, _DECODERS[job.variant.partition("-")[0]]
    images, crops = [], []
    for jpeg in jpegs:
        pixels = decode(jpeg)
        height, width = v2.functional.get_size(pixels)
        x, y, side, _ = crop = job.centre_square(width, height)
        resized = v2.functional.resized_crop(pixels, y, x, side, side, [res, res], antialias=True)
        is_tensor = isinstance(resized, torch.Tensor)
        images.append(resized.permute(1, 2, 0).numpy() if is_tensor else np.asarray(resized))
        crops.append(crop)
    return np.stack(images).astype(np.float32), np.array(crops, np.int64)
