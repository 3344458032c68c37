"""The source for zip and tar archives of class folders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from resolute.errors import ResoluteError

from .archives.tar_members import is_compressed, open_tar
from .archives.zip_directory import zip_members
from .filesystem import common_root, file_name, open_file
from .image_ref import MAX_BYTES, PLAIN, ZIPPED, ImageRef, SourceTarget
from .look import Look
from .names import ignore_reason, is_image, other_file_kind, safe_relative_path
from .scan_cache import ScanResult, ScanRow, ScanWriter, Stop, cached_scan, scan_all

__all__ = ["ArchiveSource"]


class ArchiveSource:
    """One archive of class folders, or several that form one source: zip, tar, tar.gz, tar.bz2, tar.xz. A `Source`.

    Zips and plain tars are read in place; compressed tars, which have no random access, are unpacked once into one file
    in `scan_cache`. No path is ever derived from a member's name. Top-level folders that all images share are dropped
    from the names, except the innermost, which is the class. If no image of several archives is in a folder, each
    archive is a class with the name of its file (as in ImageNet's tar of tars). `look()` judges at the end of an
    iteration whether the top folders are classes.
    """

    numbered = False
    label_names: Sequence[str] | None = None
    target = SourceTarget()
    stamps: Sequence[str] = ()

    def __init__(self, paths: Sequence[str], scan_cache: Path, look: Callable[[], Look] | None = None) -> None:
        self.root = common_root(paths)
        self.ignored: Counter[str] = Counter()
        self.copies = any(map(is_compressed, paths))
        self.files, self._scan_cache, self._look = paths, scan_cache, look

    def __iter__(self) -> Iterator[ImageRef]:
        return self._images() if self._look is None else self._look().watch(self._images())

    def _images(self) -> Iterator[ImageRef]:
        self.ignored.clear()
        archives = scan_all(self._scan_cache, partial(_scan, self._scan_cache), self.files)
        self.stamps = [archive.stamp for archive in archives]
        for archive in archives:
            self.ignored.update(archive.ignored)
        top, flat = _common_top(archives)
        if flat and len(archives) > 1:
            for archive, path in zip(archives, self.files, strict=True):
                label = Path(file_name(path)).stem
                yield from (_image_ref(row, f"{label}/{row.name}", label, archive.data_path) for row in archive.rows())
            return
        for archive in archives:
            for row in archive.rows():
                name = row.name[len(top) :] if row.name.startswith(top) else row.name
                label, slash, _ = name.partition("/")
                if not slash:
                    self.ignored["outside class folders"] += 1
                    continue
                yield _image_ref(row, name, label, archive.data_path)


def _image_ref(row: ScanRow, name: str, label: str, data_path: str) -> ImageRef:
    return ImageRef(name, label, row.nbytes, data_path, row.offset, row.packed, row.size_bytes)


def _common_top(archives: Sequence[ScanResult]) -> tuple[str, bool]:
    """(folders above the class that all images share, each with its slash; whether no image is in a folder)."""
    shared: list[str] | None = None
    depth = 0
    for archive in archives:
        for row in archive.rows():
            folders = row.name.split("/")[:-1]
            if not folders:
                continue
            if shared is None:
                shared, depth = folders, len(folders)
            same = next((i for i, (a, b) in enumerate(zip(shared, folders, strict=False)) if a != b), None)
            shared = shared[: min(len(shared), len(folders)) if same is None else same]
            depth = min(depth, len(folders))
    if shared is None:
        return "", True
    return "".join(f"{folder}/" for folder in shared[: depth - 1]), False


def _scan(scan_cache: Path, path: str, stop: Stop) -> ScanResult:
    if file_name(path).lower().endswith(".zip"):
        return cached_scan(scan_cache, path, "zip", lambda out: _fill_from_zip(path, out), stop=stop)
    copies = is_compressed(path)
    return cached_scan(
        scan_cache, path, "tar of folders", lambda out: _fill_from_tar(path, out, copies), copies=copies, stop=stop
    )


def _fill_from_zip(path: str, out: ScanWriter) -> None:
    with open_file(path) as file:
        for member in zip_members(file):
            kind = "folder" if member.name.endswith("/") else "other" if member.is_link else "file"
            if (name := _image_name(member.name, kind, out)) is None:
                continue
            if member.encrypted:
                raise ResoluteError(
                    f"{path}: got an encrypted member {name}, expected an archive without a password; repack it "
                    "without one"
                )
            out.note(name, (), member.offset, member.packed_bytes, ZIPPED, member.size_bytes)


def _fill_from_tar(path: str, out: ScanWriter, copies: bool) -> None:
    with open_tar(path) as members:
        for member in members:
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
        out.ignored["unsafe names"] += 1
    elif reason := next(filter(None, map(ignore_reason, name.split("/"))), None):
        out.ignored[reason] += 1
    elif kind == "other":
        out.ignored["links and devices"] += 1
    elif not is_image(name):
        out.ignored[other_file_kind(name)] += 1
    else:
        return name
    return None
