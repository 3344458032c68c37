"""What the summary and the report show of a finished set: an open `ShardSet`, and its input files, lists and JPEGs."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resolute.pipeline.dataset.format import SOURCE, names_name, source_name, tar_name
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.storage.local import Folder
from resolute.prep.run.stats import RunStats
from resolute.prep.storage.output import LocalStore, Store
from resolute.scratch import ScratchFolder

__all__ = [
    "input_files",
    "input_names",
    "largest_files",
    "open_set",
    "read_jpeg",
    "read_lines",
    "row_of",
    "tar_sizes",
    "work_seconds",
]

_ROWS = 1 << 20  # records in memory at a time


@contextmanager
def open_set(store: Store) -> Iterator[ShardSet]:
    """The finished set in `store`, with all its generations. Raises as `ShardSet.open`."""
    with ScratchFolder() as scratch:
        files = Folder(store.where) if isinstance(store, LocalStore) else _Copies(store, scratch)
        with ShardSet.open(store.where, files=files) as shards:
            yield shards


class _Copies(Folder):
    """The files of a store that is no local folder, for one thread: copied to `scratch`, except the tars."""

    # why not `Remote`: it would download a whole tar for each JPEG, and need the user's cache folder
    remote = True

    def __init__(self, store: Store, scratch: Path) -> None:
        super().__init__(store.where)
        self._store, self._scratch = store, scratch
        self._copies: dict[str, Path] = {}

    def file_version(self, name: str) -> tuple[int, str] | None:
        size = self._store.size(name)
        return None if size is None else (size, "")

    def local(self, name: str) -> Path:
        if name not in self._copies:
            self._copies[name] = self._store.local(name, self._scratch)
        return self._copies[name]

    def read(self, name: str, offset: int, nbytes: int, *, fresh: bool = False) -> bytes:
        with self._store.open(name) as file:
            file.seek(offset)
            return file.read(nbytes)


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


def read_jpeg(shards: ShardSet, split: str, res: int, row: int) -> bytes:
    """The JPEG of the sample in `row` of `split` at `res` px."""
    record = shards.splits[split].stored[res][row]
    shard = shards.splits[split].shards[int(record["shard"])]
    return shards.files.read(tar_name(res, shard), int(record["offset"]), int(record["nbytes"]))


def read_lines(shards: ShardSet, name: str) -> Iterator[Any]:
    """Yield the value in each line of a JSON-lines file."""
    return map(json.loads, _lines(shards.files.local(name)))


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from file


def row_of(shards: ShardSet, split: str, key: int) -> int | None:
    """The row of the sample of `split` with that key; None if its image was rejected."""
    keys = shards.splits[split].samples["key"]
    row = int(np.searchsorted(keys, key))
    return row if row < len(keys) and keys[row] == key else None


def input_files(shards: ShardSet, split: str) -> NDArray[np.void]:
    """(n,) SOURCE records of the samples of `split`; memory-mapped if they are of one generation."""
    parts = [np.load(path, mmap_mode="r") for path in _of_generations(shards, split, source_name)]
    sources: NDArray[np.void] = parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, SOURCE), *parts])
    assert sources.dtype == SOURCE, (split, sources.dtype)
    return sources


def input_names(shards: ShardSet, rows: Collection[tuple[str, int]]) -> dict[tuple[str, int], str]:
    """{(split, row): name of the input file} of the given rows."""
    names = {}
    for split in {split for split, _ in rows}:
        lines = chain.from_iterable(map(_lines, _of_generations(shards, split, names_name)))
        names.update({(split, row): json.loads(line) for row, line in enumerate(lines) if (split, row) in rows})
    return names


def _of_generations(shards: ShardSet, split: str, name_of: Callable[[str, int], str]) -> Iterator[Path]:
    """The files `name_of(split, generation)` of the generations with samples in `split`."""
    for generation in range(shards.generations):
        name = name_of(split, generation)
        if shards.files.size(name) is not None:
            yield shards.files.local(name)


def largest_files(sources: Mapping[str, NDArray[np.void]], count: int) -> list[tuple[int, str, int]]:
    """(bytes, split, row) of the largest input files, descending; `sources` are the `input_files` by split."""
    largest: list[tuple[int, str, int]] = []
    for split, records in sources.items():
        sizes = records["nbytes"]
        for first in range(0, len(sizes), _ROWS):
            piece = np.asarray(sizes[first : first + _ROWS])
            rows = np.argsort(piece, kind="stable")[-count:].tolist()
            largest += [(int(piece[row]), split, first + row) for row in rows]
            largest = sorted(largest, key=lambda entry: (-entry[0], entry[1:]))[:count]
    return largest
