"""From uint8 batches in pinned memory to normalised ones on the device, as fast as PyTorch can: for several loaders.

Imports only torch, because FFCV's interpreter, without Resolute's dependencies, reads it too.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable

import torch

from .job import MEAN, STD

__all__ = ["normalised_on_device"]


Batch = tuple[torch.Tensor, torch.Tensor]  # images, labels


def normalised_on_device(
    batches: Iterable[Batch], *, device: torch.device, dtype: torch.dtype
) -> Generator[Batch, None, None]:
    """Images (N, 3, height, width) uint8 -> `dtype` with ImageNet's mean and deviation, in channels_last memory.

    On a GPU, each batch is copied and normalised on a stream of its own while the one before it is trained on.
    Source: the prefetcher of timm's loader does this.
    """
    mean, std = (
        torch.tensor([255 * value for value in values], device=device).view(1, 3, 1, 1) for values in (MEAN, STD)
    )

    def prepared(batch: Batch) -> Batch:
        images, labels = (each.to(device, non_blocking=True) for each in batch)
        return images.to(dtype=dtype, memory_format=torch.channels_last).sub_(mean).div_(std), labels

    if device.type == "cpu":
        yield from map(prepared, batches)
        return
    copying, previous = torch.cuda.Stream(device), None
    for batch in batches:
        with torch.cuda.stream(copying):
            following = prepared(batch)
        if previous is not None:
            yield previous
        training = torch.cuda.current_stream(device)
        training.wait_stream(copying)
        for each in following:
            each.record_stream(training)
        previous = following
    if previous is not None:
        yield previous
