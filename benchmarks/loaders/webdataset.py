"""webdataset's WebDataset and WebLoader over the tars, with torchvision's decoder and v2 transforms.

Shards are drawn with replacement (`resampled`), as webdataset recommends for training, so no epoch ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator

import torch
import webdataset as wds
from torchvision import transforms

from .dataloader import tensor, tensor_transform
from .job import Job
from .tars import Tars

__all__ = ["stream"]

_SHUFFLE = 1000  # samples, still encoded


def _label(text: bytes) -> int:
    return int(text)


def stream(job: Job) -> Generator[torch.Tensor, None, None]:
    for res in job.resolutions:
        urls = [str(path) for path in Tars(job.shards, res).paths]
        data = (
            wds.WebDataset(urls, resampled=True, shardshuffle=False)
            .shuffle(_SHUFFLE)
            .to_tuple("jpg", "cls")
            .map_tuple(transforms.Compose([tensor, tensor_transform(job, res)]), _label)
            .batched(job.batch_size, partial=False)
        )
        loader = iter(wds.WebLoader(data, batch_size=None, num_workers=job.workers, prefetch_factor=4))
        for images, _ in itertools.islice(loader, job.batches):
            yield images
        del loader  # its workers end with it
