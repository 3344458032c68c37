"""Cached result of scanning a source file, so that the next run need not scan it again.

There are three files per version of a source file: NAME.rows, one JSON array per line for each image; NAME.blob,
the images' bytes if the source itself has no random access; NAME.json, written last, which identifies the scanned file.
Each appears complete; without NAME.json nothing is used. Partial files of a killed run are deleted before a new scan.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from resolute.errors import Interrupted, ResoluteError
from resolute.files import atomic_file, atomic_write, delete_partial, write_errors
from resolute.pipeline.storage.cancel import CancelScope
from resolute.pipeline.storage.obstore_client import requests_within
from resolute.pipeline.storage.threads import DaemonPool
from resolute.urls import is_url, without_credentials

from .filesystem import common_root, file_name, version_stamp
from .image_ref import PLAIN, ImageRef, Listing
from .names import refuse_split_names
from .targets import AUTO, Cell, Targets, TargetSetting

__all__ = [
    "ScanResult",
    "ScanRow",
    "ScanWriter",
    "ScannedSource",
    "cached_scan",
    "delete_old_versions",
    "scan_all",
    "scans_at_once",
]

_VERSION = 6


class ScanRow(NamedTuple):
    """An image: as `ImageRef`, but with the cells of its target (none: it has no target), and its container is the
    source file or the blob.
    """

    name: str
    cells: Sequence[Cell]
    offset: int
    nbytes: int
    stored_as: int
    size_bytes: int


class ScanResult(NamedTuple):
    """The scan of one source file; `data_path` is the file that holds the bytes: the source itself or the blob.

    `stamp` is the state of the source file, "" if it is unknown; `columns` are the names of the columns of targets.
    `listed` is as in `Listing`; `seen` are names by what they show, as in `ScanWriter.see`.
    """

    data_path: str
    rows_file: Path
    stamp: str
    ignored: Counter[str]
    label_names: list[str] | None
    columns: list[str]
    listed: int
    seen: dict[str, list[str]]

    def names(self) -> Iterator[str]:
        return (row.name for row in self.rows())

    def rows(self) -> Iterator[ScanRow]:
        with self.rows_file.open(encoding="ascii") as lines:
            for line in lines:
                yield ScanRow(*json.loads(line))


class ScanWriter:
    """Collects the images of a source file during a scan; passed to `fill` by `cached_scan`.

    `listed` and `ignored` are as in `Listing`, but without what the targets decide.
    """

    def __init__(self, stop: CancelScope, where: Path, rows: BinaryIO, blob: BinaryIO) -> None:
        self._where, self._rows, self._blob, self._stop = where, rows, blob, stop
        self.rows_bytes = self.blob_bytes = 0
        self.ignored: Counter[str] = Counter()
        self.label_names: list[str] | None = None
        self.columns: list[str] = []
        self.listed = 0
        self.seen: dict[str, list[str]] = {}

    def note(
        self, name: str, cells: Sequence[Cell], offset: int, nbytes: int, stored_as: int = PLAIN, size_bytes: int = -1
    ) -> None:
        """Add an image that stays where it is: `nbytes` from `offset`. Raises `Interrupted` if the scan is stopped."""
        if self._stop.cancelled():
            raise Interrupted(f"{self._where}: its scan was stopped")
        row = ScanRow(name, cells, offset, nbytes, stored_as, nbytes if size_bytes < 0 else size_bytes)
        line = json.dumps(row).encode("ascii") + b"\n"  # why JSON: its escapes preserve names that are not valid text
        with write_errors(self._where):
            self._rows.write(line)
        self.rows_bytes += len(line)

    def see(self, what: str, name: str, limit: int = 1) -> None:
        """Keep `name`, which shows `what`; at most `limit` names."""
        names = self.seen.setdefault(what, [])
        if len(names) < limit:
            names.append(name)

    def add(self, name: str, cells: Sequence[Cell], data: bytes) -> None:
        """Add an image whose bytes are copied to the blob."""
        self.note(name, cells, self.copy(data), len(data))

    def copy(self, data: bytes) -> int:
        """Copy an image to the blob; returns its offset there."""
        with write_errors(self._where):
            self._blob.write(data)
        self.blob_bytes += len(data)
        return self.blob_bytes - len(data)


def scans_at_once(paths: Sequence[str]) -> int:
    """Source files that are scanned at a time: enough to hide a store's delays, few enough for memory."""
    return 48 if is_url(paths[0]) else 8


def scan_all(folder: Path, scan: Callable[[str, CancelScope], ScanResult], paths: Sequence[str]) -> list[ScanResult]:
    """`scan(path, stop)` of each of `paths`, several at a time. Raises the first error, in that order.

    First deletes what killed scans have left in the cache `folder`.
    """
    stop = CancelScope()
    with write_errors(folder):
        delete_partial(folder)
    if len(paths) == 1:
        return [scan(paths[0], stop)]

    def scan_within(path: str) -> ScanResult:
        with requests_within(stop):
            return scan(path, stop)

    # why not `thread_map`: a Ctrl-C would wait until the scans that are under way have ended
    with DaemonPool(min(scans_at_once(paths), len(paths)), name="resolute-scan", cancel=stop.cancel) as pool:
        scans = [pool.submit(partial(scan_within, path)) for path in paths]
        return [each.result() for each in scans]


def cached_scan(
    folder: Path,
    path: str,
    how: str,
    fill: Callable[[ScanWriter], None],
    *,
    unpacks: bool = False,
    stop: CancelScope | None = None,
) -> ScanResult:
    """The scan of the file `path` by `fill`: from the cache if neither the file nor `how` has changed, else a new one.

    `unpacks`: the images' bytes are in the blob. `stop` ends the scan once it is cancelled. Several threads may scan
    different files. Raises the errors of `fill`, and `ResoluteError` if the disk refuses; partial results are never
    used.
    """
    absolute = without_credentials(path) if is_url(path) else os.path.abspath(path)  # noqa: PTH100
    stem = re.sub(r"[^A-Za-z0-9._-]", "_", file_name(absolute.rstrip("/")))[:60]
    stamp = version_stamp(path)
    # why the stamp: a plan for jobs may still refer to the blob of an older version
    for part in (f"{absolute}\0{how}", stamp):
        stem += "-" + hashlib.sha256(os.fsencode(part)).hexdigest()[:16]
    rows, blob, about = (folder / f"{stem}.{kind}" for kind in ("rows", "blob", "json"))
    identity: dict[str, Any] = {"version": _VERSION, "path": absolute, "how": how, "stamp": stamp}
    if not unpacks and not is_url(path):  # why: a file that replaces it may have its size and mtime
        identity["ctime"] = os.stat(path).st_ctime_ns  # noqa: PTH116
    info = _usable(rows, blob, about, identity)
    if info is None:
        with write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            about.unlink(missing_ok=True)
        info = identity | _fill(rows, blob, fill, stop or CancelScope())
        with write_errors(about):
            atomic_write(about, json.dumps(info).encode("ascii"))
    data_path = str(blob) if unpacks else path
    return ScanResult(
        data_path=data_path,
        rows_file=rows,
        stamp=stamp,
        ignored=Counter(info["ignored"]),
        label_names=info["label_names"],
        columns=info["columns"],
        listed=info["listed"],
        seen=info["seen"],
    )


def delete_old_versions(folder: Path, paths: Collection[str]) -> None:
    """Delete from the cache `folder` other versions of the blobs that are among `paths`."""
    names = {Path(path).name for path in paths}
    files = {name.rpartition("-")[0] for name in names}
    for blob in folder.glob("*.blob"):
        if blob.name not in names and blob.name.rpartition("-")[0] in files:
            with write_errors(blob):
                blob.unlink()


def _usable(rows: Path, blob: Path, about: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    try:
        info: dict[str, Any] = json.loads(about.read_bytes())
        complete = (rows.stat().st_size, blob.stat().st_size) == (info["rows_bytes"], info["blob_bytes"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return info if complete and identity["stamp"] and identity.items() <= info.items() else None


def _fill(rows: Path, blob: Path, fill: Callable[[ScanWriter], None], stop: CancelScope) -> dict[str, Any]:
    # why around `fill` too: errors of its source are `ResoluteError`s already, and pass
    with write_errors(blob), ExitStack() as stack:
        out = ScanWriter(stop, blob, *(stack.enter_context(atomic_file(path)) for path in (rows, blob)))
        fill(out)
    return {
        "rows_bytes": out.rows_bytes,
        "blob_bytes": out.blob_bytes,
        "ignored": dict(out.ignored),
        "label_names": out.label_names,
        "columns": out.columns,
        "listed": out.listed,
        "seen": out.seen,
    }


class ScannedSource(ABC):
    """Base class of a `Source` of files that are scanned once each; `numbered` if all labels are integers."""

    def __init__(
        self,
        paths: Sequence[str],
        scan_cache: Path,
        *,
        unpacks: bool,
        setting: TargetSetting = AUTO,
        note: str | None = None,
    ) -> None:
        self.root = common_root(paths)
        self.listing = Listing()
        self.unpacks = unpacks
        self.files, self._scan_cache, self._setting, self._note = paths, scan_cache, setting, note
        _check_file_names(self.root, paths)

    def __iter__(self) -> Iterator[ImageRef]:
        self.listing = listing = Listing()
        scans = scan_all(self._scan_cache, self._scan, self.files)
        listing.stamps = [scan.stamp for scan in scans]
        listing.listed = sum(scan.listed for scan in scans)
        for path, scan in zip(self.files, scans, strict=True):
            listing.ignored.update(scan.ignored)
            if scan.label_names != scans[0].label_names:
                raise ResoluteError(
                    f"{path}: class names differ from {self.files[0]}, got {scan.label_names}, expected "
                    f"{scans[0].label_names}; prepare the files separately"
                )
        listing.label_names = scans[0].label_names
        targets = Targets(self.root, scans[0].columns, self._setting, is_text=False)
        for scan in scans:
            for row in scan.rows():
                if row.cells:
                    targets.add(row.name, tuple(row.cells), row.name)
        meaning = targets.meaning()
        listing.numbered = meaning.numbered
        listing.target = meaning.source_target(listing.label_names)
        if self._note is not None:
            listing.target = replace(listing.target, about=(self._note, *listing.target.about))
        for scan in scans:
            for row in scan.rows():
                label = meaning.label(tuple(row.cells), row.name) if row.cells else None
                if self._setting.is_dropped(label, self.root, row.name, several_words=listing.target.several_words):
                    listing.ignored["unlabelled"] += 1
                    continue
                assert label is not None
                yield ImageRef(row.name, label, row.nbytes, scan.data_path, row.offset)

    @abstractmethod
    def _scan(self, path: str, stop: CancelScope) -> ScanResult:
        """The cached scan of the file `path`, until `stop`."""


def _check_file_names(src: str, paths: Sequence[str]) -> None:
    """Raise `ResoluteError` for files of several splits or with equal names, which image names start with."""
    names = [file_name(path) for path in paths]
    refuse_split_names(src, names)
    (name, count), *_ = Counter(names).most_common(1)
    if count > 1:
        raise ResoluteError(
            f"{src}: duplicate file names, got {count} files named {name}, expected different names; rename them"
        )
