"""`source.json`: which arguments a shard set was made with, so that messages can suggest complete commands.

It lies beside the manifest but is no part of the set: the same photos give the same manifest wherever they lie. It
holds no credentials. A set without it (made by an earlier version) works as any other.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

from pipeline.errors import strip_credentials

__all__ = ["PATHS", "SOURCE_RECORD", "parse_record", "record_bytes", "repair_hint", "shards_command"]

SOURCE_RECORD = "source.json"
PATHS = frozenset({"SRC", "LABELS", "CLASSES", "VAL", "VAL_LIST"})  # recorded as absolute paths, or URLs
_FORMAT = "resolute-source-1"


def record_bytes(variables: Mapping[str, object]) -> bytes:
    """The file's content. `variables` of `make shards` by name, but OUT and RES; None is left out."""
    texts = {name: strip_credentials(str(value)) for name, value in variables.items() if value is not None}
    absolute = {name: _absolute(text) if name in PATHS else text for name, text in texts.items()}
    record = {"format": _FORMAT, "make": absolute, "sha256": _digest(absolute)}
    return (json.dumps(record, indent=1) + "\n").encode()


def parse_record(data: bytes | None) -> dict[str, str] | None:
    """The variables in the content of a `source.json`; None if there is none, or it is damaged."""
    try:
        record = json.loads(data or b"")
        variables: dict[str, str] = record["make"]
        is_sound = record["format"] == _FORMAT and record["sha256"] == _digest(variables) and variables["SRC"]
    except (ValueError, KeyError, TypeError):
        return None
    return variables if is_sound else None


def shards_command(
    root: str, resolutions: Iterable[int], record: Mapping[str, str] | None, *, rebuild: bool = False
) -> str:
    """The `make shards` that completes or repairs the set at `root` (px of all its resolutions), ready to be run.

    Where the source is not known, the text says which variables are to be added.
    """
    res = ",".join(map(str, sorted(set(resolutions))))
    variables = {"SRC": "", **(record or {}), "OUT": root} | ({"RES": res} if res else {})
    variables |= {"REBUILD": "1"} if rebuild else {}
    words = [f"{name}={shlex.quote(_shown(name, value))}" for name, value in variables.items() if value]
    unknown = "" if record else " with the SRC (and LABELS, VAL, QUALITY and so on) that it was made with"
    return f"`make shards {' '.join(words)}`{unknown}"


def repair_hint(root: str) -> str:
    """What to do about damage in the set at `root`."""
    return f"run `make verify SHARDS={shlex.quote(root)}`: it finds all damage and prints the command that repairs it"


def _digest(variables: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(variables, sort_keys=True).encode()).hexdigest()[:16]


def _absolute(path: str) -> str:
    path = path.removeprefix("file://")
    return path if "://" in path else os.path.abspath(path)  # noqa: PTH100  # why: a link stays a link


def _shown(name: str, value: str) -> str:
    """`value`, as short as it can be written from the folder that the user is in."""
    if name in PATHS and value.startswith("/"):
        here = str(Path.cwd()).rstrip("/") + "/"
        return value.removeprefix(here)
    return value
