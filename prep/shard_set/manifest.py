"""Derives everything but the shards of a set from their records: index, lists, manifests."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resolute.pipeline.dataset.format import (
    SOURCE,
    STORED,
    duplicates_name,
    index_name,
    names_name,
    rejects_name,
    shard_name,
    source_name,
)
from resolute.pipeline.dataset.manifest import (
    FORMAT,
    MANIFEST,
    VERSION,
    generation_manifest_name,
    info_files,
    join_manifest,
    manifest_bytes,
)
from resolute.prep.shard_set.set_photos import SetPhotos, file_info, photos_name
from resolute.prep.storage.hashed_file import FileInfo
from resolute.prep.storage.output import Store

from .cards import write_card
from .duplicates import Duplicates
from .existing_set import DAMAGED, stored_manifest
from .generation import GenerationSpec, spec_name
from .groups import Numbers, write_groups
from .near_copies import NearCopies, NearPairs, kept_near_copies, read_records
from .record import Records, ShardRecord
from .work_list import WorkList

__all__ = ["finalize_set", "read_rejects", "write_info_files", "write_rejects"]


def finalize_set(
    store: Store,
    work: WorkList,
    records: Records,
    photos: SetPhotos,
    older: Mapping[str, Any] | None,
    scratch: Path,
) -> dict[str, Any]:
    """Write everything except the shards, with one record in memory at a time, and return the joined manifest.

    All shards of `work` are in `records`. `older` is the joined manifest of the generations before those, which stay as
    they are; None if there are none. `scratch` takes copies of index files. Until `manifest.json` is written, an older
    one and all files that it lists stay as they are. Raises `ResoluteError` if the store refuses.
    """
    older = older or {"generations": [], "files": {}}
    entries = list(older["generations"])
    older_specs = [GenerationSpec.from_json(own["spec"]) for own in entries]
    names = [generation_manifest_name(number, work.short_sides) for number in range(len(entries))]
    files = {name: FileInfo.from_json(older["files"][name]) for name in names}
    finisher = _Finisher(store, work, records, photos, older_specs, scratch)
    for spec in work.generations:
        own = finisher.finish(spec, entries)
        names.append(generation_manifest_name(spec.number, work.short_sides))
        files[names[-1]] = store.write(names[-1], manifest_bytes(own))
        entries.append(own)
    newest = work.generations[-1]
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "settings": {**newest.settings, "resolutions": sorted(work.short_sides)},
        "classes": newest.classes,
        "target": newest.target,
        "codecs": newest.codecs,
        "resolutions": {str(res): {"short_side": side} for res, side in sorted(work.short_sides.items())},
        "splits": {split: {"samples": sum(own["samples"][split] for own in entries)} for split in newest.splits},
        "generations": names,
        "files": _listed(files),
        "source": {
            **newest.source,
            "rejected": entries[-1]["rejected"],
            "duplicates": entries[-1]["duplicates"],
        },
    }
    data = manifest_bytes(manifest)
    write_card(store, manifest)
    store.write(MANIFEST, data)
    joined = join_manifest(json.loads(data), store.read)
    write_info_files(store, joined)
    store.remove(DAMAGED)
    return joined


def write_info_files(store: Store, manifest: Mapping[str, Any]) -> None:
    """Write timm's info files of a finished set, which follow from its joined manifest."""
    for name, data in info_files(manifest).items():
        store.write(name, data)


class _Finisher:
    """Writes what belongs to one generation after another, from its records, and for older ones from the index."""

    def __init__(
        self,
        store: Store,
        work: WorkList,
        records: Records,
        photos: SetPhotos,
        older: Sequence[GenerationSpec],
        scratch: Path,
    ) -> None:
        self._store, self._work, self._records, self._photos = store, work, records, photos
        self._index = _Index(store, scratch)
        self._duplicates = Duplicates(photos)
        self._near = _NearCopies(store, work, records, photos, older)
        first, splits = len(older), work.generations[0].splits
        self._rejects = records.rejects() | (read_rejects(store, first - 1) if first else {})
        for split in splits:
            for generation in range(first):
                self._duplicates.add(split, self._index.digests(split, generation))

    def finish(self, spec: GenerationSpec, older: list[dict[str, Any]]) -> dict[str, Any]:
        """Write the index and the lists of a generation, whose `older` ones have these manifests; returns its own."""
        store, work, number, splits = self._store, self._work, spec.number, spec.splits
        files = self._records.files(spec, work.short_sides)
        files[spec_name(number)] = store.write(spec_name(number), manifest_bytes(spec.to_json()))
        files[photos_name(number)] = FileInfo.from_json(file_info(self._photos.files[number]))
        lengths = {split: self._lengths(spec, split) for split in splits}
        for split in splits:
            if lengths[split]:
                files |= self._write_index(spec, split, sum(own["shards"][split] for own in older))
            self._duplicates.add(split, self._own_digests(spec, split))
        rejects = {
            (split, key): why for (split, key), why in self._rejects.items() if key < spec.split_keys(split).stop
        }
        files[rejects_name(number)] = write_rejects(store, rejects_name(number), rejects, self._photos)
        counts = self._duplicates.find()
        lines = self._duplicates.lines(spec.sample_target)
        files[duplicates_name(number)] = _stream(store, duplicates_name(number), lines)
        own: dict[str, Any] = {
            "plan": spec.hash,
            "spec": spec.to_json(),
            "images": spec.images,
            "samples": {split: sum(own.values()) for split, own in lengths.items()},
            "shards": {split: len(own) for split, own in lengths.items()},
            "lengths": lengths,
            "classes": len(spec.classes),
            "removed": spec.removed,
            "changed": spec.changed,
            "rejected": len(rejects),
            "duplicates": counts,
        }
        groups = {
            split: self._stored(split, number, keys, numbers)
            for split, (keys, numbers) in self._photos.groups_until(number).items()
            if len(keys)
        }
        found = self._near.of_generation(spec, groups)
        if found is not None:
            files |= found.write(store, number)
            own["near_copies"] = found.counts
        files |= write_groups(store, number, {} if found is None else found.numbers, groups)
        if facts := self._records.facts(spec).to_json():
            own["pixels"] = facts
        return {**own, "files": _listed(files)}

    def _of(self, spec: GenerationSpec, split: str, res: int | None = None) -> Iterator[ShardRecord]:
        """The records of a generation's shards at `res` (px), None: the smallest one."""
        res = min(self._work.short_sides) if res is None else res
        return (self._records.get(split, number, res) for number in spec.shards(split))

    def _lengths(self, spec: GenerationSpec, split: str) -> dict[str, int]:
        """{shard: number of its samples} of those with samples."""
        counts = {shard_name(split, number): self._records.samples(split, number) for number in spec.shards(split)}
        return {shard: n for shard, n in counts.items() if n}

    def _own_digests(self, spec: GenerationSpec, split: str) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        return ((record.samples["key"], record.sources["digest"]) for record in self._of(spec, split))

    def _stored(
        self, split: str, generation: int, keys: NDArray[np.uint64], numbers: NDArray[np.uint32]
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
        """The keys and group numbers of the photos that are samples, and not rejects, of the generations so far."""
        stored = np.concatenate([self._index.keys(split, each) for each in range(generation + 1)])
        is_stored = np.isin(keys, stored)
        return keys[is_stored], numbers[is_stored]

    def _write_index(self, spec: GenerationSpec, split: str, first_shard: int) -> dict[str, FileInfo]:
        """Write the index of a generation's samples, at least one; the shards before its own are `first_shard`."""
        number, of, dtype = spec.number, partial(self._of, spec, split), spec.sample_target.sample_dtype
        total = sum(self._lengths(spec, split).values())
        contents = {
            index_name(split, number): _npy(dtype, total, (record.samples for record in of())),
            source_name(split, number): _npy(SOURCE, total, (record.sources for record in of())),
        }
        for res in sorted(self._work.short_sides):
            contents[index_name(split, number, res=res)] = _npy(STORED, total, _numbered(of(res), first_shard))
        contents[names_name(split, number)] = _names(
            self._photos, split, number, (record.samples["key"] for record in of())
        )
        return {name: _stream(self._store, name, pieces) for name, pieces in contents.items()}


@dataclass
class _Index:
    """The index files of finished generations."""

    store: Store
    scratch: Path

    def keys(self, split: str, generation: int) -> NDArray[np.uint64]:
        """(n,) the keys of a generation's samples."""
        rows = self._array(index_name(split, generation))
        return np.empty(0, np.uint64) if rows is None else rows["key"]

    def digests(self, split: str, generation: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """The keys and digests of a generation's samples."""
        rows, sources = self._array(index_name(split, generation)), self._array(source_name(split, generation))
        if rows is not None and sources is not None:
            yield rows["key"], sources["digest"]

    def _array(self, name: str) -> NDArray[Any] | None:
        """An index file; None if the generation has no samples in the split."""
        if self.store.size(name) is None:
            return None
        array: NDArray[Any] = np.load(self.store.local(name, self.scratch), mmap_mode="r")
        return array


class _NearCopies:
    """The near copies of each generation: those that an older manifest of the same set lists, or else found now."""

    def __init__(
        self, store: Store, work: WorkList, records: Records, photos: SetPhotos, older: Sequence[GenerationSpec]
    ) -> None:
        self._store, self._records, self._res = store, records, min(work.short_sides)
        self._specs, self._first = (*older, *work.generations), len(older)
        self._finder = NearCopies(store, photos, self._res)
        self._added = 0  # generations that the finder knows
        # why: a set that gets another resolution, or is repaired, keeps its groups and so its folds
        self._before = stored_manifest(store) or {"generations": [], "files": {}}

    def of_generation(self, spec: GenerationSpec, groups: Numbers | None) -> NearPairs | None:
        """Those among the samples up to and including a generation; None if they are not looked for."""
        number = spec.number
        if spec.near_copies == "none":
            return None
        before = self._before["generations"][number : number + 1]
        if before and before[0]["plan"] == spec.hash:
            if "near_copies" not in before[0]:
                return None
            kept = kept_near_copies(self._store, self._before["files"], number, before[0]["near_copies"])
            if kept is not None:
                return kept
        for each in self._specs[self._added : number + 1]:
            for split in each.splits:
                shards = each.shards(split)
                if each.number >= self._first:
                    self._finder.add(self._records.get(split, shard, self._res) for shard in shards)
                else:
                    self._finder.add(read_records(self._store, split, shards, self._res))
        self._added = number + 1
        return self._finder.find(spec.sample_target, everything=spec.near_copies == "all", groups=groups)


def _listed(files: Mapping[str, FileInfo]) -> dict[str, dict[str, Any]]:
    """The manifest's table of files."""
    return {name: info.to_json() for name, info in sorted(files.items())}


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
