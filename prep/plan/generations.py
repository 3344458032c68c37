"""The photos of finished generations, as stored in OUT, and their comparison with the source as it is now.

A generation leaves `records/inputs.bin` (`inputs-001.bin`, …): its plan, the name, size and class (or a checksum of the
labels or values) of each of its photos in order of their names, and the photos of older generations that it supersedes.
Since a photo may be gone from the source later, this cannot be derived again, so there are two copies.

The file is one line of JSON; for each split the INPUT rows and the blob of names; SUPERSEDED rows; and the SHA-256 of
all that: about 25 bytes per photo and its name.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.format import generation_mark
from resolute.prep.shards.duplicates import InputNames
from resolute.prep.shards.record import RECORDS, plan_hash
from resolute.prep.sources.image_ref import MISSING
from resolute.prep.storage.hashed_file import FileInfo
from resolute.prep.storage.output import Store

from .catalog import Catalog
from .set_plan import ShardLayout
from .shuffle import shuffled
from .splits import Split

__all__ = ["SUPERSEDED", "Comparison", "StoredInputs", "StoredNames", "check_inputs", "compare", "inputs_names",
           "plan_name", "read_inputs", "rejected_keys", "stored_plan", "write_inputs"]  # fmt: skip

# `name_end` is the end of the name in the blob of names; it begins where the previous name ends. `missing`: the photo
# was listed and did not exist.
INPUT = np.dtype([("name_end", "<u8"), ("size_bytes", "<u8"), ("label", "<u4"), ("missing", "u1")])
# A photo that is no part of the set any more: `index` counts the sorted photos of its generation and split.
SUPERSEDED = np.dtype([("generation", "<u4"), ("split", "<u4"), ("index", "<u4")])
_FORMAT = "resolute-generation-1"
_DIGEST_BYTES = 32
_CHUNK = 1 << 16


def plan_name(generation: int) -> str:
    """The file with the plan of a generation."""
    return f"{RECORDS}/plan{generation_mark(generation, '-')}.json"


def inputs_names(generation: int) -> tuple[str, str]:
    """The file with the photos of a generation, and its copy."""
    stem = f"{RECORDS}/inputs{generation_mark(generation, '-')}"
    return f"{stem}.bin", f"{stem}.copy.bin"


@dataclass(frozen=True, kw_only=True)
class StoredInputs:
    """The photos of a generation: {split: rows (n,) INPUT} and the blobs of their names, in order of names.

    `superseded` are all photos of older generations that this one leaves out, those that older ones leave out included.
    """

    plan: dict[str, Any]
    rows: Mapping[str, NDArray[Any]]
    names: Mapping[str, memoryview]
    superseded: NDArray[Any]

    def name(self, split: str, index: int) -> str:
        ends = self.rows[split]["name_end"]
        return os.fsdecode(bytes(self.names[split][int(ends[index - 1]) if index else 0 : int(ends[index])]))

    def raw_names(self, split: str) -> Iterator[bytes]:
        ends, blob, begin = self.rows[split]["name_end"], self.names[split], 0
        for first in range(0, len(ends), _CHUNK):
            for end in ends[first : first + _CHUNK].tolist():
                yield bytes(blob[begin:end])
                begin = end


@dataclass(frozen=True, kw_only=True)
class StoredNames(InputNames):
    """The names of the input images of a set, from the stored photos of all its generations."""

    stored: Sequence[StoredInputs]
    layout: ShardLayout
    seed: int

    def names(self, split: str, keys: Sequence[int]) -> list[str]:
        names = [""] * len(keys)
        generations = self.layout.generations_of_keys(split, keys)
        for generation in np.unique(generations).tolist():
            own, chosen = self.layout.keys_of(split, generation), np.flatnonzero(generations == generation)
            local = np.asarray(keys, np.int64)[chosen] - own.start
            indices = shuffled(self.seed, split, len(own), local, generation=generation)
            for at, index in zip(chosen.tolist(), indices.tolist(), strict=True):
                names[at] = self.stored[generation].name(split, index)
        return names


def write_inputs(
    store: Store, generation: int, plan: Mapping[str, Any], splits: Mapping[str, Split], superseded: NDArray[Any]
) -> None:
    """Write the photos of a generation, both copies."""
    digest = hashlib.sha256()
    with ExitStack() as stack:
        files = [stack.enter_context(store.create(name)) for name in inputs_names(generation)]
        for piece in _pieces(plan, splits, superseded):
            digest.update(piece)
            for file in files:
                file.write(piece)
        for file in files:
            file.write(digest.digest())


def _pieces(plan: Mapping[str, Any], splits: Mapping[str, Split], superseded: NDArray[Any]) -> Iterator[bytes]:
    ends = {name: split.catalog.name_ends(split.positions) for name, split in splits.items()}
    header = {
        "format": _FORMAT, "plan": plan, "superseded": len(superseded),
        "splits": [[name, len(end), int(end[-1]) if len(end) else 0] for name, end in ends.items()],
    }  # fmt: skip
    yield json.dumps(header).encode() + b"\n"
    for name, split in splits.items():
        for first in range(0, len(split), _CHUNK):
            entries = split.catalog.entries[split.positions[first : first + _CHUNK]]
            rows = np.empty(len(entries), INPUT)
            rows["name_end"] = ends[name][first : first + _CHUNK]
            rows["size_bytes"] = entries["size_bytes"]
            rows["label"] = split.catalog.target_digests(split.positions[first : first + _CHUNK])
            rows["missing"] = entries["packed"] == MISSING
            yield rows.tobytes()
        for first in range(0, len(split), _CHUNK):
            yield b"".join(split.catalog.shown_names(split.positions[first : first + _CHUNK]))
    yield superseded.tobytes()


def read_inputs(store: Store, generation: int, plan: str | None, scratch: Path) -> StoredInputs:
    """The photos of the generation with the plan hash `plan` (None: any), memory-mapped.

    Raises `ResoluteError` if both copies are missing or damaged.
    """
    for name in inputs_names(generation):
        with suppress(FileNotFoundError, ValueError):
            stored = _parse(store.local(name, scratch))
            if plan in (None, plan_hash(stored.plan)):
                return stored
    raise _lost(store, generation)


def stored_plan(store: Store, generation: int) -> dict[str, Any]:
    """The plan in the file of a generation's photos; {} if both copies are missing or damaged."""
    for name in inputs_names(generation):
        with suppress(FileNotFoundError, ValueError):
            data = store.read(name)
            if hashlib.sha256(data[:-_DIGEST_BYTES]).digest() == data[-_DIGEST_BYTES:]:
                plan: dict[str, Any] = json.loads(data[: data.index(b"\n")])["plan"]
                return plan
    return {}


def check_inputs(store: Store, generation: int, plan: str) -> dict[str, FileInfo]:
    """{name: info} of both copies of the photos of a generation, a damaged one replaced by the other."""
    names, infos = inputs_names(generation), dict[str, FileInfo]()
    for name in names:
        with suppress(FileNotFoundError, ValueError):
            infos[name] = _info(store, name, plan)
    for good, lost in ((names[0], names[1]), (names[1], names[0])):
        if good in infos and lost not in infos:
            with store.open(good) as source, store.create(lost) as file:
                while piece := source.read(1 << 20):
                    file.write(piece)
            infos[lost] = file.info()
    if not infos:
        raise _lost(store, generation)
    return infos


def _info(store: Store, name: str, plan: str) -> FileInfo:
    """Raises `ValueError` if the file is damaged or belongs to another plan."""
    whole, sealed, rest = hashlib.sha256(), hashlib.sha256(), b""
    nbytes, first = 0, b""
    with store.open(name) as file:
        first = file.readline()
        piece = first
        while piece:
            whole.update(piece)
            nbytes += len(piece)
            rest += piece
            sealed.update(rest[:-_DIGEST_BYTES])
            rest = rest[-_DIGEST_BYTES:]
            piece = file.read(1 << 20)
    if sealed.digest() != rest or plan_hash(json.loads(first)["plan"]) != plan:
        raise ValueError("other bytes than prep wrote")
    return FileInfo(nbytes=nbytes, sha256=whole.hexdigest())


def _lost(store: Store, generation: int) -> ResoluteError:
    first, copy = inputs_names(generation)
    return ResoluteError(
        f"{store.where}/{first}: missing or damaged, as is its copy {copy}, expected the list of the photos of "
        f"generation {generation}, which cannot be derived again; restore one of them, or start over with REBUILD=1 "
        "(--rebuild)"
    )


def _parse(path: Path) -> StoredInputs:
    """Raises `FileNotFoundError`, and `ValueError` for a damaged file."""
    with path.open("rb") as file:
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        first = file.readline()
    if hashlib.sha256(data[:-_DIGEST_BYTES]).digest() != bytes(data[-_DIGEST_BYTES:]):
        raise ValueError("other bytes than prep wrote")
    header = json.loads(first)
    at = len(first)
    rows: dict[str, NDArray[Any]] = {}
    names: dict[str, memoryview] = {}
    for split, count, names_bytes in header["splits"]:
        rows[split] = np.frombuffer(data, INPUT, count, at) if count else np.empty(0, INPUT)
        at += rows[split].nbytes
        names[split] = data[at : at + names_bytes]
        at += names_bytes
    count = header["superseded"]
    superseded = np.frombuffer(data, SUPERSEDED, count, at) if count else np.empty(0, SUPERSEDED)
    return StoredInputs(plan=header["plan"], rows=rows, names=names, superseded=superseded)


@dataclass(kw_only=True)
class Comparison:
    """The source as it is now, compared with the photos of the finished generations.

    For each catalogue of the source, by position: `known` (N,) bool, whether the photo needs no conversion, because it
    is in the set as it is, or was rejected and has not changed since; `split_of` (N,) u1, 1 + the number of the split
    that a photo of this name has ever been in, 0: none.
    For each generation and split, by index: `positions` (n,) i8, the photo's position in the catalogue, -1 if it is
    gone or has changed; `alive` (n,) bool, whether it is not superseded.
    `removed` and `changed` are (generation, split, index) of photos in the set that are gone from the source or have
    another size or target now. `gone_names`: all names that the source lacks now.
    """

    stored: Sequence[StoredInputs]
    split_names: tuple[str, ...]
    known: dict[str, NDArray[np.bool_]]
    split_of: dict[str, NDArray[np.uint8]]
    positions: list[dict[str, NDArray[np.int64]]] = field(default_factory=list)
    alive: list[dict[str, NDArray[np.bool_]]] = field(default_factory=list)
    removed: list[tuple[int, str, int]] = field(default_factory=list)
    changed: list[tuple[int, str, int]] = field(default_factory=list)
    superseded: NDArray[Any] = field(default_factory=lambda: np.empty(0, SUPERSEDED))
    gone_names: set[str] = field(default_factory=set)

    @property
    def added(self) -> int:
        """The number of photos to add."""
        return sum(int((~known).sum()) for known in self.known.values())

    def name(self, photo: tuple[int, str, int]) -> str:
        generation, split, index = photo
        return self.stored[generation].name(split, index)

    def class_counts(self, split: str, classes: int) -> NDArray[np.int64]:
        """(classes,) the photos of each class in a split; (1,) all photos if targets are not classes."""
        is_class = self.stored[0].plan["target"]["kind"] == "class"
        counts = np.zeros(classes if is_class else 1, np.int64)
        for stored, alive in zip(self.stored, self.alive, strict=True):
            if split in stored.rows and not is_class:
                counts += np.count_nonzero(alive[split])
            elif split in stored.rows:
                counts += np.bincount(stored.rows[split]["label"][alive[split]], minlength=classes)
        return counts


def compare(
    stored: Sequence[StoredInputs],
    catalogs: Mapping[str, Catalog],
    rejected: Mapping[str, NDArray[np.int64]],
    *,
    layout: ShardLayout,
    seed: int,
    drop: bool,
) -> Comparison:
    """Compare all finished generations with the source as it is now.

    `rejected` are the keys of the inputs of each split that are not in the set. `drop`: supersede photos that are gone
    or have changed, and count the new versions of the latter as photos to add. A rejected photo that has changed is
    always to be added. Photos are compared by name, size and target.
    """
    splits = tuple(stored[0].rows)
    # why: without a source of their own, the photos of val are among those of train
    catalog_of = {split: split if split in catalogs else "train" for split in splits}
    lookups = {name: _Lookup(catalog) for name, catalog in catalogs.items()}
    result = Comparison(
        stored=stored, split_names=splits,
        known={name: np.zeros(len(catalog), np.bool_) for name, catalog in catalogs.items()},
        split_of={name: np.zeros(len(catalog), np.uint8) for name, catalog in catalogs.items()},
    )  # fmt: skip
    old_superseded = stored[-1].superseded
    superseded = [old_superseded]
    for generation, inputs in enumerate(stored):
        result.positions.append({})
        result.alive.append({})
        for number, split in enumerate(splits):
            name = catalog_of[split]
            rows, catalog, known = inputs.rows[split], catalogs[name], result.known[name]
            catalog_positions = lookups[name].positions(inputs.raw_names(split), len(rows))
            there = catalog_positions >= 0
            result.split_of[name][catalog_positions[there]] = 1 + number
            result.gone_names.update(inputs.name(split, i) for i in np.flatnonzero(~there).tolist())
            entries = catalog.entries[catalog_positions]  # of those that are not there: any
            targets = catalog.target_digests(catalog_positions)
            same = there & (entries["size_bytes"] == rows["size_bytes"]) & (targets == rows["label"])
            same &= (entries["packed"] == MISSING) == (rows["missing"] == 1)
            here = (old_superseded["generation"] == generation) & (old_superseded["split"] == number)
            alive = np.ones(len(rows), np.bool_)
            alive[old_superseded["index"][here]] = False
            is_rejected = np.zeros(len(rows), np.bool_)
            keys = layout.keys_of(split, generation)
            own = rejected[split][(rejected[split] >= keys.start) & (rejected[split] < keys.stop)]
            is_rejected[shuffled(seed, split, len(rows), own - keys.start, generation=generation)] = True
            kept = alive & ~is_rejected
            known[catalog_positions[alive & same]] = True
            changed, removed = kept & there & ~same, kept & ~there
            result.removed += [(generation, split, i) for i in np.flatnonzero(removed).tolist()]
            result.changed += [(generation, split, i) for i in np.flatnonzero(changed).tolist()]
            # a rejected photo that has changed since gets another chance
            gone = (alive & is_rejected & there & ~same) | ((changed | removed) if drop else False)
            if not drop:
                known[catalog_positions[changed]] = True
            new = np.empty(int(gone.sum()), SUPERSEDED)
            new["generation"], new["split"], new["index"] = generation, number, np.flatnonzero(gone)
            superseded.append(new)
            result.positions[-1][split] = np.where(same, catalog_positions, -1)
            result.alive[-1][split] = kept & ~gone
    result.superseded = np.sort(np.concatenate(superseded), order=["generation", "split", "index"])
    return result


class _Lookup:
    """Positions of names in a catalogue, with 16 bytes of memory per photo."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        # why Python's own hash: it is the fastest, and is needed in this process only
        hashes = np.fromiter(map(hash, catalog.shown_names()), np.int64, len(catalog))
        self._order = np.argsort(hashes, kind="stable")
        self._hashes = hashes[self._order]

    def positions(self, names: Iterator[bytes], count: int) -> NDArray[np.int64]:
        """(count,) the position of each name, -1 for one that the catalogue lacks."""
        out = np.full(count, -1, np.int64)
        for first in range(0, count, _CHUNK):
            part = list(islice(names, min(_CHUNK, count - first)))
            hashes = np.fromiter(map(hash, part), np.int64, len(part))
            places = np.searchsorted(self._hashes, hashes)
            inside = np.flatnonzero(places < len(self._hashes))
            hits = inside[self._hashes[places[inside]] == hashes[inside]]
            candidates = self._order[places[hits]]
            seen = self._catalog.shown_names(candidates)
            for hit, position, name in zip(hits.tolist(), candidates.tolist(), seen, strict=True):
                out[first + hit] = position if name == part[hit] else self._search(part[hit], int(places[hit]))
        return out

    def _search(self, name: bytes, place: int) -> int:
        """The position of a name whose hash is that of another; `place` is the first with that hash."""
        end = int(np.searchsorted(self._hashes, self._hashes[place], side="right"))
        candidates = self._order[place:end]
        seen = self._catalog.shown_names(candidates)
        return next((at for at, other in zip(candidates.tolist(), seen, strict=True) if other == name), -1)


def rejected_keys(rejects: Mapping[tuple[str, int], str], splits: Sequence[str]) -> dict[str, NDArray[np.int64]]:
    """{split: keys of its rejected inputs} from {(split, key): reason}."""
    return {split: np.array([key for name, key in rejects if name == split], np.int64) for split in splits}
