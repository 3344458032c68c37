"""`source.json`: the arguments a shard set was made with, so that messages can suggest complete commands, and the state
of its source, so that prep recognises that there is nothing to do.

It lies beside the manifest but is not part of the set: the same photos give the same manifest wherever they are.
It contains no credentials, and is optional.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from resolute.errors import ResoluteError, as_typed, strip_credentials
from resolute.pipeline.storage.base import Files
from resolute.urls import local_path

__all__ = [
    "SOURCE_JSON",
    "missing_set_hint",
    "parse_source_json",
    "read_source_json",
    "repair_hint",
    "shards_command",
    "source_json_bytes",
]

SOURCE_JSON = "source.json"
_PATHS = frozenset({"SRC", "LABELS", "CLASSES", "VAL", "VAL_LABELS", "VAL_LIST"})  # recorded as absolute paths, or URLs
_FORMAT = "resolute-source-1"


def source_json_bytes(variables: Mapping[str, object], signature: Mapping[str, str] | None = None) -> bytes:
    """The file's content for the `make shards` variables (without OUT and RES); those that are None are left out.

    `signature` is the state of the source of a finished set.
    """
    texts = {name: strip_credentials(str(value)) for name, value in variables.items() if value is not None}
    absolute = {name: _absolute(text) if name in _PATHS else text for name, text in texts.items()}
    record: dict[str, object] = {"format": _FORMAT, "make": absolute, "sha256": _digest(absolute)}
    if signature is not None:
        record["signature"] = dict(signature)
    return (json.dumps(record, indent=1) + "\n").encode()


def parse_source_json(data: bytes | None) -> dict[str, str] | None:
    """The variables in the content of a `source.json`; None if it is missing or damaged."""
    try:
        record = json.loads(data or b"")
        variables: dict[str, str] = record["make"]
        is_valid = record["format"] == _FORMAT and record["sha256"] == _digest(variables) and variables["SRC"]
    except (ValueError, KeyError, TypeError):
        return None
    return variables if is_valid else None


def read_source_json(files: Files) -> dict[str, str] | None:
    """The arguments the set was made with, for messages; None if they are unknown or cannot be read."""
    try:
        return parse_source_json(files.local(SOURCE_JSON).read_bytes())
    except (OSError, ResoluteError):
        return None


def shards_command(
    root: str,
    resolutions: Iterable[int],
    record: Mapping[str, str] | None,
    *,
    rebuild: bool = False,
    extend: bool = False,
) -> str:
    """The command that completes or repairs the set at `root`; `resolutions`: all of the set, in px.

    If the source is unknown (`record` None), the text names the settings to add.
    """
    res = ",".join(map(str, sorted(set(resolutions))))
    variables = {"SRC": "", **(record or {}), "OUT": root} | ({"RES": res} if res else {})
    variables |= ({"REBUILD": "1"} if rebuild else {}) | ({"EXTEND": "1"} if extend else {})
    shown = {name: _shown(name, value) for name, value in variables.items() if value}
    unknown = "" if record else " with the SRC (and LABELS, VAL, QUALITY and so on) that it was made with"
    return as_typed("shards", shown) + unknown


def missing_set_hint(command: str, record: Mapping[str, str] | None) -> str:
    """The remedy if there is no finished set, for messages; `command` makes it if its source is recorded."""
    if record is None:  # why not `command`: the folder may be mistyped, or hold photos
        return f"correct the path, or make a set from photos: {as_typed('shards', {'src': 'photos', 'out': 'shards'})}"
    return f"run {command}"


def repair_hint(root: str) -> str:
    """The remedy for damage in the set at `root`, for messages."""
    return f"run {as_typed('verify', {'shards': root})}: it finds all damage and prints the command that repairs it"


def _digest(variables: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(variables, sort_keys=True).encode()).hexdigest()[:16]


def _absolute(path: str) -> str:
    folder = local_path(path)
    return path if folder is None else os.path.abspath(folder)  # noqa: PTH100  # why: keeps symbolic links


def _shown(name: str, value: str) -> str:
    """`value`, with paths below the current folder made relative."""
    if name in _PATHS and value.startswith("/"):
        here = str(Path.cwd()).rstrip("/") + "/"
        return value.removeprefix(here)
    return value
