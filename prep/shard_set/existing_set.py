"""`ExistingSet`: the plans of the set in OUT, and its manifest if the set is finished."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resolute.errors import ResoluteError
from resolute.files import PARTIAL
from resolute.pipeline.dataset.format import FORMAT, VERSION, WRITE_VERSIONS, generation_mark, is_sealed
from resolute.prep.shard_set.set_photos import photos_name, stored_plan
from resolute.prep.storage.output import RUN_FOLDER, Store
from resolute.prep.storage.retry import retry

from .record import RECORDS, lost_files, plan_hash, record_names

__all__ = [
    "CHANGES",
    "DAMAGED",
    "MANIFEST",
    "PLAN",
    "ExistingSet",
    "describe_differences",
    "open_existing",
    "plan_name",
    "read_damaged",
    "read_sealed",
]

MANIFEST = "manifest.json"


def plan_name(generation: int) -> str:
    """The file with the plan of a generation."""
    return f"{RECORDS}/plan{generation_mark(generation, '-')}.json"


PLAN = plan_name(0)  # everything that decides the bytes of the set, except its resolutions
DAMAGED = "damaged.json"  # names of the files that `verify` found damaged
CHANGES = "changes.jsonl"  # photos of the set that the source lacked, or had changed, at the last extension


@dataclass(frozen=True, kw_only=True)
class ExistingSet:
    """The set at OUT, or the part of it that is finished.

    `plans` are those of its generations, without that of an unfinished extension. `manifest` is None if the set is
    unfinished or its manifest damaged; `damaged` are the files that `verify` listed.
    """

    plans: tuple[dict[str, Any], ...]
    manifest: dict[str, Any] | None
    damaged: frozenset[str]

    @property
    def plan(self) -> dict[str, Any]:
        """The plan of the newest generation."""
        return self.plans[-1]

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
    is_current = manifest.get("version") in WRITE_VERSIONS and is_sealed(manifest_data or b"")
    if not rebuild and manifest.get("version", VERSION) not in WRITE_VERSIONS:
        raise ResoluteError(
            f"{store.where}/{MANIFEST}: a set of another version, got version {manifest['version']}, expected "
            f"{VERSION}; train on it as it is, extend it with the version of Resolute that made it, rebuild it with "
            "REBUILD=1 (--rebuild), or choose another OUT"
        )
    if plan and is_sealed(plan_data or b""):
        del plan["sha256"]
    else:
        plan = stored_plan(store, 0) if is_current else {}
    if not plan and not rebuild:
        raise ResoluteError(
            f"{store.where}/{PLAN}: damaged, as is {MANIFEST}, expected at least one as prep wrote it; start over with "
            "REBUILD=1 (--rebuild) or choose another OUT"
        )
    plans: tuple[dict[str, Any], ...] = (plan,)
    with suppress(*[ResoluteError] if rebuild else []):  # why: what is to be replaced may be damaged
        plans = _plans(store, plan, manifest if is_current else None)
    return ExistingSet(plans=plans, manifest=manifest if is_current else None, damaged=read_damaged(store))


def _plans(store: Store, first: dict[str, Any], manifest: Mapping[str, Any] | None) -> tuple[dict[str, Any], ...]:
    """The plans of all generations, `first` that of generation 0; those of `manifest`, or without it all that follow.

    Raises `ResoluteError` if one is damaged.
    """
    plans, count = [first], None if manifest is None else len(manifest["generations"])
    while count is None or len(plans) < count:
        number, previous = len(plans), plan_hash(plans[-1])
        expected = None if manifest is None else manifest["generations"][number]["plan"]
        plan = read_sealed(store, plan_name(number))
        if expected is not None and plan_hash(plan) != expected:
            plan = stored_plan(store, number)
        if plan.get("previous") == previous and expected in (None, plan_hash(plan)):
            plans.append(plan)
        elif count is None:
            break
        else:
            raise ResoluteError(
                f"{store.where}/{plan_name(number)}: got none or a damaged one, and in {photos_name(number)} too, "
                "expected one as prep wrote it; restore one of them, or start over with REBUILD=1 (--rebuild)"
            )
    return tuple(plans)


def read_damaged(store: Store) -> frozenset[str]:
    """The names of the files that `verify` found damaged."""
    try:
        return frozenset(json.loads(_read(store, DAMAGED) or b"[]"))
    except (ValueError, TypeError):
        return frozenset()


def read_sealed(store: Store, name: str) -> dict[str, Any]:
    """The JSON object in a file that `manifest_bytes` made; {} if the file is missing or damaged."""
    data = retry(f"{store.where}/{name}", lambda: _read(store, name)) or b""
    sealed = _parse(data) if is_sealed(data) else {}
    return {key: value for key, value in sealed.items() if key != "sha256"}


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
