"""Folders of images, local or in a store, listed in a fixed order; each real folder is listed once."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

from resolute.prep.storage.thread_map import thread_map

from .filesystem import Entry, list_folder
from .image_ref import ImageRef, SourceTarget, is_url
from .names import ignore_reason, is_image, other_file_kind

__all__ = ["ImageFolderSource", "walk"]

_AHEAD = 16  # folders of a store listed concurrently


class ImageFolderSource:
    """Class folders, in which images may be nested: the first part of a path is the class. A `Source`.

    Images are in ascending order of name. Links to folders are followed, each real folder once: by the first path that
    leads to it. Memory: the entries of one folder per level, and device and inode of each folder.
    """

    numbered = False
    label_names: Sequence[str] | None = None
    copies = False
    files: Sequence[str] = ()
    stamps: Sequence[str] = ()
    target = SourceTarget()

    def __init__(self, src: str) -> None:
        self.root = src
        self.ignored: Counter[str] = Counter()

    def __iter__(self) -> Iterator[ImageRef]:
        self.ignored.clear()
        current_class, images = "", 0
        for name, entry in walk(self.root, self.ignored):
            label, slash, _ = name.partition("/")
            if entry.kind == "folder":
                if not slash:  # the next class begins
                    self.ignored["empty classes"] += bool(current_class) and not images
                    current_class, images = label, 0
            elif not is_image(entry.name):
                self.ignored[other_file_kind(name) if entry.nbytes is not None else "broken links"] += 1
            elif not slash:
                self.ignored["outside class folders"] += 1
            else:
                images += 1
                yield ImageRef.file(name, label, entry.nbytes)
        self.ignored["empty classes"] += bool(current_class) and not images
        self.ignored += Counter()  # drops zero counts


def walk(root: str, ignored: Counter[str]) -> Iterator[tuple[str, Entry]]:
    """Yield (path relative to `root`, entry) of every file and folder below `root`, ascending; a folder before its
    content.

    Hidden entries and junk are skipped with everything in them and counted in `ignored`, as are pipes, devices, links
    to an already visited folder (so that cycles end), and names that fsspec would take for chained URLs. Raises
    `ResoluteError` for a folder that cannot be listed.
    """
    yield from _walk(root.rstrip("/") or "/", "", list_folder(root), ignored, {_identity(root)})


def _walk(
    folder: str, prefix: str, listed: list[Entry], ignored: Counter[str], visited: set[object]
) -> Iterator[tuple[str, Entry]]:
    reasons = [_why_ignored(folder, entry.name) for entry in listed]
    ignored.update(why for why in reasons if why)
    inside = [entry for entry, why in zip(listed, reasons, strict=True) if not why]
    below = [f"{folder}/{entry.name}" for entry in inside if entry.kind == "folder"]
    # why 1: on a disk, a link may lead to an earlier folder, which must have been visited by then
    listings = thread_map(partial(_listing, visited), below, _AHEAD if is_url(folder) else 1)
    for entry in inside:
        if entry.kind == "other":
            ignored["pipes and devices"] += 1
        elif entry.kind == "file":
            yield prefix + entry.name, entry
        else:
            content = next(listings)
            if content is None:
                ignored["links to a folder read already"] += 1
                continue
            yield prefix + entry.name, entry
            yield from _walk(f"{folder}/{entry.name}", f"{prefix}{entry.name}/", content, ignored, visited)


def _why_ignored(folder: str, name: str) -> str | None:
    return "unsafe names" if "::" in name and is_url(folder) else ignore_reason(name)


def _listing(visited: set[object], folder: str) -> list[Entry] | None:
    """The entries of `folder`; None if it has been visited already, by any path."""
    identity = _identity(folder)
    if identity in visited:
        return None
    visited.add(identity)
    return list_folder(folder)


def _identity(folder: str) -> object:
    if is_url(folder):
        return folder
    try:
        info = os.stat(folder)  # noqa: PTH116
    except OSError:
        return folder  # `list_folder` reports the error
    # why: some network file systems have no inode numbers
    return (info.st_dev, info.st_ino) if info.st_ino else os.path.realpath(folder)
