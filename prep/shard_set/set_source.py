"""`source.json` of a set: the `make shards` variables that it was made with.

It lets commands name the complete command to repeat, and keeps REBUILD=1 from replacing a set of other photos.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

from resolute.console import say
from resolute.errors import ResoluteError
from resolute.pipeline.dataset.manifest import MANIFEST
from resolute.pipeline.dataset.source_json import SOURCE_JSON, parse_source_json, shards_command, source_json_bytes
from resolute.prep.settings import JobsPlanOptions, Settings
from resolute.prep.storage.output import Store, read_present

from .existing_set import ExistingSet
from .record import record_names

__all__ = [
    "check_replaced_source",
    "is_other_source",
    "missing_source_error",
    "read_source_json",
    "rerun_command",
    "source_json_of",
    "variables_of",
    "with_remembered",
    "write_source_json",
]

_OF_A_RUN = frozenset({"src", "out", "res", "rebuild", "extend"})  # settings that are not those of the set's contents


def write_source_json(store: Store, variables: Mapping[str, str], signature: Mapping[str, str] | None = None) -> None:
    """Record `variables_of` the set at `store`, and the signature of its source once it is finished.

    Raises `ResoluteError` if it cannot be written.
    """
    data = source_json_bytes(variables, signature)
    if read_present(store, SOURCE_JSON) != data:
        store.write(SOURCE_JSON, data)


def variables_of(settings: Settings) -> dict[str, str]:
    """The `make shards` variables of a set with these settings, except OUT and RES, without credentials."""
    variables = parse_source_json(source_json_of(settings))
    assert variables is not None
    return variables


def with_remembered(settings: Settings, store: Store) -> Settings:
    """`settings` with the MAX_BAD that the set at `store` was made with, unless they have one or replace the set."""
    is_there = store.size(MANIFEST) is not None or bool(record_names(store))
    if settings.max_bad is not None or settings.rebuild or not is_there:
        return settings
    max_bad = (read_source_json(store) or {}).get("MAX_BAD")
    return settings if max_bad is None else replace(settings, max_bad=float(max_bad))


def source_json_of(settings: Settings, signature: Mapping[str, str] | None = None) -> bytes:
    """The content of the record of a set with these settings."""
    defaults = Settings(src="-", out="-", res=settings.res)
    variables: dict[str, object] = {"SRC": settings.src}
    for field in fields(JobsPlanOptions):
        value = getattr(settings, field.name)
        if field.name not in _OF_A_RUN and value != getattr(defaults, field.name):
            variables[field.name.upper()] = value
    return source_json_bytes(variables, signature)


def read_source_json(store: Store) -> dict[str, str] | None:
    """The `make shards` variables that the set was made with, except OUT and RES; None if they are not recorded."""
    return parse_source_json(read_present(store, SOURCE_JSON))


def is_other_source(record: Mapping[str, str] | None, settings: Settings) -> bool:
    """Whether a set with this record was made from another SRC than `settings`; False if that is unknown."""
    if record is None:
        return False
    return os.path.realpath(record["SRC"]) != os.path.realpath(variables_of(settings)["SRC"])


def check_replaced_source(store: Store, settings: Settings, existing: ExistingSet, source: Mapping[str, Any]) -> None:
    """Raise `ResoluteError` if a rebuild would replace a finished set of other photos.

    `source` is that of the new plan; the same photos at another path count as the same. If the old set has no record of
    its source, a line on stderr names what is replaced.
    """
    photos = existing.source.get("classes")  # why not all of it: extensions have split them otherwise
    if photos == source["classes"] or not (store.size(MANIFEST) or store.size("index/train.npy")):
        return  # why the index: it is there if the manifest of a finished set was deleted
    record = read_source_json(store)
    if is_other_source(record, settings):
        assert record is not None
        raise ResoluteError(
            f"{store.where}: REBUILD=1 would replace the set of {record['SRC']}, got SRC={settings.src}, expected the "
            "same SRC; choose another OUT, or delete that set first if it is no longer needed"
        )
    if record is None:
        classes, images = existing.classes, existing.source.get("images", "?")
        names_text = ", ".join(map(str, classes[:3])) + (", …" if len(classes) > 3 else "")
        what = f"{images} images, {len(classes)} classes ({names_text})"
        say(f"{store.where}: replacing a set of {what}")


def missing_source_error(store: Store, resolutions: tuple[int, ...] = (), *, extend: bool = False) -> ResoluteError:
    """The error for a command without SRC; it names the complete command if the set at `store` records its source.

    `resolutions` (px) are the requested ones; those of the set are added.
    """
    record = read_source_json(store)
    if record is None:
        return ResoluteError(
            "SRC: got none, expected the photos (a folder, a list, an archive, a URL); set SRC=photos (--src)"
        )
    command = rerun_command(store, resolutions, extend=extend)
    return ResoluteError(f"SRC: got none, but {store.where} was made from {record['SRC']}; run {command}")


def rerun_command(store: Store, resolutions: Iterable[int] = (), *, rebuild: bool = False, extend: bool = False) -> str:
    """The command that made the set at `store`, with its resolutions (px) and `resolutions`."""
    stored = [int(name) for name in store.folders() if name.isdecimal()]
    return shards_command(store.where, {*stored, *resolutions}, read_source_json(store), rebuild=rebuild, extend=extend)
