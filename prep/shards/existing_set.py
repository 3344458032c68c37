"""`ExistingSet`: the plan of the set in OUT, and its manifest if the set is finished."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.dataset.shard_set import FORMAT, VERSION, is_sealed
from pipeline.errors import ResoluteError
from pipeline.storage.atomic_file import PARTIAL
from prep.storage.output import RUN_FOLDER, Store

from .record import RECORDS, lost_files, record_names

__all__ = ["DAMAGED", "MANIFEST", "PLAN", "ExistingSet", "describe_differences", "open_existing"]

MANIFEST = "manifest.json"
PLAN = f"{RECORDS}/plan.json"  # everything that decides the bytes of the set, except its resolutions
DAMAGED = "damaged.json"  # names of the files that `verify` found damaged


@dataclass(frozen=True, kw_only=True)
class ExistingSet:
    """The set at OUT, or what a run has finished of it.

    `manifest` is None if the set is unfinished or its manifest damaged; `damaged` are the files that `verify` listed.
    """

    plan: dict[str, Any]
    manifest: dict[str, Any] | None
    damaged: frozenset[str]

    @property
    def resolutions(self) -> list[int]:
        """The resolutions (px) of a finished set; none of an unfinished one."""
        return [] if self.manifest is None else [int(res) for res in self.manifest["resolutions"]]

    def is_complete(self, store: Store, resolutions: Iterable[int]) -> bool:
        """Whether it has all `resolutions` (px) and no file is known as damaged; one listing per folder."""
        if self.manifest is None or not set(resolutions) <= set(self.resolutions):
            return False
        files = {name: info["bytes"] for name, info in self.manifest["files"].items()}
        return self.damaged.isdisjoint(files) and not lost_files(store, files)


def open_existing(store: Store, *, rebuild: bool) -> ExistingSet | None:
    """The set at OUT; None if there is nothing to keep: OUT is new, or its run had finished no shard.

    Raises `ResoluteError` if OUT holds foreign files or, unless it is to be rebuilt, a set of another version or
    damaged beyond use.
    """
    manifest_data, plan_data = _read(store, MANIFEST), _read(store, PLAN)
    manifest, plan = _parse(manifest_data), _parse(plan_data)
    if manifest.get("format") != FORMAT and plan_data is None:
        if manifest_data is None:
            _refuse_foreign(store)
            return None
        raise ResoluteError(
            f"{store.where}/{MANIFEST}: not a shard set, got a foreign or damaged file, expected a "
            f"{FORMAT} manifest or an empty folder; choose another OUT, or delete the file"
        )
    if manifest_data is None and not record_names(store):
        return None  # why: an unfinished run that has finished nothing
    is_current = manifest.get("version") == VERSION and is_sealed(manifest_data or b"")
    if not rebuild and manifest.get("version", VERSION) != VERSION:
        raise ResoluteError(
            f"{store.where}/{MANIFEST}: a set of another version, got version {manifest['version']}, expected "
            f"{VERSION}; rebuild it with REBUILD=1 (--rebuild) or choose another OUT"
        )
    if plan and is_sealed(plan_data or b""):
        del plan["sha256"]
    else:
        plan = _plan_of(manifest) if is_current else {}
    if not plan and not rebuild:
        raise ResoluteError(
            f"{store.where}/{PLAN}: damaged, as is {MANIFEST}, expected at least one as prep wrote it; start over with "
            "REBUILD=1 (--rebuild) or choose another OUT"
        )
    try:
        damaged = frozenset(json.loads(_read(store, DAMAGED) or b"[]"))
    except (ValueError, TypeError):
        damaged = frozenset()
    return ExistingSet(plan=plan, manifest=manifest if is_current else None, damaged=damaged)


def _plan_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    plan = {name: manifest[name] for name in ("format", "version", "settings", "classes", "codecs", "source")}
    for table, added in (("settings", ["resolutions"]), ("source", ["rejected", "duplicates"])):
        plan[table] = {name: value for name, value in plan[table].items() if name not in added}
    return plan


def _parse(data: bytes | None) -> dict[str, Any]:
    """A JSON object; {} for anything else."""
    try:
        parsed = json.loads(data or b"")
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _read(store: Store, name: str) -> bytes | None:
    try:
        return store.read(name)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _refuse_foreign(store: Store) -> None:
    root = Path(store.where)
    if "://" not in store.where and root.exists() and not root.is_dir():
        raise ResoluteError(f"{root}: in the way, got a file, expected a folder; choose another OUT")
    names = [name for name in store.folders() if name != RUN_FOLDER] + store.names()
    if RECORDS in names and all(PARTIAL.fullmatch(name) for name in store.names(RECORDS)):
        names.remove(RECORDS)  # why: left by a run that was killed while it wrote its plan
    if names:
        raise ResoluteError(
            f"{store.where}: not empty and not a shard set, got {len(names)} entries such as {names[0]}, expected an "
            "empty or new folder; choose another OUT"
        )


def describe_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """The differences between two plans, except codecs, in words: `quality: got 90, expected 80; …`."""
    differences = []
    for table in ("settings", "source"):
        before, after = old.get(table, {}), new.get(table, {})
        for name in sorted({*before, *after} - {"classes", "fingerprint"}):
            if before.get(name) != after.get(name):
                differences.append(f"{name}: got {_shorten(before.get(name))}, expected {_shorten(after.get(name))}")
    differences += _changed_classes(old.get("source", {}).get("classes", {}), new.get("source", {}).get("classes", {}))
    if not differences:
        differences = ["its format differs"]
    return "; ".join(differences)


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
