"""`ExistingSet`: the generations of the set in OUT, and its manifest if the set is finished."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from resolute.errors import ResoluteError
from resolute.files import PARTIAL
from resolute.pipeline.dataset.manifest import FORMAT, MANIFEST, VERSION, is_sealed, join_manifest
from resolute.prep.storage.output import RUN_FOLDER, Store, read_present

from .generation import GenerationSpec, spec_name
from .record import RECORDS, lost_files, record_names

__all__ = [
    "CHANGES",
    "DAMAGED",
    "ExistingSet",
    "describe_differences",
    "open_existing",
    "read_damaged",
    "read_sealed",
    "read_spec",
    "stored_manifest",
]

DAMAGED = "damaged.json"  # names of the files that `verify` found damaged
CHANGES = "changes.jsonl"  # photos of the set that the source lacked, or had changed, at the last extension


@dataclass(frozen=True, kw_only=True)
class ExistingSet:
    """The set at OUT, or the part of it that is finished.

    `generations` are those of the manifest, and without one all that are there. `manifest` is the one that
    `join_manifest` returns; None if the set is unfinished, or a manifest damaged. `damaged` are the files that `verify`
    listed. A set that is to be rebuilt may have no generations that can be read; `source` and `classes` are what is
    known of its photos.
    """

    generations: tuple[GenerationSpec, ...]
    manifest: dict[str, Any] | None
    damaged: frozenset[str]
    source: Mapping[str, Any]
    classes: Sequence[str]

    @property
    def newest(self) -> GenerationSpec:
        return self.generations[-1]

    @property
    def resolutions(self) -> list[int]:
        """The resolutions (px) of a finished set; none of an unfinished one."""
        return [] if self.manifest is None else [int(res) for res in self.manifest["resolutions"]]

    def is_complete(self, store: Store, resolutions: Iterable[int]) -> bool:
        """Whether it has all `resolutions` (px) and no file is known as damaged; one listing per folder."""
        if self.manifest is None or not set(resolutions) <= set(self.resolutions):
            return False
        return self.damaged.isdisjoint(self.manifest["files"]) and not self.lost(store)

    def lost(self, store: Store) -> set[str]:
        """The files of a finished set that are missing or have another size; one listing per folder."""
        files = {} if self.manifest is None else self.manifest["files"]
        return lost_files(store, {name: info["bytes"] for name, info in files.items()})


def open_existing(store: Store, *, rebuild: bool) -> ExistingSet | None:
    """The set at OUT; None if there is nothing to keep: OUT is new, or its run had finished no shard.

    Raises `ResoluteError` if OUT holds foreign files or, unless it is to be rebuilt, a set of another version or
    damaged beyond use.
    """
    manifest_data, spec_data = read_present(store, MANIFEST), read_present(store, spec_name(0))
    top, first = _parse(manifest_data), _parse(spec_data)
    if top.get("format") != FORMAT and not spec_data:
        if not manifest_data:
            _refuse_foreign(store)
            return None
        raise ResoluteError(
            f"{store.where}/{MANIFEST}: not a shard set, got a foreign or damaged file, expected a "
            f"{FORMAT} manifest or an empty folder; choose another OUT, or delete the file"
        )
    if not manifest_data and not record_names(store):
        return None  # why: an unfinished run that has finished nothing
    version = top.get("version", first.get("version", VERSION))
    if not rebuild and version != VERSION:
        raise ResoluteError(
            f"{store.where}/{MANIFEST}: a set of another version, got version {version}, expected "
            f"{VERSION}; train on it as it is, extend it with the version of Resolute that made it, rebuild it with "
            "REBUILD=1 (--rebuild), or choose another OUT"
        )
    manifest = stored_manifest(store) if version == VERSION else None
    generations = _generations(store, manifest) if version == VERSION else ()
    if not generations and not rebuild:
        raise ResoluteError(
            f"{store.where}/{spec_name(0)}: damaged, as is {MANIFEST}, expected at least one as prep wrote it; start "
            "over with REBUILD=1 (--rebuild) or choose another OUT"
        )
    photos = generations[-1].to_json() if generations else first
    return ExistingSet(
        generations=generations,
        manifest=manifest,
        damaged=read_damaged(store),
        source=photos.get("source", {}),
        classes=photos.get("classes", ()),
    )


def stored_manifest(store: Store) -> dict[str, Any] | None:
    """The manifest of the set at `store`, as `join_manifest` returns it; None if there is none or one is damaged."""
    data = read_present(store, MANIFEST)
    try:
        return join_manifest(json.loads(data), partial(read_present, store)) if is_sealed(data) else None
    except (ValueError, KeyError, TypeError):
        return None


def _generations(store: Store, manifest: Mapping[str, Any] | None) -> tuple[GenerationSpec, ...]:
    """Those of the manifest, or without one generation 0 and all that follow it; none if that is damaged."""
    if manifest is not None:
        return tuple(GenerationSpec.from_json(added["spec"]) for added in manifest["generations"])
    found: list[GenerationSpec] = []
    while (spec := read_spec(store, len(found))) is not None:
        if spec.previous != (found[-1].hash if found else None):
            break  # left by an extension of another set
        found.append(spec)
    return tuple(found)


def read_spec(store: Store, generation: int) -> GenerationSpec | None:
    """The specification of a generation, as its own file has it; None if the file is missing or damaged."""
    try:
        return GenerationSpec.from_json(read_sealed(store, spec_name(generation)))
    except ValueError:
        return None


def read_damaged(store: Store) -> frozenset[str]:
    """The names of the files that `verify` found damaged."""
    try:
        return frozenset(json.loads(read_present(store, DAMAGED) or b"[]"))
    except (ValueError, TypeError):
        return frozenset()


def read_sealed(store: Store, name: str) -> dict[str, Any]:
    """The JSON object in a file that `manifest_bytes` made; {} if the file is missing or damaged."""
    data = read_present(store, name)
    sealed = _parse(data) if is_sealed(data) else {}
    return {key: value for key, value in sealed.items() if key != "sha256"}


def _parse(data: bytes) -> dict[str, Any]:
    """A JSON object; {} for anything else."""
    try:
        parsed = json.loads(data)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


_PHOTOS = re.compile(r"photos\.parquet")


def _refuse_foreign(store: Store) -> None:
    root = Path(store.where)
    if "://" not in store.where and root.exists() and not root.is_dir():
        raise ResoluteError(f"{root}: in the way, got a file, expected a folder; choose another OUT")
    names = [name for name in store.folders() if name != RUN_FOLDER] + store.names()
    if RECORDS in names and all(PARTIAL.fullmatch(name) or _PHOTOS.fullmatch(name) for name in store.names(RECORDS)):
        names.remove(RECORDS)  # why: left by a run that was killed before it had written its plan, which comes last
    if names:
        raise ResoluteError(
            f"{store.where}: not empty and not a shard set, got {len(names)} entries such as {names[0]}, expected an "
            "empty or new folder; choose another OUT"
        )


def describe_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """The differences between two plans, except codecs, in words, photos first: `quality: got 90, expected 80; …`."""
    differences = _changed_classes(old.get("source", {}).get("classes", {}), new.get("source", {}).get("classes", {}))
    for table, prefix in (("settings", ""), ("target", "target "), ("source", "")):
        before, after = old.get(table, {}), new.get(table, {})
        names = before.keys() if table == "target" else sorted({*before, *after} - {"classes", "fingerprint"})
        for name in names:
            got, expected = before.get(name), after.get(name)
            is_hash = table == "source" and name == "splits"  # says nothing beside other differences
            if got != expected and not (is_hash and differences):
                differences.append(f"{prefix}{name}: got {_shorten(got)}, expected {_shorten(expected)}")
    return "; ".join(differences or ["its format differs"])


def _changed_classes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Describe the classes that differ; both arguments map 'SPLIT CLASS' to [images, fingerprint]."""
    changed = [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]
    differences = []
    for name in changed[:3]:
        old, new = before.get(name, [0])[0], after.get(name, [0])[0]
        what = f"{old} -> {new} images" if old != new else f"{new} images, other names or sizes"
        differences.append(f"the source has changed in {name} ({what})")
    if len(changed) > 3:
        differences.append(f"and in {len(changed) - 3} more classes")
    return differences


def _shorten(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= 40 else text[:13] + '…"'
