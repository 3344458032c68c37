"""Turns finished shards into a complete set: writes index, lists, timm's info files, and the manifest last."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.index_array import checksums, checksums_name
from pipeline.dataset.shard_set import FORMAT, SAMPLE, SOURCE, STORED, VERSION, manifest_bytes, shard_name
from prep.storage.hashed_file import AtomicFile, FileInfo
from prep.storage.output import Store

from .duplicates import find_duplicates
from .existing_set import DAMAGED, MANIFEST, MANIFEST_COPY
from .writer import ShardRecord

__all__ = ["SplitTotals", "SplitView", "count_split", "finalize_set", "write_rejects"]


@dataclass(frozen=True, kw_only=True)
class SplitView:
    """Access to a finished split: its number of shards, the record of a shard, and the input names of given keys."""

    shards: int
    record: Callable[[int], ShardRecord]
    names_of: Callable[[Sequence[int]], list[str]]


@dataclass(kw_only=True)
class SplitTotals:
    """Totals of a split; `shards` maps the name of each non-empty shard to its number of samples."""

    samples: int = 0
    shards: dict[str, int] = field(default_factory=dict)
    rejects: list[tuple[int, str]] = field(default_factory=list)  # (key, reason), ascending


def finalize_set(
    store: Store,
    plan: Mapping[str, Any],
    short_sides: Mapping[int, int],
    splits: Mapping[str, SplitView],
    counts: Mapping[str, SplitTotals],
) -> dict[str, Any]:
    """Write everything except the shards, with one shard's records in memory at a time, and return the manifest.

    `short_sides` maps resolution to stored short side, both px; `counts` are the results of `count_split`. Raises
    `ResoluteError` if the store refuses.
    """
    files: dict[str, FileInfo] = {}
    for split in splits.values():
        for number in range(split.shards):
            files |= split.record(number).files
    files["rejects.jsonl"] = write_rejects(store, splits, counts)
    for name, split in splits.items():
        total = counts[name].samples
        for file, dtype, rows_of in _arrays(name, sorted(short_sides)):
            files |= _array_files(store, file, dtype, total, _numbered(split, rows_of))
        file = f"index/{name}.sources.jsonl"
        files[file] = _stream(store, file, _source_names(split))
    duplicates = find_duplicates(
        {name: partial(_digests, split) for name, split in splits.items()},
        {name: split.names_of for name, split in splits.items()},
        sum(part.samples for part in counts.values()),
    )
    files["duplicates.jsonl"] = _stream(store, "duplicates.jsonl", duplicates.lines())
    # why: timm opens "wds/..." at the folder of a resolution, or at the set's root for the largest one
    largest = max(short_sides)
    for folder, prefix in [(f"{res}/", "") for res in short_sides] + [("", f"{largest}/")]:
        files[f"{folder}_info.json"] = store.write(f"{folder}_info.json", _timm_info(counts, prefix))
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "settings": {**plan["settings"], "resolutions": sorted(short_sides)},
        "classes": plan["classes"],
        **({"codecs": plan["codecs"]} if "codecs" in plan else {}),  # why: sets of older versions do not record them
        "resolutions": {str(res): {"short_side": side} for res, side in sorted(short_sides.items())},
        "splits": {
            name: {"samples": part.samples, "shards": list(part.shards)} for name, part in counts.items()
        },
        "files": {name: {"bytes": info.nbytes, "sha256": info.sha256} for name, info in sorted(files.items())},
        "source": {
            **plan["source"],
            "rejected": sum(len(part.rejects) for part in counts.values()),
            "duplicates": duplicates.summary(),
        },
    }
    data = manifest_bytes(manifest)
    store.write(MANIFEST_COPY, data)
    for folder in ["index", *map(str, short_sides), ""]:
        store.sync(folder)
    store.write(MANIFEST, data)
    store.sync("")
    store.remove(DAMAGED)
    loaded: dict[str, Any] = json.loads(data)
    return loaded


def count_split(name: str, split: SplitView) -> SplitTotals:
    """Totals of a split, from the records of its shards."""
    totals = SplitTotals()
    for number in range(split.shards):
        record = split.record(number)
        totals.rejects += record.rejects
        if len(record.samples):
            totals.samples += len(record.samples)
            totals.shards[shard_name(name, number)] = len(record.samples)
    return totals


def write_rejects(store: Store, splits: Mapping[str, SplitView], counts: Mapping[str, SplitTotals]) -> FileInfo:
    """Write rejects.jsonl: {path, split, key, reason} of every rejected input."""

    def rows() -> Iterator[bytes]:
        for name in sorted(splits):
            rejects = counts[name].rejects
            for path, (key, reason) in zip(splits[name].names_of([key for key, _ in rejects]), rejects, strict=True):
                row = {"path": path, "split": name, "key": key, "reason": reason}
                yield (json.dumps(row) + "\n").encode()

    return _stream(store, "rejects.jsonl", rows())


def _arrays(
    split: str, resolutions: Sequence[int]
) -> Iterator[tuple[str, np.dtype[Any], Callable[[ShardRecord], NDArray[Any]]]]:
    yield f"index/{split}.npy", SAMPLE, lambda record: record.samples
    yield f"index/{split}.source.npy", SOURCE, lambda record: record.sources
    for res in resolutions:
        yield f"index/{split}-{res}.npy", STORED, lambda record, res=res: record.stored[res]  # type: ignore[misc]


def _numbered(split: SplitView, rows_of: Callable[[ShardRecord], NDArray[Any]]) -> Iterator[NDArray[Any]]:
    """Yield the rows of each non-empty shard; `shard` of STORED rows is set to its position among those."""
    place = 0
    for number in range(split.shards):
        rows = rows_of(split.record(number))
        if len(rows):
            if rows.dtype == STORED:
                rows["shard"] = place
            place += 1
            yield rows


def _array_files(
    store: Store, file: str, dtype: np.dtype[Any], total: int, parts: Iterable[NDArray[Any]]
) -> dict[str, FileInfo]:
    """Write an index array and, if loaders read it, the checksums of its blocks; returns {name: info}."""
    if dtype == SOURCE:
        return {file: _stream(store, file, _npy(dtype, total, parts))}
    with store.create(file) as part:
        crcs = checksums(_write_through(part, _npy(dtype, total, parts)))
    checksum_file = checksums_name(file)
    return {file: part.info(), checksum_file: _stream(store, checksum_file, _npy(crcs.dtype, len(crcs), [crcs]))}


def _write_through(part: AtomicFile, pieces: Iterable[bytes]) -> Iterator[bytes]:
    for piece in pieces:
        part.write(piece)
        yield piece


def _npy(dtype: np.dtype[Any], total: int, parts: Iterable[NDArray[Any]]) -> Iterator[bytes]:
    """The bytes of a .npy file of a (total,) array, in pieces. Source: numpy.lib.format, version 1.0."""
    head = io.BytesIO()
    described = np.lib.format.dtype_to_descr(dtype)
    np.lib.format.write_array_header_1_0(
        head, {"descr": described, "fortran_order": False, "shape": (total,)}
    )
    yield head.getvalue()
    for part in parts:
        yield part.tobytes()


def _source_names(split: SplitView) -> Iterator[bytes]:
    for number in range(split.shards):
        keys = split.record(number).samples["key"].tolist()
        yield "".join(json.dumps(name) + "\n" for name in split.names_of(keys)).encode()


def _digests(split: SplitView) -> Iterator[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]:
    for number in range(split.shards):
        record = split.record(number)
        yield record.sources["digest"], record.samples["key"], record.samples["label"]


def _stream(store: Store, name: str, pieces: Iterable[bytes]) -> FileInfo:
    with store.create(name) as part:
        for piece in pieces:
            part.write(piece)
    return part.info()


def _timm_info(counts: Mapping[str, SplitTotals], prefix: str) -> bytes:
    """timm's `_info.json`. Source: timm's data/readers/reader_wds.py, `_parse_split_info`."""
    splits = {
        name: {
            "name": name,
            "num_samples": part.samples,
            "filenames": [f"{prefix}{shard}.tar" for shard in part.shards],
            "shard_lengths": list(part.shards.values()),
        }
        for name, part in counts.items()
    }
    return (json.dumps({"splits": splits}, indent=1) + "\n").encode()
