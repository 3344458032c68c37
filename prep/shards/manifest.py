"""Derives everything but the shards of a set from their records: index, lists, info files, manifest."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resolute.pipeline.dataset.format import (
    FORMAT,
    SOURCE,
    STORED,
    VERSION,
    dropped_name,
    duplicates_name,
    index_name,
    manifest_bytes,
    names_name,
    rejects_name,
    shard_name,
    source_name,
)
from resolute.pipeline.dataset.index_array import checksums, checksums_name
from resolute.pipeline.dataset.target import Target, widened
from resolute.prep.plan.generations import StoredInputs, check_inputs, plan_name
from resolute.prep.plan.set_plan import SetPlan, ShardLayout
from resolute.prep.plan.shuffle import shuffled
from resolute.prep.storage.hashed_file import AtomicFile, FileInfo
from resolute.prep.storage.output import Store

from .cards import CROISSANT, croissant, is_own_croissant, write_card
from .duplicates import InputNames, find_duplicates
from .existing_set import DAMAGED, MANIFEST
from .record import Records, ShardRecord

__all__ = ["finalize_set", "is_info_file", "read_rejects", "restore_info_files", "write_rejects"]

_INFO = "_info.json"  # timm's list of shards, in the folder of each resolution and in the set's


def finalize_set(
    store: Store,
    plan: SetPlan,
    records: Records,
    inputs: InputNames,
    stored: Callable[[int], StoredInputs],
    kept: Mapping[str, Any] | None,
    scratch: Path,
) -> dict[str, Any]:
    """Write everything except the shards, with one record in memory at a time, and return the manifest.

    All shards of `plan.layout` are in `records`. Files of the generations before its first one stay as the manifest
    `kept` lists them. `stored(generation)` are the photos of a generation; `scratch` takes copies of index files.
    Until the manifest is written, an older one and all files that it lists stay as they are, but for the files that
    `is_info_file`, which follow at once. Raises `ResoluteError` if the store refuses.
    """
    layout, first, splits = plan.layout, plan.layout.first, list(plan.layout.generations[0])
    samples_dtype = Target.from_manifest(plan.plans[-1]).sample_dtype
    rows = _Rows(store, layout, records, min(plan.short_sides), scratch, samples_dtype)
    rejects = records.rejects()
    files: dict[str, FileInfo] = {}
    generations: list[dict[str, Any]] = []
    if kept is not None:
        files = {
            name: FileInfo(nbytes=info["bytes"], sha256=info["sha256"]) for name, info in kept["files"].items()
            if not is_info_file(name)
        }  # fmt: skip
        generations = list(kept["generations"])
        rejects |= read_rejects(store, first - 1)
    files |= records.files(plan.short_sides)
    shard_counts = {split: sum(added["shards"][split] for added in generations) for split in splits}
    for number in range(first, len(plan.plans)):
        own = plan.plans[number]
        files[plan_name(number)] = store.write(plan_name(number), manifest_bytes(own))
        files |= check_inputs(store, number, plan.hashes[number])
        added: dict[str, Any] = {
            "plan": plan.hashes[number], "images": own["images"], "samples": {}, "shards": {},
            "classes": len(own["classes"]), "removed": own.get("removed", 0), "changed": own.get("changed", 0),
            "dropped": {},
        }  # fmt: skip
        for split in splits:
            lengths = rows.lengths(split, number)
            added["samples"][split], added["shards"][split] = sum(lengths.values()), len(lengths)
            if lengths:
                files |= _index_files(store, plan, rows, inputs, split, number, shard_counts[split])
            shard_counts[split] += len(lengths)
        dropped = _dropped(rows, layout, own, stored(number) if number else None)
        for split, left_out in dropped.items():
            if len(left_out):
                name = dropped_name(split, number)
                files[name] = _stream(store, name, _npy(np.dtype("<u4"), len(left_out), [left_out.astype("<u4")]))
                added["dropped"][split] = len(left_out)
        own_rejects = {
            (split, key): reason for (split, key), reason in rejects.items()
            if key < layout.keys_of(split, number).stop
        }  # fmt: skip
        files[rejects_name(number)] = write_rejects(store, own_rejects, inputs, generation=number)
        total = sum(rows.samples(split, k) for split in splits for k in range(number + 1))
        duplicates = find_duplicates(
            {split: partial(rows.digests, split, number, dropped[split]) for split in splits}, inputs,
            total - sum(map(len, dropped.values())),
        )  # fmt: skip
        files[duplicates_name(number)] = _stream(store, duplicates_name(number), duplicates.lines())
        generations.append({**added, "rejected": len(own_rejects), "duplicates": duplicates.summary()})
    lengths_of = {
        split: {name: n for k in range(len(plan.plans)) for name, n in rows.lengths(split, k).items()}
        for split in splits
    }
    newest = plan.plans[-1]
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "settings": {**newest["settings"], "resolutions": sorted(plan.short_sides)},
        "classes": newest["classes"],
        "target": newest["target"],
        "codecs": newest["codecs"],
        "resolutions": {str(res): {"short_side": side} for res, side in sorted(plan.short_sides.items())},
        "splits": {
            split: {"samples": sum(lengths.values()), "shards": list(lengths)} for split, lengths in lengths_of.items()
        },
        "generations": generations,
        "files": _listed(files),
        "source": {
            **newest["source"], "rejected": generations[-1]["rejected"], "duplicates": generations[-1]["duplicates"],
        },
    }  # fmt: skip
    info_files = _info_files(lengths_of, plan.short_sides)
    if is_own_croissant(store):
        info_files[CROISSANT] = croissant(manifest)
    files |= {
        name: FileInfo(nbytes=len(data), sha256=hashlib.sha256(data).hexdigest()) for name, data in info_files.items()
    }
    manifest["files"] = _listed(files)
    data = manifest_bytes(manifest)
    write_card(store, manifest)
    is_new = store.size(MANIFEST) is None
    for step in (_write_all, _write_manifest) if is_new else (_write_manifest, _write_all):
        step(store, info_files, data)
    store.remove(DAMAGED)
    loaded: dict[str, Any] = json.loads(data)
    return loaded


def is_info_file(name: str) -> bool:
    """Whether a file describes the set for other readers; an extension replaces it."""
    return name.rpartition("/")[2] == _INFO or name == CROISSANT


def restore_info_files(store: Store, manifest: Mapping[str, Any], layout: ShardLayout, scratch: Path) -> None:
    """Write the info files of a finished set again; an extension may have been killed just before it did."""
    dtype = Target.from_manifest(manifest).sample_dtype
    rows = _Rows(store, replace(layout, first=len(layout.generations)), None, 0, scratch, dtype)
    lengths = {
        split: {name: n for k in range(len(layout.generations)) for name, n in rows.lengths(split, k).items()}
        for split in manifest["splits"]
    }
    files = _info_files(lengths, [int(res) for res in manifest["resolutions"]])
    if CROISSANT in manifest["files"]:
        files[CROISSANT] = croissant(manifest)
    _write_all(store, files, b"")


def _info_files(lengths: Mapping[str, Mapping[str, int]], resolutions: Collection[int]) -> dict[str, bytes]:
    """{name: content} of timm's info files, from {split: {shard: samples}}."""
    # why: timm opens "wds/..." at the folder of a resolution, or at the set's root for the largest one
    folders = [*((f"{res}/", "") for res in resolutions), ("", f"{max(resolutions)}/")]
    return {f"{folder}{_INFO}": _timm_info(lengths, prefix) for folder, prefix in folders}


def _listed(files: Mapping[str, FileInfo]) -> dict[str, dict[str, Any]]:
    """The manifest's table of files."""
    return {name: {"bytes": info.nbytes, "sha256": info.sha256} for name, info in sorted(files.items())}


def _write_all(store: Store, files: Mapping[str, bytes], manifest: bytes) -> None:
    for name, data in files.items():
        store.write(name, data)


def _write_manifest(store: Store, files: Mapping[str, bytes], manifest: bytes) -> None:
    store.write(MANIFEST, manifest)


class _Rows:
    """The index rows of each generation: from records, or for finished generations from the index."""

    def __init__(
        self, store: Store, layout: ShardLayout, records: Records | None, res: int, scratch: Path, dtype: np.dtype[Any]
    ) -> None:
        self._store, self._layout, self._records, self._res, self._scratch = store, layout, records, res, scratch
        self._dtype = dtype  # of the samples of the newest generation
        self._arrays: dict[str, NDArray[Any]] = {}

    def lengths(self, split: str, generation: int) -> dict[str, int]:
        """{shard: number of its samples} of those with samples."""
        shards = self._layout.shards_of(split, generation)
        if generation >= self._layout.first:
            assert self._records is not None
            counts = [self._records.samples(split, number) for number in shards]
        else:
            keys = self.keys(split, generation)
            ends = np.searchsorted(keys, [self._layout.keys(split, number).stop for number in shards])
            counts = np.diff(ends, prepend=0).tolist()
        return {shard_name(split, number): n for number, n in zip(shards, counts, strict=True) if n}

    def samples(self, split: str, generation: int) -> int:
        return sum(self.lengths(split, generation).values())

    def records(self, split: str, generation: int, res: int | None = None) -> Iterator[ShardRecord]:
        """The records of a generation to be made."""
        shards = self._layout.shards_of(split, generation)
        assert self._records is not None
        return (self._records.get(split, number, self._res if res is None else res) for number in shards)

    def keys(self, split: str, generation: int) -> NDArray[Any]:
        if generation >= self._layout.first:
            parts = [record.samples["key"] for record in self.records(split, generation)]
            return np.concatenate([np.empty(0, np.uint64), *parts])
        rows = self._array(index_name(split, generation))
        return np.empty(0, np.uint64) if rows is None else rows["key"]

    def digests(
        self, split: str, newest: int, dropped: NDArray[np.int64]
    ) -> Iterator[tuple[NDArray[Any], ...]]:
        """The digests, keys and targets of all samples up to generation `newest` but the rows `dropped`."""
        first, column = 0, str((self._dtype.names or ("",))[-1])
        for generation in range(newest + 1):
            for samples, sources in self._pieces(split, generation):
                samples = widened(samples, self._dtype)
                left_out = dropped[(dropped >= first) & (dropped < first + len(samples))] - first
                if len(left_out):
                    kept = np.delete(np.arange(len(samples)), left_out)
                    yield sources["digest"][kept], samples["key"][kept], samples[column][kept]
                else:
                    yield sources["digest"], samples["key"], samples[column]
                first += len(samples)

    def _pieces(self, split: str, generation: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        if generation >= self._layout.first:
            yield from ((record.samples, record.sources) for record in self.records(split, generation))
        elif (samples := self._array(index_name(split, generation))) is not None:
            sources = self._array(source_name(split, generation))
            assert sources is not None
            yield samples, sources

    def _array(self, name: str) -> NDArray[Any] | None:
        """An index file; None if the generation has no samples in the split."""
        if name not in self._arrays and self._store.size(name) is None:
            return None
        if name not in self._arrays:
            self._arrays[name] = np.load(self._store.local(name, self._scratch), mmap_mode="r")
        return self._arrays[name]


def _index_files(
    store: Store, plan: SetPlan, rows: _Rows, inputs: InputNames, split: str, generation: int, first_shard: int
) -> dict[str, FileInfo]:
    """Write the index of a generation's samples, at least one; the shards before its own are `first_shard`."""
    total, of = rows.samples(split, generation), partial(rows.records, split, generation)
    dtype = Target.from_manifest(plan.plans[generation]).sample_dtype
    files = _array_files(store, index_name(split, generation), dtype, total, (record.samples for record in of()))
    sources = (record.sources for record in of())
    files |= _array_files(store, source_name(split, generation), SOURCE, total, sources)
    for res in sorted(plan.short_sides):
        name = index_name(split, generation, res=res)
        files |= _array_files(store, name, STORED, total, _numbered(of(res), first_shard))
    names = (inputs.names(split, record.samples["key"].tolist()) for record in of())
    lines = ("".join(json.dumps(name) + "\n" for name in part).encode() for part in names)
    files[names_name(split, generation)] = _stream(store, names_name(split, generation), lines)
    return files


def _dropped(
    rows: _Rows, layout: ShardLayout, plan: Mapping[str, Any], stored: StoredInputs | None
) -> dict[str, NDArray[np.int64]]:
    """{split: ascending rows of the samples that a generation leaves out}"""
    dropped = {}
    for number, split in enumerate(layout.generations[0]):
        parts, first = [np.empty(0, np.int64)], 0
        for generation in range(0 if stored is None or not len(stored.superseded) else plan["generation"]):
            assert stored is not None
            here = (stored.superseded["generation"] == generation) & (stored.superseded["split"] == number)
            own, keys = layout.keys_of(split, generation), rows.keys(split, generation)
            if here.any():
                is_dropped = np.zeros(len(own), np.bool_)
                is_dropped[stored.superseded["index"][here]] = True
                order = shuffled(plan["settings"]["seed"], split, len(own), generation=generation)
                parts.append(first + np.flatnonzero(is_dropped[order[keys.astype(np.int64) - own.start]]))
            first += len(keys)
        dropped[split] = np.concatenate(parts)
    return dropped


def read_rejects(store: Store, generation: int) -> dict[tuple[str, int], str]:
    """{(split, key): reason} of all inputs that were rejected up to a finished generation."""
    rows = map(json.loads, store.read(rejects_name(generation)).splitlines())
    return {(row["split"], row["key"]): row["reason"] for row in rows}


def write_rejects(
    store: Store, rejects: Mapping[tuple[str, int], str], inputs: InputNames, *, generation: int = 0
) -> FileInfo:
    """Write {path, split, key, reason} of every rejected input, from {(split, key): reason}."""

    def rows() -> Iterator[bytes]:
        for (split, key), reason in sorted(rejects.items()):
            (path,) = inputs.names(split, [key])
            row = {"path": path, "split": split, "key": key, "reason": reason}
            yield (json.dumps(row) + "\n").encode()

    return _stream(store, rejects_name(generation), rows())


def _numbered(records: Iterable[ShardRecord], place: int) -> Iterator[NDArray[Any]]:
    """Yield the STORED rows of each shard with samples, with `shard` its position among those, from `place` on."""
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
