"""Reads a finished set for the reports: index arrays, single JPEGs, lists, sizes and times."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resolute.pipeline.dataset.format import SOURCE, STORED, index_name, source_name
from resolute.pipeline.dataset.target import Target, widened
from resolute.prep.listing.database import Database
from resolute.prep.run.stats import RunStats
from resolute.prep.shard_set.set_photos import SetPhotos, photos_name
from resolute.prep.storage.output import Store
from resolute.scratch import ScratchFolder

__all__ = ["ShardSetReader", "tar_sizes", "work_seconds"]

_ROWS = 1 << 20  # records in memory at a time


def tar_sizes(manifest: Mapping[str, Any], res: str) -> list[int]:
    """Bytes of each tar of a resolution."""
    files = manifest["files"].items()
    return [file["bytes"] for name, file in files if name.startswith(f"{res}/") and name.endswith(".tar")]


def work_seconds(stats: RunStats) -> dict[str, float]:
    """Seconds by kind of work, over all workers."""
    return {
        "read": stats.read_s,
        "decode": stats.decode_s,
        "resize + encode": stats.convert_s,
        "write": stats.write_s,
    }


class ShardSetReader:
    """Reads a finished set at `store`, all its generations. A context manager.

    Arrays are memory-mapped (with several generations: in memory), lists are read line by line.
    """

    def __init__(self, store: Store, manifest: Mapping[str, Any]) -> None:
        self._store, self._manifest = store, manifest
        self.target = Target.from_manifest(manifest)
        self._scratch = ScratchFolder()
        self._arrays: dict[str, NDArray[Any]] = {}

    def __enter__(self) -> ShardSetReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._arrays.clear()
        self._scratch.close()

    def samples(self, split: str) -> NDArray[Any]:
        """(n,) `Target.sample_dtype`"""
        return self._array(split, partial(index_name, split), self.target.sample_dtype)

    def sources(self, split: str) -> NDArray[Any]:
        """(n,) SOURCE"""
        return self._array(split, partial(source_name, split), SOURCE)

    def stored(self, split: str, res: str) -> NDArray[Any]:
        """(n,) STORED"""
        return self._array(split, partial(index_name, split, res=res), STORED)

    def jpeg(self, split: str, res: str, row: int) -> bytes:
        """The JPEG of the sample in `row` at `res`."""
        record = self.stored(split, res)[row]
        shard = self._manifest["splits"][split]["shards"][int(record["shard"])]
        with self._store.open(f"{res}/{shard}.tar") as file:
            file.seek(int(record["offset"]))
            return file.read(int(record["nbytes"]))

    def row(self, split: str, key: int) -> int | None:
        """The row of the sample with that key; None if its image was rejected."""
        keys = self.samples(split)["key"]
        row = int(np.searchsorted(keys, key))
        return row if row < len(keys) and keys[row] == key else None

    def largest(self, count: int) -> list[tuple[int, str, int]]:
        """(bytes, split, row) of the largest input files, descending."""
        largest: list[tuple[int, str, int]] = []
        for split in self._manifest["splits"]:
            sizes = self.sources(split)["nbytes"]
            for first in range(0, len(sizes), _ROWS):
                piece = np.asarray(sizes[first : first + _ROWS])
                rows = np.argsort(piece, kind="stable")[-count:].tolist()
                largest += [(int(piece[row]), split, first + row) for row in rows]
                largest = sorted(largest, key=lambda entry: (-entry[0], entry[1:]))[:count]
        return largest

    def names(self, rows: Iterable[tuple[str, int]]) -> dict[tuple[str, int], str]:
        """{(split, row): name of the input image} for the given rows."""
        rows = list(rows)
        keys = [(split, int(self.samples(split)["key"][row])) for split, row in rows]
        names = range(len(self._manifest["generations"]))
        files = [self._store.local(photos_name(number), self._scratch.path) for number in names]
        with closing(Database(self._scratch.path)) as database:
            return dict(zip(rows, SetPhotos.open(database, files).names(keys), strict=True))

    def lines(self, name: str) -> Iterator[Any]:
        """Yield the value in each line of a JSON-lines file."""
        with self._store.open(name) as file:
            for line in file:
                yield json.loads(line)

    @property
    def newest(self) -> int:
        """The number of the newest generation."""
        return len(self._manifest["generations"]) - 1

    def _generations(self, split: str) -> list[int]:
        """The generations with samples in a split."""
        return [n for n, added in enumerate(self._manifest["generations"]) if added["samples"][split]]

    def _array(self, split: str, name_of: Callable[[int], str], dtype: np.dtype[Any]) -> NDArray[Any]:
        """The rows of all generations, whose files are `name_of(generation)`."""
        first = name_of(0)
        if first not in self._arrays:
            files = [self._store.local(name_of(number), self._scratch.path) for number in self._generations(split)]
            parts = [widened(np.load(file, mmap_mode="r"), dtype) for file in files]
            self._arrays[first] = parts[0] if len(parts) == 1 else np.concatenate(parts)
            assert self._arrays[first].dtype == dtype, (first, dtype)
        return self._arrays[first]
