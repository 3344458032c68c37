"""The source for zip and tar archives of class folders."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from resolute.errors import ResoluteError

from .archives.class_level import class_level
from .archives.tar_members import COMPRESSED, is_compressed, open_tar
from .archives.zip_directory import SeveralVolumes, ZipMember, zip_members
from .filesystem import common_root, file_name, open_file, without_query
from .image_ref import MAX_BYTES, PLAIN, ZIPPED, ImageRef, SourceTarget
from .look import Look
from .names import ignore_reason, is_image, other_file_kind, safe_relative_path
from .scan_cache import ScanResult, ScanRow, ScanWriter, Stop, cached_scan, scan_all
from .targets import AUTO, TargetSetting

__all__ = ["ArchiveSource"]


class ArchiveSource:
    """One archive of class folders, or several that form one source: zip, tar, tar.gz, tar.bz2, tar.xz. A `Source`.

    Zips and plain tars are read in place; compressed tars, which have no random access, are unpacked once into one file
    in `scan_cache`. No path is ever derived from a member's name. Top-level folders above the classes are dropped from
    the names: see `class_level`, with its `known`. If no image of several archives is in a folder, each archive is a
    class with the name of its file (as in ImageNet's tar of tars). Names that several archives hold begin with the
    archive's name. `look()` judges at the end of an iteration whether the top folders are classes; without it, they
    are. `setting` says what becomes of folders whose names are words for no label. `zip_names` is the encoding of names
    in zips that are not marked as UTF-8.
    """

    numbered = False
    label_names: Sequence[str] | None = None
    stamps: Sequence[str] = ()

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
        self.ignored: Counter[str] = Counter()
        self.listed = 0
        self.copies = any(map(is_compressed, paths))
        self.target = SourceTarget()
        self.files, self._scan_cache, self._look, self._known = paths, scan_cache, look, known
        self._setting, self._zip_names = setting, zip_names

    def __iter__(self) -> Iterator[ImageRef]:
        return self._setting.with_class_folders(self._images(), self.root)

    def _images(self) -> Iterator[ImageRef]:
        self.ignored.clear()
        archives = scan_all(self._scan_cache, partial(_scan, self._scan_cache, self._zip_names), self.files)
        self.stamps = [archive.stamp for archive in archives]
        self.listed = sum(archive.listed for archive in archives)
        for archive in archives:
            self.ignored.update(archive.ignored)
        inside = self._inside(archives)
        repeated = _repeated(inside)
        look = None if self._look is None else self._look()
        for file, images in zip(_short_names(self.files), inside, strict=True):
            for name, row in images:
                label, slash, _ = name.partition("/")
                if not slash:
                    self.ignored["outside class folders"] += 1
                    continue
                if self._setting.drops_folder(label):
                    self.ignored["unlabelled"] += 1
                    continue
                if look is not None:
                    look.photo(name)
                shown = f"{file}/{name}" if repeated and _hash(name) in repeated else name
                yield ImageRef(shown, label, row.nbytes, images.data_path, row.offset, row.packed, row.size_bytes)
        if look is not None:
            look.check()

    def _inside(self, archives: Sequence[ScanResult]) -> list[_Inside]:
        tops, note = class_level(
            self.root,
            [(file_name(path), archive.names) for path, archive in zip(self.files, archives, strict=True)],
            known=self._known,
            is_certain=self._look is None,
        )
        notes = [line for archive in archives for line in archive.notes][:3]
        self.target = SourceTarget(about=(*notes, *([] if note is None else [note])))
        if tops is not None or len(archives) == 1:
            return [_Inside(archive, cut=top) for archive, top in zip(archives, tops or [""], strict=True)]
        # why the other stem: sets that were made before call n01.tar.gz n01.tar
        stems = [Path(file_name(path)).stem for path in self.files]
        labels = [old if old in self._known else _stem(path) for old, path in zip(stems, self.files, strict=True)]
        return [_Inside(archive, front=f"{label}/") for archive, label in zip(archives, labels, strict=True)]


class _Inside:
    """The images of an archive, under their names without the folders `cut` and with `front` in front."""

    def __init__(self, archive: ScanResult, *, cut: str = "", front: str = "") -> None:
        self.data_path, self._archive, self._cut, self._front = archive.data_path, archive, cut, front

    def __iter__(self) -> Iterator[tuple[str, ScanRow]]:
        for row in self._archive.rows():
            yield f"{self._front}{row.name.removeprefix(self._cut)}", row


def _stem(path: str) -> str:
    """The name of an archive without its suffix, which may be a compound one."""
    name = file_name(path)
    suffix = next(suffix for suffix in (*COMPRESSED, ".tar", ".zip", "") if name.lower().endswith(suffix))
    return name[: len(name) - len(suffix)]


def _short_names(paths: Sequence[str]) -> list[str]:
    """The names of the files, with their folders as far as they are needed to tell them apart."""
    parts = [without_query(path).split("/") for path in paths]
    length = next(
        (n for n in range(1, max(map(len, parts))) if len({*("/".join(each[-n:]) for each in parts)}) == len(parts)), 1
    )
    return ["/".join(each[-length:]) for each in parts]


def _repeated(archives: Sequence[_Inside]) -> frozenset[int]:
    """The hashes of the names that are in several archives."""
    if len(archives) == 1:
        return frozenset()
    hashes = [np.unique(np.fromiter((_hash(name) for name, _ in archive), np.uint64)) for archive in archives]
    found, counts = np.unique(np.concatenate(hashes), return_counts=True)
    return frozenset(found[counts > 1].tolist())


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(os.fsencode(name), digest_size=8).digest(), "little")


def _scan(scan_cache: Path, zip_names: str | None, path: str, stop: Stop) -> ScanResult:
    if _is_zip(path):
        how = "zip" if zip_names is None else f"zip {zip_names}"
        return cached_scan(scan_cache, path, how, lambda out: _fill_from_zip(path, zip_names, out), stop=stop)
    copies = is_compressed(path)
    return cached_scan(
        scan_cache, path, "tar of folders", lambda out: _fill_from_tar(path, out, copies), copies=copies, stop=stop
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
        raise ResoluteError(
            f"{path}: got the name {member.name} in an unknown encoding, which is {_decodings(member.raw)}, expected "
            "UTF-8; set ZIP_NAMES to its encoding, such as ZIP_NAMES=gbk, or ZIP_NAMES=cp437 to keep it as it is"
        )
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
    if member.has_backslashes and not out.notes:
        out.notes.append(f"{path}: backslashes in names are read as folders: {name}")
    out.note(name, (), member.offset, member.packed_bytes, ZIPPED, member.size_bytes)


def _decodings(raw: bytes) -> str:
    texts = []
    for codec in ("gbk", "shift_jis", "cp1252"):
        try:
            texts.append(f"{raw.decode(codec)} in {codec}")
        except UnicodeDecodeError:
            continue
    return ", ".join(texts) or "in none of gbk, shift_jis, cp1252"


def _fill_from_tar(path: str, out: ScanWriter, copies: bool) -> None:
    with open_tar(path) as members:
        for member in members:
            out.listed += member.kind != "folder"
            if (name := _image_name(member.name, member.kind, out)) is None:
                continue
            if copies and member.nbytes <= MAX_BYTES:
                out.add(name, (), member.read())
            else:  # why: too large for an image; it is listed, but never read, and becomes a reject
                out.note(name, (), member.offset, member.nbytes, PLAIN)


def _image_name(raw: str, kind: str, out: ScanWriter) -> str | None:
    """The safe name of an image; None for anything else, which is counted by its kind."""
    if kind == "folder":
        return None
    name = safe_relative_path(raw)
    if name is None:
        out.ignored["names with backslashes" if "\\" in raw else "unsafe names"] += 1
    elif reason := next(filter(None, map(ignore_reason, name.split("/"))), None):
        out.ignored[reason] += 1
    elif kind == "other":
        out.ignored["links and devices"] += 1
    elif not is_image(name):
        out.ignored[other_file_kind(name)] += 1
    else:
        return name
    return None
