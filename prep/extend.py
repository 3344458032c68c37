"""Plans an extension of a finished set (EXTEND=1): the photos that are new in the source become a new generation.

Photos that are gone from the source, or have changed, stay in the set as they are. They are counted, and listed in
OUT/changes.jsonl.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.format import rejects_name
from resolute.pipeline.dataset.manifest import info_files
from resolute.prep.convert.codecs import codec_versions
from resolute.prep.listing.compare import Comparison, compare
from resolute.prep.listing.groups import group_numbers
from resolute.prep.listing.inputs import COPIES, Inputs, copies_of
from resolute.prep.listing.photos import Photos
from resolute.prep.listing.splits import extend_splits
from resolute.prep.shard_set.existing_set import CHANGES, ExistingSet, describe_differences
from resolute.prep.shard_set.generation import GenerationSpec
from resolute.prep.shard_set.manifest import read_rejects
from resolute.prep.shard_set.set_photos import SetPhotos, photo_files
from resolute.prep.shard_set.set_source import is_other_source, read_source_json
from resolute.prep.storage.output import Store

from .settings import Settings

__all__ = [
    "check_extendable",
    "compare_with_set",
    "describe_changes",
    "extension_inputs",
    "extension_spec",
    "write_changes",
]

_AGAIN = "run the same command without EXTEND=1 (--extend)"


def check_extendable(store: Store, settings: Settings, existing: ExistingSet | None) -> ExistingSet:
    """The set to extend. Raises `ResoluteError` unless it is finished and sound, with the requested settings."""
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
    lost = existing.lost(store) - info_files(existing.manifest).keys()  # why: these are written again
    if existing.damaged or lost:
        what = f"{len(existing.damaged)} damaged files" if existing.damaged else f"{len(lost)} missing or cut files"
        raise ResoluteError(
            f"{store.where}: damaged, got {what}, expected a sound set to extend; repair it first: {_AGAIN}, with the "
            "photos that it was made from"
        )
    old, wanted = existing.newest.settings, settings.plan_settings()
    if old != wanted:
        differences = describe_differences({"settings": old}, {"settings": wanted})
        raise ResoluteError(
            f"{store.where}: EXTEND=1 cannot change settings, {differences}; undo the change, or choose another OUT"
        )
    return existing


def compare_with_set(store: Store, existing: ExistingSet, sources: Mapping[str, Photos], scratch: Path) -> Comparison:
    """Compare the photos of the set with the sources. Raises `ResoluteError` if the lists of its photos are lost."""
    _check_target(store, existing, sources["train"])
    database = sources["train"].database
    photos = SetPhotos.open(database, photo_files(store, existing.generations, scratch))
    newest, rejected = existing.newest.number, dict[tuple[str, int], str]()
    if existing.manifest is not None and rejects_name(newest) not in existing.damaged:
        with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            rejected = read_rejects(store, newest)
    return compare(database, photos.rows, sources, existing.newest.splits, rejected)


def extension_inputs(
    settings: Settings,
    existing: ExistingSet,
    sources: Mapping[str, Photos],
    ignored: Counter[str],
    comparison: Comparison,
) -> Inputs:
    """The photos to add, by split."""
    copies = copies_of(settings, sources)
    splits = extend_splits(
        sources["train"],
        comparison,
        generation=len(existing.generations),
        val=sources.get("val"),
        val_list=None if settings.val_list is None else Path(settings.val_list),
        val_frac=settings.held_out_frac,
        seed=settings.seed,
        copies=copies,
        drop=settings.duplicates == "drop",
        groups=group_numbers(sources),
    )
    new = sum(int((~known).sum()) for known in comparison.known.values())
    left_out = Counter({COPIES: new - sum(map(len, splits.values()))})
    for name, known in comparison.known.items() if settings.duplicates == "drop" else ():
        own = [split.positions for split in splits.values() if split.photos is sources[name]]
        known[:] = True  # why: copies that are left out are no photos to add
        known[np.concatenate(own)] = False
    return Inputs(splits=splits, sources=sources, ignored=ignored + left_out, copies=copies)


def _check_target(store: Store, existing: ExistingSet, train: Photos) -> None:
    """Raise `ResoluteError` unless the targets of the source are what those of the set are."""
    got, expected = train.target.to_json(), existing.newest.target
    if got != expected:
        raise ResoluteError(
            f"{store.where}: a set of other targets, {describe_differences({'target': expected}, {'target': got})}; "
            "correct the table, or set TARGET and COLUMNS"
        )


def extension_spec(
    settings: Settings, store: Store, existing: ExistingSet, inputs: Inputs, comparison: Comparison
) -> GenerationSpec:
    """The specification of the generation to add. Raises `ResoluteError` if the source is not that of the set."""
    previous, record = existing.newest, read_source_json(store)
    if is_other_source(record, settings) and comparison.removed:
        assert record is not None
        raise ResoluteError(
            f"{store.where}: a set of other photos, made from {record['SRC']}, got SRC={settings.src}, which lacks "
            f"{comparison.removed} of its photos, expected a source with the old photos and the new ones; correct "
            "SRC"
        )
    classes, known = list(inputs.classes), list(previous.classes)
    if classes[: len(known)] != known:
        at = next(i for i, name in enumerate(known) if classes[i : i + 1] != [name])
        got = repr(classes[at]) if at < len(classes) else "none"
        raise ResoluteError(
            f"{settings.classes or settings.src}: class {at} is another, got {got}, expected {known[at]!r} as in "
            f"{store.where}, since classes keep their numbers; add new classes at the end"
        )
    return GenerationSpec(
        number=previous.number + 1,
        previous=previous.hash,
        settings=settings.plan_settings(),
        classes=classes,
        target=previous.target,
        codecs=codec_versions(),
        source=inputs.summary(),
        images={split: len(inputs.splits[split]) for split in previous.splits},
        first_key={split: previous.split_keys(split).stop for split in previous.splits},
        first_shard={split: previous.shards(split).stop for split in previous.splits},
        removed=comparison.removed,
        changed=comparison.changed,
    )


def write_changes(store: Store, comparison: Comparison) -> None:
    """List the photos that are gone or have changed in OUT/changes.jsonl: {path, split, change}.

    The file is about the source, so it is not in the manifest, and each extension writes it again.
    """
    if comparison.removed or comparison.changed:
        with store.create(CHANGES) as file:
            for name, split, change in comparison.changes():
                file.write((json.dumps({"path": name, "split": split, "change": change}) + "\n").encode())
    elif store.size(CHANGES) is not None:
        store.remove(CHANGES)


def describe_changes(where: str | None, removed: int, changed: int) -> list[str]:
    """A line about photos of the set that are gone from the source or have changed; none if there are none.

    `where` is OUT if they are listed there.
    """
    if not removed and not changed:
        return []
    counts = [f"{n} {what}" for n, what in ((removed, "gone"), (changed, "changed")) if n]
    see = f"; see {where}/{CHANGES}" if where is not None else ""
    return [
        f"photos of the set in the source: {' and '.join(counts)}, kept as they are; REBUILD=1 (--rebuild) makes the "
        f"set anew without them{see}"
    ]
