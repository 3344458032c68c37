"""Plans an extension of a finished set (EXTEND=1): the photos that are new in the source become a new generation.

Photos that are gone from the source, or have changed, are counted and listed in OUT/changes.jsonl. They stay in the
set, or with DROP=1 the new generation leaves them out and takes up the new versions of changed ones.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.format import FORMAT, VERSION, rejects_name
from resolute.prep.convert.codecs import codec_versions
from resolute.prep.plan.catalog import Catalog
from resolute.prep.plan.generations import Comparison, StoredInputs, compare, read_inputs, rejected_keys
from resolute.prep.plan.inputs import Inputs, copies_of
from resolute.prep.plan.set_plan import layout_of
from resolute.prep.plan.splits import extend_splits
from resolute.prep.shards.existing_set import CHANGES, ExistingSet, describe_differences
from resolute.prep.shards.manifest import is_info_file, read_rejects
from resolute.prep.shards.record import plan_hash
from resolute.prep.shards.source_record import is_other_source, read_record
from resolute.prep.storage.output import Store

from .settings import Settings

__all__ = ["Finished", "check_extendable", "describe_changes", "extension_plan", "is_nothing_new",
           "open_finished", "write_changes"]  # fmt: skip

_AGAIN = "run the same command without EXTEND=1 (--extend)"


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The finished generations of a set beside its source as it is now.

    `inputs` are the photos to add, by split; `rejected` {(split, key): reason} those that finished generations have
    rejected, as far as they are known.
    """

    stored: Sequence[StoredInputs]
    comparison: Comparison
    inputs: Inputs
    rejected: Mapping[tuple[str, int], str]


def check_extendable(store: Store, settings: Settings, existing: ExistingSet | None) -> None:
    """Raise `ResoluteError` unless OUT holds a finished, sound set with the settings that are asked for."""
    if existing is None:
        raise ResoluteError(
            f"{store.where}: no set to extend, got nothing or a run that has finished no shard, expected a finished "
            f"set; {_AGAIN}, or correct OUT"
        )
    if existing.manifest is None:
        raise ResoluteError(
            f"{store.where}: not finished, got a set without a valid manifest.json, expected a finished set to extend; "
            f"finish or repair it first: {_AGAIN}, with the photos that it was begun with"
        )
    lost = {name for name in existing.lost(store) if not is_info_file(name)}  # why: these are written again
    if existing.damaged or lost:
        what = f"{len(existing.damaged)} damaged files" if existing.damaged else f"{len(lost)} missing or cut files"
        raise ResoluteError(
            f"{store.where}: damaged, got {what}, expected a sound set to extend; repair it first: {_AGAIN}, with the "
            "photos that it was made from"
        )
    wanted = {"settings": settings.plan_settings()}
    if existing.plan["settings"] != wanted["settings"]:
        raise ResoluteError(
            f"{store.where}: EXTEND=1 cannot change settings, {describe_differences(existing.plan, wanted)}; "
            "undo the change, or choose another OUT"
        )


def open_finished(
    store: Store, settings: Settings, existing: ExistingSet, catalogs: Mapping[str, Catalog], ignored: Counter[str],
    scratch: Path,
) -> Finished:  # fmt: skip
    """Compare the finished generations with the source. Raises `ResoluteError` if their lists are lost."""
    _check_target(store, existing, catalogs["train"])
    stored = [read_inputs(store, n, plan_hash(plan), scratch) for n, plan in enumerate(existing.plans)]
    newest, rejected = rejects_name(len(stored) - 1), dict[tuple[str, int], str]()
    if existing.manifest is not None and newest not in existing.damaged:
        with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            rejected = read_rejects(store, len(stored) - 1)
    comparison = compare(
        stored, catalogs, rejected_keys(rejected, tuple(stored[0].rows)), layout=layout_of(existing.plans),
        seed=settings.seed, drop=settings.drop,
    )  # fmt: skip
    copies = copies_of(settings, catalogs)
    splits = extend_splits(
        catalogs["train"], comparison, generation=len(stored), val=catalogs.get("val"),
        val_list=None if settings.val_list is None else Path(settings.val_list), val_frac=settings.held_out_frac,
        seed=settings.seed, copies=copies, drop=settings.duplicates == "drop",
    )  # fmt: skip
    for name, known in comparison.known.items() if settings.duplicates == "drop" else ():
        own = [split.positions for split in splits.values() if split.catalog is catalogs[name]]
        known[:] = True  # why: copies that are left out are no photos to add
        known[np.concatenate(own)] = False
    inputs = Inputs(splits=splits, catalogs=catalogs, ignored=ignored, copies=copies)
    return Finished(stored=stored, comparison=comparison, inputs=inputs, rejected=rejected)


def _check_target(store: Store, existing: ExistingSet, train: Catalog) -> None:
    """Raise `ResoluteError` unless the targets of the source are what those of the set are."""
    got, expected = train.target.to_json(), existing.plan["target"]
    if got != expected:
        raise ResoluteError(
            f"{store.where}: a set of other targets, {describe_differences({'target': expected}, {'target': got})}; "
            "correct the table, or set TARGET and COLUMNS"
        )


def is_nothing_new(finished: Finished) -> bool:
    """Whether an extension would neither add nor leave out a photo."""
    comparison = finished.comparison
    return not comparison.added and len(comparison.superseded) == len(finished.stored[-1].superseded)


def extension_plan(store: Store, settings: Settings, existing: ExistingSet, finished: Finished) -> dict[str, Any]:
    """The plan of the generation to add. Raises `ResoluteError` if the source is not that of the set."""
    comparison, inputs, previous = finished.comparison, finished.inputs, existing.plan
    record = read_record(store)
    if is_other_source(record, settings) and comparison.removed:
        assert record is not None
        raise ResoluteError(
            f"{store.where}: a set of other photos, made from {record['SRC']}, got SRC={settings.src}, which lacks "
            f"{len(comparison.removed)} of its photos, expected a source with the old photos and the new ones; correct "
            "SRC"
        )
    classes, known = list(inputs.classes), previous["classes"]
    if classes[: len(known)] != known:
        at = next(i for i, name in enumerate(known) if classes[i : i + 1] != [name])
        got = repr(classes[at]) if at < len(classes) else "none"
        raise ResoluteError(
            f"{settings.classes or settings.src}: class {at} is another, got {got}, expected {known[at]!r} as in "
            f"{store.where}, since classes keep their numbers; add new classes at the end"
        )
    for split, photos in inputs.splits.items():
        if not len(photos) and not comparison.class_counts(split, len(classes)).any():
            raise ResoluteError(
                f"{store.where}: EXTEND=1 DROP=1 would leave no photo in {split}, got none of its photos in "
                f"{settings.src}, expected at least one; correct SRC"
            )
    return {
        "format": FORMAT,
        "version": VERSION,
        "generation": len(existing.plans),
        "previous": plan_hash(previous),
        "settings": settings.plan_settings(),
        "classes": classes,
        "target": previous["target"],
        "codecs": codec_versions(),
        "source": inputs.summary(),
        "images": {split: len(photos) for split, photos in inputs.splits.items()},
        "removed": len(comparison.removed),
        "changed": len(comparison.changed),
        "superseded": hashlib.sha256(comparison.superseded.tobytes()).hexdigest()[:16],
    }


def write_changes(store: Store, settings: Settings, finished: Finished) -> None:
    """List the photos that are gone or have changed in OUT/changes.jsonl: {path, split, change, dropped}.

    The file is about the source, so it is not in the manifest, and each extension writes it again.
    """
    comparison, lines = finished.comparison, []
    for change, photos in (("removed", comparison.removed), ("changed", comparison.changed)):
        for photo in photos:
            row = {"path": comparison.name(photo), "split": photo[1], "change": change, "dropped": settings.drop}
            lines.append(json.dumps(row) + "\n")
    if lines:
        store.write(CHANGES, "".join(lines).encode())
    elif not (settings.drop and is_nothing_new(finished)) and store.size(CHANGES) is not None:
        store.remove(CHANGES)  # why not then: a repeated command finds the photos left out that the file lists


def describe_changes(where: str | None, removed: int, changed: int, *, dropped: bool) -> list[str]:
    """A line about photos of the set that are gone from the source or have changed; none if there are none.

    `where` is OUT if they are listed there.
    """
    if not removed and not changed:
        return []
    counts = [f"{n} {what}" for n, what in ((removed, "gone"), (changed, "changed")) if n]
    stay = "left out from this generation on" if dropped else "kept as they are; EXTEND=1 DROP=1 leaves them out"
    see = f"; see {where}/{CHANGES}" if where is not None else ""
    return [f"photos of the set in the source: {' and '.join(counts)}, {stay}{see}"]
