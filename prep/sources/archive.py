"""The source for zip and tar archives of class folders."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from resolute.errors import ResoluteError
from resolute.pipeline.storage.cancel import CancelScope

from .archives.class_level import class_level
from .archives.tar_members import is_compressed, open_tar, stem
from .archives.zip_directory import SeveralVolumes, ZipMember, zip_members
from .filesystem import common_root, file_name, open_file, without_query
from .folders.folder_names import is_table
from .folders.look import Look
from .image_ref import MAX_BYTES, PLAIN, ZIPPED, ImageRef, Listing, SourceTarget
from .names import ignore_reason, is_image, other_file_kind, safe_relative_path
from .scan_cache import ScanResult, ScanRow, ScanWriter, cached_scan, scan_all
from .targets import AUTO, TargetSetting

__all__ = ["ArchiveSource"]

# What names that a scan keeps show (`ScanWriter.see`).
_TABLES, _BACKSLASHES, _ODD_BACKSLASHES = "tables", "backslashes read as folders", "other backslashes"
_ENCODING, _FILE_ENCODING = "unknown encoding of a folder", "unknown encoding of a file"
_MAX_TABLES, _TABLE_DEPTH = 100, 4
_LINES = 3  # of one kind that are printed


class ArchiveSource:
    """One archive of class folders, or several that form one source: zip, tar, tar.gz, tar.bz2, tar.xz. A `Source`.

    Zips and plain tars are read in place; compressed tars, which have no random access, are unpacked once into one file
    in `scan_cache`. No path is ever derived from a member's name. Top-level folders above the classes are dropped from
    the names: see `class_level`, with its `known`. If no image of several archives is in a folder, each archive is a
    class with the name of its file (as in ImageNet's tar of tars). Where an earlier archive holds an image of the same
    name, the archive's name is put in front. `look()` judges at the end of an iteration whether the top folders are
    classes; without it, they are. `setting` says what becomes of folders whose names are words for no label.
    `zip_names` is the encoding of names in zips that are not marked as UTF-8.
    """

    def __init__(
        self,
        paths: Sequence[str],
        scan_cache: Path,
        look: Callable[[], Look] | None = None,
        setting: TargetSetting = AUTO,
        *,
        known: Sequence[str] = (),
        zip_names: str | None = None,
    ) -> None:
        self.root = common_root(paths)
        self.listing = Listing()
        self.unpacks = any(map(is_compressed, paths))
        self.files, self._scan_cache, self._look, self._known = paths, scan_cache, look, known
        self._setting, self._zip_names = setting, zip_names

    def __iter__(self) -> Iterator[ImageRef]:
        return self._setting.with_class_folders(self._images(), self.root)

    def _images(self) -> Iterator[ImageRef]:
        self.listing = Listing()
        archives = scan_all(self._scan_cache, partial(_scan, self._scan_cache, self._zip_names), self.files)
        self.listing.stamps = [archive.stamp for archive in archives]
        self.listing.listed = sum(archive.listed for archive in archives)
        for archive in archives:
            self.listing.ignored.update(archive.ignored)
        inside = self._inside(archives)
        repeated, taken = _repeated(inside), set[int]()
        look = None if self._look is None else self._look()
        labels: set[str] = set()
        for file, images in zip(_short_names(self.files), inside, strict=True):
            if look is not None:
                for table in images.tables():
                    look.other_file(table)
            own = set[int]()
            for name, row in images:
                label, slash, _ = name.partition("/")
                if slash and self._setting.drops_folder(label):
                    self.listing.ignored["unlabelled"] += 1
                    continue
                if look is not None:
                    look.photo(name)
                if not slash:
                    self.listing.ignored["outside class folders"] += 1
                    continue
                labels.add(label)
                shown = name
                if repeated and (digest := _hash(name)) in repeated:
                    own.add(digest)
                    # why not in all: then names of a set would change when a further archive is added
                    shown = f"{file}/{name}" if digest in taken else name
                yield ImageRef(shown, label, row.nbytes, images.data_path, row.offset, row.stored_as, row.size_bytes)
            taken |= own
        self._check_names(archives, are_known=bool(labels) and labels.issubset(self._known))
        if look is not None:
            look.check()

    def _inside(self, archives: Sequence[ScanResult]) -> list[_Inside]:
        tops, note = class_level(
            self.root,
            [(file_name(path), archive.names) for path, archive in zip(self.files, archives, strict=True)],
            known=self._known,
            is_certain=self._look is None,
        )
        about = [] if note is None else [note]
        about += [
            f"{path}: backslashes in names are read as folders: {name}"
            for path, name in _seen(self.files, archives, _BACKSLASHES)
        ]
        warnings = [
            f"{path}: the name {name}; if it matters, set ZIP_NAMES to its encoding, such as ZIP_NAMES=gbk"
            for path, name in _seen(self.files, archives, _FILE_ENCODING)
        ]
        self.listing.target = SourceTarget(about=tuple(about[:_LINES]), warnings=tuple(warnings[:_LINES]))
        if tops is not None or len(archives) == 1:
            return [_Inside(archive, cut=top) for archive, top in zip(archives, tops or [""], strict=True)]
        # why the other stem: sets that were made before call n01.tar.gz n01.tar
        stems = [Path(file_name(path)).stem for path in self.files]
        labels = [old if old in self._known else stem(path) for old, path in zip(stems, self.files, strict=True)]
        return [_Inside(archive, front=f"{label}/") for archive, label in zip(archives, labels, strict=True)]

    def _check_names(self, archives: Sequence[ScanResult], *, are_known: bool) -> None:
        """Raise `ResoluteError` for photos whose names cannot be read with certainty."""
        for path, name in _seen(self.files, archives, _ENCODING):
            if not are_known:
                raise ResoluteError(
                    f"{path}: got the name {name}, expected UTF-8; set ZIP_NAMES to its encoding, such as "
                    "ZIP_NAMES=gbk, or ZIP_NAMES=cp437 to keep it as it is"
                )
        for path, name in _seen(self.files, archives, _ODD_BACKSLASHES):
            if self._look is not None:
                raise ResoluteError(
                    f"{path}: got the name {name} with a backslash, expected slashes between folders; repack it, or "
                    "set KIND=archive to leave out photos with such names"
                )


class _Inside:
    """The images of an archive, under their names without the folders `cut` and with `front` in front."""

    def __init__(self, archive: ScanResult, *, cut: str = "", front: str = "") -> None:
        self.data_path, self._archive, self._cut, self._front = archive.data_path, archive, cut, front

    def __iter__(self) -> Iterator[tuple[str, ScanRow]]:
        for row in self._archive.rows():
            yield self._name(row.name), row

    def tables(self) -> Iterator[str]:
        return map(self._name, self._archive.seen.get(_TABLES, ()))

    def _name(self, name: str) -> str:
        return f"{self._front}{name.removeprefix(self._cut)}"


def _seen(files: Sequence[str], archives: Sequence[ScanResult], what: str) -> Iterator[tuple[str, str]]:
    """Yield (path of an archive, a name in it that shows `what`)."""
    for path, archive in zip(files, archives, strict=True):
        yield from ((path, name) for name in archive.seen.get(what, ()))


def _short_names(paths: Sequence[str]) -> list[str]:
    """The names of the files, with their folders as far as they are needed to tell each from those before it."""
    names: dict[str, str] = {}
    for path in paths:
        parts = without_query(path).split("/")
        ends = ("/".join(parts[-n:]) for n in range(1, len(parts) + 1))
        names[next((end for end in ends if end not in names), path)] = path
    return list(names)


def _repeated(archives: Sequence[_Inside]) -> frozenset[int]:
    """The hashes of the names that are in several archives."""
    if len(archives) == 1:
        return frozenset()
    hashes = [np.unique(np.fromiter((_hash(name) for name, _ in archive), np.uint64)) for archive in archives]
    found, counts = np.unique(np.concatenate(hashes), return_counts=True)
    return frozenset(found[counts > 1].tolist())


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(os.fsencode(name), digest_size=8).digest(), "little")


def _scan(scan_cache: Path, zip_names: str | None, path: str, stop: CancelScope) -> ScanResult:
    if _is_zip(path):
        how = "zip" if zip_names is None else f"zip {zip_names}"
        return cached_scan(scan_cache, path, how, lambda out: _fill_from_zip(path, zip_names, out), stop=stop)
    unpacks = is_compressed(path)
    return cached_scan(
        scan_cache, path, "tar of folders", lambda out: _fill_from_tar(path, out, unpacks), unpacks=unpacks, stop=stop
    )


def _is_zip(path: str) -> bool:
    return file_name(path).lower().endswith(".zip")


def _fill_from_zip(path: str, zip_names: str | None, out: ScanWriter) -> None:
    with open_file(path) as file:
        try:
            for member in zip_members(file, zip_names):
                _add_from_zip(path, member, out)
        except SeveralVolumes:
            raise ResoluteError(
                f"{path}: got one of several volumes (.z01, .z02, …), expected the archive in one file; join them, as "
                "by `zip -s 0 volumes.zip --out joined.zip`, or unpack them"
            ) from None


def _add_from_zip(path: str, member: ZipMember, out: ScanWriter) -> None:
    if member.raw is not None and is_image(member.name) and not any(map(ignore_reason, member.name.split("/"))):
        folder, _, file = member.raw.rpartition(b"/")
        is_of_file = folder.isascii() and b"\\" not in file
        text = f"{member.name} in an unknown encoding, which is {_decodings(member.raw)}"
        out.see(_FILE_ENCODING if is_of_file else _ENCODING, text)
    is_folder = member.name.endswith("/")
    out.listed += not is_folder
    name = _image_name(member.name, "folder" if is_folder else "other" if member.is_link else "file", out)
    if name is None:
        return
    if member.encrypted:
        raise ResoluteError(
            f"{path}: got an encrypted member {name}, expected an archive without a password; repack it without one"
        )
    if member.method:
        raise ResoluteError(
            f"{path}: got {name} compressed by {member.method}, expected Deflate or no compression; unpack the "
            "archive, or repack it with Deflate"
        )
    if member.has_backslashes:
        out.see(_BACKSLASHES, name)
    out.note(name, (), member.offset, member.packed_bytes, ZIPPED, member.size_bytes)


def _decodings(raw: bytes) -> str:
    texts = []
    for codec in ("gbk", "shift_jis", "cp1252"):
        try:
            texts.append(f"{raw.decode(codec)} in {codec}")
        except UnicodeDecodeError:
            continue
    return ", ".join(texts) or "in none of gbk, shift_jis, cp1252"


def _fill_from_tar(path: str, out: ScanWriter, unpacks: bool) -> None:
    with open_tar(path) as members:
        for member in members:
            out.listed += member.kind != "folder"
            if (name := _image_name(member.name, member.kind, out)) is None:
                continue
            if unpacks and member.nbytes <= MAX_BYTES:
                out.add(name, (), member.read())
            else:  # why: too large for an image; it is listed, but never read, and becomes a reject
                out.note(name, (), member.offset, member.nbytes, PLAIN)


def _image_name(raw: str, kind: str, out: ScanWriter) -> str | None:
    """The safe name of an image; None for anything else, which is counted by its kind."""
    if kind == "folder":
        return None
    name = safe_relative_path(raw)
    if name is None:
        has_backslashes = "\\" in raw
        out.ignored["names with backslashes" if has_backslashes else "unsafe names"] += 1
        if has_backslashes and is_image(raw) and not any(map(ignore_reason, re.split(r"[/\\]", raw))):
            out.see(_ODD_BACKSLASHES, raw)
    elif reason := next(filter(None, map(ignore_reason, name.split("/"))), None):
        out.ignored[reason] += 1
    elif kind == "other":
        out.ignored["links and devices"] += 1
    elif not is_image(name):
        out.ignored[other_file_kind(name)] += 1
        if is_table(name) and name.count("/") < _TABLE_DEPTH:
            out.see(_TABLES, name, limit=_MAX_TABLES)
    else:
        return name
    return None
