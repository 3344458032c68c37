"""Derives everything but the shards of a set from their records: index, lists, timm's info files, and the manifest."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.index_array import checksums, checksums_name
from pipeline.dataset.shard_set import FORMAT, SAMPLE, SOURCE, STORED, VERSION, manifest_bytes, shard_name
from prep.storage.hashed_file import AtomicFile, FileInfo
from prep.storage.output import Store

from .duplicates import NamesOf, find_duplicates
from .existing_set import DAMAGED, MANIFEST, PLAN
from .record import Records, ShardRecord

__all__ = ["finalize_set", "write_rejects"]


def finalize_set(
    store: Store,
    plan: Mapping[str, Any],
    short_sides: Mapping[int, int],
    shards: Mapping[str, int],
    records: Records,
    names_of: NamesOf,
) -> dict[str, Any]:
    """Write everything except the shards, with one record in memory at a time, and return the manifest.

    `short_sides` maps resolution to stored short side, both px; `shards` maps a split to its number of shards, all of
    which are in `records`. Raises `ResoluteError` if the store refuses.
    """
    lengths = {
        split: {shard_name(split, n): samples for n in range(count) if (samples := records.samples(split, n))}
        for split, count in shards.items()
    }
    totals = {split: sum(samples.values()) for split, samples in lengths.items()}
    rejects = records.rejects()

    def of(split: str, res: int = min(short_sides)) -> Iterator[ShardRecord]:
        return (records.get(split, number, res) for number in range(shards[split]))

    files = records.files(short_sides)
    files[PLAN] = store.write(PLAN, manifest_bytes(plan))
    files["rejects.jsonl"] = write_rejects(store, rejects, names_of)
    for split, total in totals.items():
        files |= _array_files(store, f"index/{split}.npy", SAMPLE, total, (record.samples for record in of(split)))
        sources = (record.sources for record in of(split))
        files |= _array_files(store, f"index/{split}.source.npy", SOURCE, total, sources)
        for res in sorted(short_sides):
            files |= _array_files(store, f"index/{split}-{res}.npy", STORED, total, _numbered(of(split, res)))
        names = (names_of(split, record.samples["key"].tolist()) for record in of(split))
        lines = ("".join(json.dumps(name) + "\n" for name in part).encode() for part in names)
        files[f"index/{split}.sources.jsonl"] = _stream(store, f"index/{split}.sources.jsonl", lines)
    duplicates = find_duplicates(
        {split: partial(_digests, partial(of, split)) for split in shards}, names_of, sum(totals.values())
    )
    files["duplicates.jsonl"] = _stream(store, "duplicates.jsonl", duplicates.lines())
    # why: timm opens "wds/..." at the folder of a resolution, or at the set's root for the largest one
    largest = max(short_sides)
    for folder, prefix in [(f"{res}/", "") for res in short_sides] + [("", f"{largest}/")]:
        files[f"{folder}_info.json"] = store.write(f"{folder}_info.json", _timm_info(lengths, prefix))
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "settings": {**plan["settings"], "resolutions": sorted(short_sides)},
        "classes": plan["classes"],
        "codecs": plan["codecs"],
        "resolutions": {str(res): {"short_side": side} for res, side in sorted(short_sides.items())},
        "splits": {
            split: {"samples": totals[split], "shards": list(samples)} for split, samples in lengths.items()
        },
        "files": {name: {"bytes": info.nbytes, "sha256": info.sha256} for name, info in sorted(files.items())},
        "source": {**plan["source"], "rejected": len(rejects), "duplicates": duplicates.summary()},
    }
    data = manifest_bytes(manifest)
    store.write(MANIFEST, data)
    store.remove(DAMAGED)
    loaded: dict[str, Any] = json.loads(data)
    return loaded


def write_rejects(store: Store, rejects: Mapping[tuple[str, int], str], names_of: NamesOf) -> FileInfo:
    """Write rejects.jsonl, {path, split, key, reason} of every rejected input, from {(split, key): reason}."""

    def rows() -> Iterator[bytes]:
        for (split, key), reason in sorted(rejects.items()):
            (path,) = names_of(split, [key])
            row = {"path": path, "split": split, "key": key, "reason": reason}
            yield (json.dumps(row) + "\n").encode()

    return _stream(store, "rejects.jsonl", rows())


def _numbered(records: Iterable[ShardRecord]) -> Iterator[NDArray[Any]]:
    """Yield the STORED rows of each shard with samples, with `shard` its position among those."""
    place = 0
    for record in records:
        if len(record.stored):
            rows = record.stored.copy()
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


def _digests(records: Callable[[], Iterator[ShardRecord]]) -> Iterator[tuple[NDArray[Any], ...]]:
    for record in records():
        yield record.sources["digest"], record.samples["key"], record.samples["label"]


def _stream(store: Store, name: str, pieces: Iterable[bytes]) -> FileInfo:
    with store.create(name) as part:
        for piece in pieces:
            part.write(piece)
    return part.info()


def _timm_info(lengths: Mapping[str, Mapping[str, int]], prefix: str) -> bytes:
    """timm's `_info.json` from {split: {shard: samples}}. Source: timm's data/readers/reader_wds.py,
    `_parse_split_info`."""
    splits = {
        name: {
            "name": name,
            "num_samples": sum(shards.values()),
            "filenames": [f"{prefix}{shard}.tar" for shard in shards],
            "shard_lengths": list(shards.values()),
        }
        for name, shards in lengths.items()
    }
    return (json.dumps({"splits": splits}, indent=1) + "\n").encode()
