"""Reads a finished set for the reports: index arrays, single JPEGs, lists, sizes and times."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.shard_set import SAMPLE, SOURCE, STORED
from pipeline.storage.scratch import ScratchFolder
from prep.execute.stats import RunStats
from prep.storage.output import Store

__all__ = ["ShardSetReader", "tar_sizes", "work_seconds"]


def tar_sizes(manifest: Mapping[str, Any], res: str) -> list[int]:
    """Bytes of each tar of a resolution."""
    files = manifest["files"].items()
    return [file["bytes"] for name, file in files if name.startswith(f"{res}/") and name.endswith(".tar")]


def work_seconds(stats: RunStats) -> dict[str, float]:
    """Seconds by kind of work, over all workers."""
    return {
        "read": stats.read_s, "decode": stats.decode_s, "resize + encode": stats.convert_s, "write": stats.write_s,
    }  # fmt: skip


class ShardSetReader:
    """Reads a finished set at `store`. Arrays are memory-mapped, lists are read line by line. A context manager."""

    def __init__(self, store: Store, manifest: Mapping[str, Any]) -> None:
        self._store, self._manifest = store, manifest
        self._scratch = ScratchFolder()
        self._arrays: dict[str, NDArray[Any]] = {}

    def __enter__(self) -> ShardSetReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._arrays.clear()
        self._scratch.close()

    def samples(self, split: str) -> NDArray[Any]:
        """(n,) SAMPLE"""
        return self._array(f"index/{split}.npy", SAMPLE)

    def sources(self, split: str) -> NDArray[Any]:
        """(n,) SOURCE"""
        return self._array(f"index/{split}.source.npy", SOURCE)

    def stored(self, split: str, res: str) -> NDArray[Any]:
        """(n,) STORED"""
        return self._array(f"index/{split}-{res}.npy", STORED)

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
            rows = np.argsort(sizes, kind="stable")[-count:]
            largest += [(int(sizes[row]), split, int(row)) for row in rows]
        return sorted(largest, key=lambda entry: (-entry[0], entry[1:]))[:count]

    def names(self, rows: Collection[tuple[str, int]]) -> dict[tuple[str, int], str]:
        """{(split, row): name of the input image} for the given rows."""
        names = {}
        for split in self._manifest["splits"]:
            last = max([row for name, row in rows if name == split], default=-1)
            lines = self.lines(f"index/{split}.sources.jsonl")
            for row, name in zip(range(last + 1), lines, strict=False):
                if (split, row) in rows:
                    names[split, row] = name
        return names

    def lines(self, name: str) -> Iterator[Any]:
        """Yield the value in each line of a JSON-lines file."""
        with self._store.open(name) as file:
            for line in file:
                yield json.loads(line)

    def _array(self, name: str, dtype: np.dtype[Any]) -> NDArray[Any]:
        if name not in self._arrays:
            rows = np.load(self._store.local(name, self._scratch.path), mmap_mode="r")
            assert rows.dtype == dtype, (name, rows.dtype)
            self._arrays[name] = rows
        return self._arrays[name]
