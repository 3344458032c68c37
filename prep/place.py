"""What is at OUT already, and may we write there?"""

from __future__ import annotations

import fcntl
import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.errors import ResoluteError
from pipeline.shards import FORMAT, VERSION

from .writer import sync_folder, writing

__all__ = ["MANIFEST", "UNFINISHED", "claimed", "finish", "is_there", "remove_stale"]

MANIFEST = "manifest.json"
UNFINISHED = "unfinished"  # lies in OUT while a run is under way; says that what is there is ours
_OURS = re.compile(
    r"\d+/((train|val)-\d{6}\.(tar|idx)|_info\.json)(\.part)?"
    r"|index/(train|val)(-\d+\.npy|\.npy|\.sources\.jsonl)(\.part)?"
    r"|(rejects\.jsonl|_info\.json|manifest\.json)\.part|rejects\.jsonl|_info\.json"
)


def is_there(out: Path, wanted: Mapping[str, Any], *, rebuild: bool) -> dict[str, Any] | None:
    """The manifest at `out` if a finished set of exactly these settings and sources is there, else None.

    `wanted` holds the manifest's `settings` and `source` as they would be. Raises `ResoluteError` if
    something else is at `out`: another set (unless `rebuild`), a damaged one, or files that are not ours.
    """
    path = out / MANIFEST
    if not path.exists():
        _refuse_foreign(out)
        return None
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
        ours, version = found["format"] == FORMAT, found["version"]
    except (OSError, ValueError, KeyError, TypeError):
        ours, version = False, None
    if not ours:
        raise ResoluteError(
            f"{path}: not a shard set's, got another program's file or a damaged one, expected a {FORMAT} "
            "manifest or an empty folder; choose another OUT, or delete it yourself"
        )
    if rebuild:
        return None
    differences = [("version", version, VERSION)]
    if version == VERSION:
        old, new = found["settings"], wanted["settings"]
        differences = [(name, old.get(name), new.get(name)) for name in sorted({*old, *new})]
        old, new = found["source"], wanted["source"]
        differences += [(f"source {name}", old.get(name), new.get(name)) for name in sorted(new)]
    for name, got, expected in differences:
        if got != expected:
            raise ResoluteError(
                f"{path}: a finished set of another kind, got {name} {_short(got)}, "
                f"expected {_short(expected)}; rebuild it with REBUILD=1 (--rebuild) or choose another OUT"
            )
    for name, info in found["files"].items():
        file = out / name
        size = file.stat().st_size if file.exists() else None
        if size != info["bytes"]:
            got = "nothing there" if size is None else f"{size} bytes"
            raise ResoluteError(
                f"{file}: damaged set, got {got}, expected {info['bytes']} bytes; "
                "rebuild it with REBUILD=1 (--rebuild)"
            )
    return found


@contextmanager
def claimed(out: Path, resolutions: Collection[int]) -> Iterator[None]:
    """Make `out` ours for the block: folders made, marked as unfinished, manifest gone, nobody else writing.

    The mark stays unless `finish` is called: it says that what lies there is ours to replace.
    """
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        mark = (out / UNFINISHED).open("w")
    with mark:
        try:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ResoluteError(
                f"{out}: another prep is writing there, expected to be alone; wait for it or choose another OUT"
            ) from None
        except OSError:
            pass  # why: some network disks know no locks; they did without one so far
        with writing(out):
            mark.write("prep is writing here, or was stopped; run the same command again\n")
            mark.flush()
            sync_folder(out)
            (out / MANIFEST).unlink(missing_ok=True)
            for folder in ["index", *map(str, resolutions)]:
                (out / folder).mkdir(exist_ok=True)
        yield


def finish(out: Path) -> None:
    """Take the mark away; the manifest is there."""
    with writing(out):
        (out / UNFINISHED).unlink()


def remove_stale(out: Path, keep: Collection[str]) -> None:
    """Delete files of earlier attempts that are not in `keep` (paths relative to `out`); nothing else."""
    with writing(out):
        for folder in sorted(path for path in out.iterdir() if path.is_dir()):
            for path in sorted(folder.iterdir()):
                name = f"{folder.name}/{path.name}"
                if name not in keep and _OURS.fullmatch(name):
                    path.unlink()
            if folder.name.isdecimal() and not any(folder.iterdir()):
                folder.rmdir()
        for path in sorted(out.iterdir()):
            if path.name not in keep and _OURS.fullmatch(path.name):
                path.unlink()


def _refuse_foreign(out: Path) -> None:
    if not out.exists():
        return
    if not out.is_dir():
        raise ResoluteError(f"{out}: in the way, got a file, expected a folder; choose another OUT")
    names = sorted(path.name for path in out.iterdir())
    if names and UNFINISHED not in names:
        raise ResoluteError(
            f"{out}: not empty and not ours, got {len(names)} entries such as {names[0]}, expected an empty "
            "or new folder; choose another OUT"
        )


def _short(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= 40 else text[:13] + '…"'
