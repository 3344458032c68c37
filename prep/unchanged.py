"""Recognises a finished set whose source has not changed, without DuckDB and compiled functions, which import slowly.

`source.json` holds the settings that a finished set was made with, and the signature of its source. If both are as they
are now and no file of the set is missing, there is nothing to do. In any other case, `build` finds out what there is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from resolute.errors import ResoluteError
from resolute.files import PARTIAL
from resolute.pipeline.dataset.manifest import VERSION
from resolute.pipeline.dataset.source_json import SOURCE_JSON
from resolute.pipeline.dataset.target import Target
from resolute.prep.listing.open_sources import open_sources
from resolute.prep.listing.wording import describe_target
from resolute.prep.shard_set.cards import CARD
from resolute.prep.shard_set.existing_set import DAMAGED, stored_manifest
from resolute.prep.shard_set.record import lost_files
from resolute.prep.shard_set.set_source import source_json_of, with_remembered
from resolute.prep.sources.signature import has_signature
from resolute.prep.sources.tables.group_column import parse_group
from resolute.prep.storage.output import RUN_FOLDER, Store, open_output

from .settings import Settings

__all__ = ["already_there", "source_signature", "unchanged_set"]


def unchanged_set(settings: Settings) -> dict[str, Any] | None:
    """The manifest of the set at OUT, if it is finished, whole, and what `settings` and the source would give again.

    After None, `build` has to find out; there may still be nothing to do.
    """
    if settings.rebuild or settings.extend:
        return None
    store = open_output(settings.out)
    try:
        record, manifest = json.loads(store.read(SOURCE_JSON)), stored_manifest(store)
        signature: dict[str, str] = record["signature"]
        if manifest is None or manifest["version"] != VERSION or not _is_whole(store, manifest, settings):
            return None
        settings = with_remembered(settings, store)
        is_same = json.loads(source_json_of(settings, signature)) == record and _is_current(settings, signature)
        return manifest if is_same else None
    # No set, a damaged one, or a source that cannot be read: `build` says what it is.
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ResoluteError):
        return None


def already_there(where: str, manifest: Mapping[str, Any]) -> str:
    """The line that says that there is nothing to do."""
    counts = ", ".join(f"{name} {info['samples']}" for name, info in manifest["splits"].items())
    return f"{where}: already there ({counts}; {describe_target(Target.from_manifest(manifest))}); nothing to do"


def source_signature(settings: Settings, sources: Mapping[str, str | None]) -> dict[str, str] | None:
    """The signatures of the `sources` and of the lists that settings name; None if that of a source is unknown, or that
    of the column of a table that says which photos belong together."""
    group = parse_group(settings.group)
    if group is not None and group.column is not None:
        return None
    known = {name: signature for name, signature in sources.items() if signature is not None}
    return {**known, **_lists(settings)} if len(known) == len(sources) else None


def _is_whole(store: Store, manifest: Mapping[str, Any], settings: Settings) -> bool:
    """Whether the set has all resolutions and files, and nothing is left over from a killed run."""
    if not {f"{res}" for res in settings.resolutions} <= set(manifest["resolutions"]) or store.names(RUN_FOLDER):
        return False
    names = set(store.names())
    if DAMAGED in names or CARD not in names or any(map(PARTIAL.fullmatch, names)):
        return False
    return not lost_files(store, {name: info["bytes"] for name, info in manifest["files"].items()})


def _is_current(settings: Settings, signature: Mapping[str, str]) -> bool:
    lists = _lists(settings)
    names = ["train", *(["val"] if settings.val_source is not None else [])]
    if signature.keys() != {*names, *lists} or not lists.items() <= signature.items():
        return False
    unused = Path()  # nothing has to be unpacked: what would be, is recognised by its files
    return all(has_signature(source, signature[name]) for name, source in open_sources(settings, unused))


def _lists(settings: Settings) -> dict[str, str]:
    """The hashes of the lists of classes, of validation photos and of groups."""
    group = parse_group(settings.group)
    paths = {
        "CLASSES": settings.classes,
        "VAL_LIST": settings.val_list,
        "GROUP": None if group is None else group.file,
    }
    return {
        name: hashlib.sha256(Path(path).read_bytes()).hexdigest() for name, path in paths.items() if path is not None
    }
