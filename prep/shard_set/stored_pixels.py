"""Thumbnails of the photos of a set, from the JPEGs that its tars hold."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from resolute.machine import available_cpus
from resolute.prep.near_copies.verification import CELLS, thumbnail
from resolute.prep.storage.output import LocalStore, Store
from resolute.prep.storage.retry import retry
from resolute.prep.storage.thread_map import thread_map

__all__ = ["Thumbnails"]

_KEPT = 8192  # thumbnails in memory, 150 MB
_AT_ONCE = 256  # JPEGs of a tar that a thread reads
_REQUESTS = 32  # threads that read from a store that is not a local folder


class Thumbnails:
    """The thumbnails of photos by their row, each read and decoded once unless too many others come between."""

    def __init__(
        self,
        store: Store,
        tars: list[str],
        tar_of: NDArray[np.uint32],
        offsets: NDArray[np.uint64],
        sizes: NDArray[np.uint32],
    ) -> None:
        """The JPEG of row i lies in `tars[tar_of[i]]` at `offsets[i]` and has `sizes[i]` bytes."""
        self._store, self._tars, self._tar_of, self._offsets, self._sizes = store, tars, tar_of, offsets, sizes
        self._kept: dict[int, NDArray[np.int16]] = {}
        self._threads = available_cpus() if isinstance(store, LocalStore) else _REQUESTS

    def load(self, rows: Iterable[int]) -> None:
        """Have the thumbnails of these rows in memory, at most `_KEPT` / 2 of them."""
        wanted = sorted({int(row) for row in rows})
        for row in wanted:
            if row in self._kept:
                self._kept[row] = self._kept.pop(row)  # the newest are last
        missing = [row for row in wanted if row not in self._kept]
        chunks = []
        for _, own in groupby(missing, lambda row: int(self._tar_of[row])):
            of_tar = list(own)
            chunks += [of_tar[first : first + _AT_ONCE] for first in range(0, len(of_tar), _AT_ONCE)]
        for chunk, thumbnails in zip(chunks, thread_map(self._read, chunks, self._threads), strict=True):
            self._kept |= zip(chunk, thumbnails, strict=True)
        for row in list(self._kept)[: max(0, len(self._kept) - _KEPT)]:
            del self._kept[row]

    def __getitem__(self, row: int) -> NDArray[np.int16]:
        """(CELLS, CELLS) int16, as `thumbnail`, of a row that is loaded."""
        found = self._kept[row]
        assert found.shape == (CELLS, CELLS)
        return found

    def _read(self, rows: list[int]) -> list[NDArray[np.int16]]:
        """The thumbnails of rows of one tar, in the order of their offsets."""
        tar = self._tars[int(self._tar_of[rows[0]])]

        def read() -> list[bytes]:
            jpegs = []
            with self._store.open(tar) as file:
                for row in rows:
                    file.seek(int(self._offsets[row]))
                    jpegs.append(file.read(int(self._sizes[row])))
            return jpegs

        return [thumbnail(jpeg) for jpeg in retry(f"{self._store.where}/{tar}", read)]
