"""The baseline of `python -m benchmarks`: torch's DataLoader with Pillow (benchmarks/peers/dataloader.py)."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np
import torch

from benchmarks.peers.dataloader import deliver, pillow, pillow_transform
from benchmarks.peers.tars import Jpegs
from pipeline.dataset.shard_set import ShardSet
from pipeline.plan.stage import Augment

__all__ = ["Stored", "peer_batches"]


class Stored(Jpegs):
    """The training split as stored at `res` px, located by this project's index.

    why the index: reading a large set's labels from its tars takes seconds, which would count as cost of a change.
    """

    def __init__(self, shards: ShardSet, res: int) -> None:
        split = shards.splits["train"]
        stored = np.array(split.stored[res])
        places = np.stack([stored[name].astype(np.int64) for name in ("shard", "offset", "nbytes")], axis=1)
        super().__init__([shards.path(res, shard) for shard in split.shards], places)
        self.labels = split.samples["label"].astype(int).tolist()


def peer_batches(
    shards: ShardSet, resolutions: list[int], *, batches: int, batch_size: int, device: torch.device, workers: int
) -> Generator[torch.Tensor, None, None]:
    """Yield images (N, 3, res, res) float32, normalised, on `device`: `batches` batches at each resolution.

    Cropped and flipped like the default stage. Each resolution gets a new data set and DataLoader, created when the
    previous one has ended. Workers start with the first `next` and end with the generator (`contextlib.closing`).
    """
    for seed, res in enumerate(resolutions):
        yield from deliver(
            Stored(shards, res), [pillow, pillow_transform(Augment(), res)], batches=batches, batch_size=batch_size,
            workers=workers, seed=seed, device=device,
        )  # fmt: skip
