"""Stored images by position in their tars, found from the DALI index files alone, as stock readers do.

Imports only numpy and the standard library: FFCV's interpreter does not have this project's index and reader.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

__all__ = ["Jpegs", "Tars", "endless"]


class Jpegs:
    """Access to JPEGs at known positions in tars, and their `labels`; files stay open once used."""

    def __init__(self, paths: Sequence[Path], ranges: NDArray[np.int64], labels: Sequence[int] = ()) -> None:
        """`ranges` (N, 3 or more): which of `paths`, offset and size in bytes of a JPEG."""
        self.paths, self._ranges, self.labels = paths, ranges, labels
        self._files: dict[int, int] = {}  # shard number -> file descriptor, opened by the process that needs it

    def __len__(self) -> int:
        return len(self._ranges)

    @property
    def mean_bytes(self) -> float:
        """Mean size of a JPEG in bytes."""
        return float(self._ranges[:, 2].mean())

    def jpeg(self, sample: int) -> bytes:
        shard, offset, size = (int(value) for value in self._ranges[sample, :3])
        return self._read(shard, offset, size)

    def _read(self, shard: int, offset: int, size: int) -> bytes:
        if shard not in self._files:
            self._files[shard] = os.open(self.paths[shard], os.O_RDONLY)
        return os.pread(self._files[shard], size, offset)

    def _close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def __del__(self) -> None:
        if hasattr(self, "_files"):
            self._close()


class Tars(Jpegs):
    """A split at one resolution, in the order of the tars."""

    def __init__(self, root: str | Path, res: int, split: str = "train") -> None:
        self.indexes = sorted(Path(root, str(res)).glob(f"{split}-*.idx"))
        rows = [
            (shard, *_ranges(line))
            for shard, index in enumerate(self.indexes)
            for line in index.read_text(encoding="utf-8").splitlines()[1:]
        ]
        ranges = np.array(rows, np.int64).reshape(-1, 5)
        super().__init__([index.with_suffix(".tar") for index in self.indexes], ranges)
        self.labels = [int(self._read(shard, *label)) for shard, _, _, *label in ranges.tolist()]
        self._close()  # why: a worker that is forked must not share file descriptors, nor pickle them


def _ranges(line: str) -> tuple[int, int, int, int]:
    """Offset and bytes of the JPEG and of the label. Source: DALI's wds2idx: `ext offset size name` a component."""
    words = line.split()
    results = {words[i]: (int(words[i + 1]), int(words[i + 2])) for i in range(0, len(words), 4)}
    return *results["jpg"], *results["cls"]


def endless(samples: int, seed: int) -> Iterator[int]:
    """Sample numbers: one random permutation of all `samples` after another.

    why: no peer has to pay for the end of an epoch; a real one is far longer than a window here.
    """
    rng = np.random.default_rng(seed)
    while True:
        yield from rng.permutation(samples).tolist()
