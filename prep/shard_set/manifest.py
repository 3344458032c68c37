"""Derives everything but the shards of a set from their records: index, lists, info files, manifest."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
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
    WITH_GROUPS,
    duplicates_name,
    groups_name,
    index_name,
    manifest_bytes,
    names_name,
    rejects_name,
    shard_name,
    source_name,
)
from resolute.pipeline.dataset.target import Target
from resolute.prep.shard_set.set_photos import SetPhotos, file_info, photos_name
from resolute.prep.shard_set.set_plan import SetPlan, ShardLayout, near_copies_of
from resolute.prep.storage.hashed_file import FileInfo
from resolute.prep.storage.output import Store

from .cards import write_card
from .duplicates import Duplicates
from .existing_set import DAMAGED, MANIFEST, plan_name, read_sealed
from .groups import Numbers, write_groups
from .near_copies import NearCopies, NearPairs, kept_near_copies, read_records
from .record import Records, ShardRecord

__all__ = ["finalize_set", "is_info_file", "read_rejects", "restore_info_files", "write_rejects"]

_INFO = "_info.json"  # timm's list of shards, in the folder of each resolution and in the set's


def finalize_set(
    store: Store,
    plan: SetPlan,
    records: Records,
    photos: SetPhotos,
    kept: Mapping[str, Any] | None,
    scratch: Path,
) -> dict[str, Any]:
    """Write everything except the shards, with one record in memory at a time, and return the manifest.

    All shards of `plan.layout` are in `records`. Files of the generations before its first one stay as the manifest
    `kept` lists them. `scratch` takes copies of index files.
    Until the manifest is written, an older one and all files that it lists stay as they are, but for the files that
    `is_info_file`, which follow at once. Raises `ResoluteError` if the store refuses.
    """
    layout, first, splits = plan.layout, plan.layout.first, list(plan.layout.generations[0])
    rows, duplicates = _Rows(store, layout, records, min(plan.short_sides), scratch), Duplicates(photos.database)
    near = _NearCopies(store, plan, records, photos)
    rejects = records.rejects()
    files: dict[str, FileInfo] = {}
    generations: list[dict[str, Any]] = []
    if kept is not None:
        files = {
            name: FileInfo(nbytes=info["bytes"], sha256=info["sha256"])
            for name, info in kept["files"].items()
            if not is_info_file(name)
        }
        generations = list(kept["generations"])
        rejects |= read_rejects(store, first - 1)
    files |= records.files(plan.short_sides)
    shard_counts = {split: sum(added["shards"][split] for added in generations) for split in splits}
    for number in range(first, len(plan.plans)):
        own = plan.plans[number]
        files[plan_name(number)] = store.write(plan_name(number), manifest_bytes(own))
        info = file_info(photos.files[number])
        files[photos_name(number)] = FileInfo(nbytes=info["bytes"], sha256=info["sha256"])
        added: dict[str, Any] = {
            "plan": plan.hashes[number],
            "images": own["images"],
            "samples": {},
            "shards": {},
            "classes": len(own["classes"]),
            "removed": own.get("removed", 0),
            "changed": own.get("changed", 0),
        }
        for split in splits:
            lengths = rows.lengths(split, number)
            added["samples"][split], added["shards"][split] = sum(lengths.values()), len(lengths)
            if lengths:
                files |= _index_files(store, plan, rows, photos, split, number, shard_counts[split])
            shard_counts[split] += len(lengths)
        own_rejects = {
            (split, key): reason for (split, key), reason in rejects.items() if key < layout.keys_of(split, number).stop
        }
        files[rejects_name(number)] = write_rejects(store, rejects_name(number), own_rejects, photos)
        for split in splits:
            for generation in [*range(number)] * (number == first) + [number]:
                duplicates.add(split, rows.digests(split, generation))
        counts = duplicates.find()
        files[duplicates_name(number)] = _stream(
            store, duplicates_name(number), duplicates.lines(Target.from_manifest(own))
        )
        groups = {
            split: _of_stored(rows, split, number, keys, numbers)
            for split, (keys, numbers) in photos.groups_until(number).items()
            if len(keys)
        }
        found = near.of_generation(number, groups)
        if found is not None:
            files |= found.write(store, number)
            added["near_copies"] = found.counts
        files |= write_groups(store, number, {} if found is None else found.numbers, groups)
        own_shards = [(split, shard) for split in splits for shard in layout.shards_of(split, number)]
        if facts := records.facts(own_shards).to_json():
            added["pixels"] = facts
        generations.append({**added, "rejected": len(own_rejects), "duplicates": counts})
    lengths_of = {
        split: {name: n for k in range(len(plan.plans)) for name, n in rows.lengths(split, k).items()}
        for split in splits
    }
    newest = plan.plans[-1]
    manifest = {
        "format": FORMAT,
        "version": WITH_GROUPS if any(groups_name(k) in files for k in range(len(generations))) else VERSION,
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
            **newest["source"],
            "rejected": generations[-1]["rejected"],
            "duplicates": generations[-1]["duplicates"],
        },
    }
    info_files = _info_files(lengths_of, plan.short_sides)
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


class _NearCopies:
    """The near copies of each generation: those that an older manifest of the same set lists, or else found now."""

    def __init__(self, store: Store, plan: SetPlan, records: Records, photos: SetPhotos) -> None:
        self._store, self._plan, self._records = store, plan, records
        self._res = min(plan.short_sides)
        self._finder = NearCopies(store, photos, self._res)
        self._added = 0  # generations that the finder knows
        older = read_sealed(store, MANIFEST)
        hashes = [added["plan"] for added in older.get("generations", [])]
        # why: a set that gets another resolution, or is repaired, keeps its groups and so its folds
        self._older = older if hashes and hashes == list(plan.hashes[: len(hashes)]) else None
        self._covered = 0 if self._older is None else len(hashes)

    def of_generation(self, number: int, groups: Numbers | None) -> NearPairs | None:
        """Those among the samples up to and including a generation; None if they are not looked for."""
        plan, layout = self._plan.plans[number], self._plan.layout
        if near_copies_of(plan) == "none":
            return None
        if self._older is not None and number < self._covered:
            if "near_copies" not in self._older["generations"][number]:
                return None
            kept = kept_near_copies(self._store, self._older, number)
            if kept is not None:
                return kept
        for generation in range(self._added, number + 1):
            for split in layout.generations[0]:
                shards = layout.shards_of(split, generation)
                if generation >= layout.first:
                    self._finder.add(self._records.get(split, shard, self._res) for shard in shards)
                else:
                    self._finder.add(read_records(self._store, split, shards, self._res))
        self._added = number + 1
        target, everything = Target.from_manifest(plan), near_copies_of(plan) == "all"
        return self._finder.find(target, everything=everything, groups=groups)


def _of_stored(
    rows: _Rows, split: str, generation: int, keys: NDArray[np.uint64], numbers: NDArray[np.uint32]
) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
    """The keys and group numbers of the photos that are samples, and not rejects, of the generations so far."""
    stored = np.concatenate([rows.keys(split, each) for each in range(generation + 1)])
    is_stored = np.isin(keys, stored)
    return keys[is_stored], numbers[is_stored]


def is_info_file(name: str) -> bool:
    """Whether a file describes the set for other readers; an extension replaces it."""
    return name.rpartition("/")[2] == _INFO


def restore_info_files(store: Store, manifest: Mapping[str, Any], layout: ShardLayout, scratch: Path) -> None:
    """Write the info files of a finished set again; an extension may have been killed just before it did."""
    rows = _Rows(store, replace(layout, first=len(layout.generations)), None, 0, scratch)
    lengths = {
        split: {name: n for k in range(len(layout.generations)) for name, n in rows.lengths(split, k).items()}
        for split in manifest["splits"]
    }
    files = _info_files(lengths, [int(res) for res in manifest["resolutions"]])
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

    def __init__(self, store: Store, layout: ShardLayout, records: Records | None, res: int, scratch: Path) -> None:
        self._store, self._layout, self._records, self._res, self._scratch = store, layout, records, res, scratch
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

    def digests(self, split: str, generation: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """The keys and digests of a generation's samples, in pieces."""
        if generation >= self._layout.first:
            yield from ((each.samples["key"], each.sources["digest"]) for each in self.records(split, generation))
        elif (samples := self._array(index_name(split, generation))) is not None:
            sources = self._array(source_name(split, generation))
            assert sources is not None
            yield samples["key"], sources["digest"]

    def _array(self, name: str) -> NDArray[Any] | None:
        """An index file; None if the generation has no samples in the split."""
        if name not in self._arrays and self._store.size(name) is None:
            return None
        if name not in self._arrays:
            self._arrays[name] = np.load(self._store.local(name, self._scratch), mmap_mode="r")
        return self._arrays[name]


def _index_files(
    store: Store, plan: SetPlan, rows: _Rows, photos: SetPhotos, split: str, generation: int, first_shard: int
) -> dict[str, FileInfo]:
    """Write the index of a generation's samples, at least one; the shards before its own are `first_shard`."""
    total, of = rows.samples(split, generation), partial(rows.records, split, generation)
    dtype = Target.from_manifest(plan.plans[generation]).sample_dtype
    contents = {
        index_name(split, generation): _npy(dtype, total, (record.samples for record in of())),
        source_name(split, generation): _npy(SOURCE, total, (record.sources for record in of())),
    }
    for res in sorted(plan.short_sides):
        contents[index_name(split, generation, res=res)] = _npy(STORED, total, _numbered(of(res), first_shard))
    keys = (record.samples["key"] for record in of())
    contents[names_name(split, generation)] = _names(photos, split, generation, keys)
    return {name: _stream(store, name, pieces) for name, pieces in contents.items()}


def _names(photos: SetPhotos, split: str, generation: int, parts: Iterable[NDArray[Any]]) -> Iterator[bytes]:
    """A line with the name of the photo of each sample; `parts` are the keys of the samples, ascending."""
    named = photos.of_split(split, generation)
    for keys in parts:
        wanted, names = keys.tolist(), []
        for key in wanted:
            while (row := next(named))[0] != key:  # rejected
                pass
            names.append(json.dumps(row[1]))
        yield "".join(f"{name}\n" for name in names).encode()


def read_rejects(store: Store, generation: int) -> dict[tuple[str, int], str]:
    """{(split, key): reason} of all inputs that were rejected up to a finished generation."""
    rows = map(json.loads, store.read(rejects_name(generation)).splitlines())
    return {(row["split"], row["key"]): row["reason"] for row in rows}


def write_rejects(store: Store, name: str, rejects: Mapping[tuple[str, int], str], photos: SetPhotos) -> FileInfo:
    """Write {path, split, key, reason} of every rejected input to the file `name`, from {(split, key): reason}."""

    def rows() -> Iterator[bytes]:
        ordered = sorted(rejects.items())
        for path, ((split, key), reason) in zip(photos.names([at for at, _ in ordered]), ordered, strict=True):
            row = {"path": path, "split": split, "key": key, "reason": reason}
            yield (json.dumps(row) + "\n").encode()

    return _stream(store, name, rows())


def _numbered(records: Iterable[ShardRecord], place: int) -> Iterator[NDArray[Any]]:
    """Yield the STORED rows of each shard with samples, with `shard` its position among those, from `place` on."""
    for record in records:
        if len(record.stored):
            rows = record.stored.copy()
            rows["shard"] = place
            place += 1
            yield rows


def _npy(dtype: np.dtype[Any], total: int, parts: Iterable[NDArray[Any]]) -> Iterator[bytes]:
    """The bytes of a .npy file of a (total,) array, in pieces. Source: numpy.lib.format, version 1.0."""
    head = io.BytesIO()
    described = np.lib.format.dtype_to_descr(dtype)
    np.lib.format.write_array_header_1_0(head, {"descr": described, "fortran_order": False, "shape": (total,)})
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
