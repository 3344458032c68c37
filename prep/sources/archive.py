"""The source that reads a zip or tar of class folders, or several of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.errors import ResoluteError

from .filesystem import file_name, opened
from .image_ref import MAX_BYTES, PLAIN, ZIPPED, Found
from .names import is_image, kind_of_other, refuse_split_names, safe, why_ignored
from .scan_cache import Row, Spooled, SpoolWriter, spooled
from .tar_members import is_compressed, open_tar
from .zip_directory import zip_members

__all__ = ["Archives"]


class Archives:
    """One archive of class folders, or several that make up one: zip, tar, tar.gz, tar.bz2, tar.xz. A `Source`.

    Zips and plain tars are read in place; compressed tars, which have no random access, are unpacked once into
    one file in `spool`. Nothing is ever written by a member's name. Folders at the top that all images share
    are dropped from the names, but never the last one, the class. Where no image of several archives lies in a
    folder, each archive is a class named like its file (ImageNet's tar of tars).
    """

    numbered = False
    label_names: Sequence[str] | None = None

    def __init__(self, paths: Sequence[str], spool: Path) -> None:
        self.root = paths[0] if len(paths) == 1 else paths[0].rpartition("/")[0] or "."
        self.ignored: Counter[str] = Counter()
        self.copies = any(map(is_compressed, paths))
        self._paths, self._spool = paths, spool

    def __iter__(self) -> Iterator[Found]:
        self.ignored.clear()
        archives = [_look_through(path, self._spool) for path in self._paths]
        for archive in archives:
            self.ignored.update(archive.ignored)
        top, flat = _shape(archives)
        if flat and len(archives) > 1:
            for archive, path in zip(archives, self._paths, strict=True):
                label = Path(file_name(path)).stem
                yield from (_found(row, f"{label}/{row.name}", label, archive.place) for row in archive.rows())
            return
        labels: set[str] = set()
        for archive in archives:
            for row in archive.rows():
                name = row.name[len(top) :] if row.name.startswith(top) else row.name
                label, slash, _ = name.partition("/")
                if not slash:
                    self.ignored["outside class folders"] += 1
                    continue
                labels.add(label)
                yield _found(row, name, label, archive.place)
        refuse_split_names(self.root, labels, folders=True)


def _found(row: Row, name: str, label: str, place: str) -> Found:
    return Found(name, label, row.nbytes, place, row.offset, row.packed, row.size_bytes)


def _shape(archives: Sequence[Spooled]) -> tuple[str, bool]:
    """The folders, each with its slash, that all images in folders share above their class; whether none is in one."""
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


def _look_through(path: str, spool: Path) -> Spooled:
    if file_name(path).lower().endswith(".zip"):
        return spooled(spool, path, "zip", lambda out: _fill_from_zip(path, out))
    copies = is_compressed(path)
    return spooled(spool, path, "tar of folders", lambda out: _fill_from_tar(path, out, copies), copies=copies)


def _fill_from_zip(path: str, out: SpoolWriter) -> None:
    with opened(path) as file:
        for member in zip_members(file):
            kind = "folder" if member.name.endswith("/") else "other" if member.is_link else "file"
            if (name := _wanted(member.name, kind, out)) is None:
                continue
            if member.encrypted:
                raise ResoluteError(
                    f"{path}: {name} is encrypted, expected an archive without a password; unpack it and pack it "
                    "again without one"
                )
            out.note(name, "", member.offset, member.packed_bytes, ZIPPED, member.size_bytes)


def _fill_from_tar(path: str, out: SpoolWriter, copies: bool) -> None:
    with open_tar(path) as members:
        for member in members:
            if (name := _wanted(member.name, member.kind, out)) is None:
                continue
            if copies and member.nbytes <= MAX_BYTES:
                out.add(name, "", member.read())
            else:  # why: what is too large for an image is never read, and a reject that says so
                out.note(name, "", member.offset, member.nbytes, PLAIN)


def _wanted(raw: str, kind: str, out: SpoolWriter) -> str | None:
    """The safe name of an image; None, counted by its reason, for anything else."""
    if kind == "folder":
        return None
    name = safe(raw)
    if name is None:
        out.ignored["unsafe names"] += 1
    elif why := next(filter(None, map(why_ignored, name.split("/"))), None):
        out.ignored[why] += 1
    elif kind == "other":
        out.ignored["links and devices"] += 1
    elif not is_image(name):
        out.ignored[kind_of_other(name)] += 1
    else:
        return name
    return None
