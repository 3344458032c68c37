"""Folders of images, local or in a store, listed in a fixed order; each real folder is listed once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from resolute.prep.sources.filesystem import Entry, list_folder
from resolute.prep.sources.image_ref import ImageRef, Listing
from resolute.prep.sources.names import ignore_reason, is_image, other_file_kind
from resolute.prep.sources.targets import AUTO, TargetSetting
from resolute.prep.storage.thread_map import thread_map
from resolute.urls import is_url

from .look import Look

__all__ = ["ImageFolderSource", "walk"]

_AHEAD = 16  # folders of a store listed concurrently


class ImageFolderSource:
    """Class folders, in which images may be nested: the first part of a path is the class. A `Source`.

    Images are in ascending order of name. Links to folders are followed, each real folder once, as in `walk`. `look()`
    judges at the end of an iteration whether the top folders are classes, and `setting` whether their names are words
    for no label. Memory: the entries of one folder per level, and device and inode of each folder.
    """

    unpacks = False
    files: Sequence[str] = ()

    def __init__(self, src: str, look: Callable[[], Look] | None = None, setting: TargetSetting = AUTO) -> None:
        self.root, self.listing = src, Listing()
        self._look, self._setting = look, setting

    def __iter__(self) -> Iterator[ImageRef]:
        return self._setting.with_class_folders(self._images(), self.root)

    def _images(self) -> Iterator[ImageRef]:
        self.listing = listing = Listing()
        look = Look(self.root) if self._look is None else self._look()
        for name, entry in walk(self.root, listing):
            label, slash, _ = name.partition("/")
            if entry.kind == "folder":
                if not slash and not self._setting.drops_folder(name):
                    look.folder(name)
            elif not is_image(entry.name):
                look.other_file(name)
                listing.ignored[other_file_kind(name) if entry.nbytes is not None else "broken links"] += 1
            elif slash and self._setting.drops_folder(label):
                listing.ignored["unlabelled"] += 1
            else:
                look.photo(name)
                if slash:
                    yield ImageRef.file(name, label, entry.nbytes)
                else:
                    listing.ignored["outside class folders"] += 1
        if self._look is not None:
            look.check()
        listing.target = replace(listing.target, warnings=look.warnings())


def walk(root: str, listing: Listing) -> Iterator[tuple[str, Entry]]:
    """Yield (path relative to `root`, entry) of every file and folder below `root`, ascending; a folder before its
    content. All entries count in `listing`, but for the folders that are entered.

    Each real folder is read once: by its own path if that leads there from `root`, otherwise by the first link to it
    (so that cycles end). Other links to it are counted as ignored, as are hidden entries and junk, which are skipped
    with everything in them, pipes, devices, and names that fsspec would take for chained URLs. Raises `ResoluteError`
    for a folder that cannot be listed.
    """
    root = root.rstrip("/") or "/"
    yield from _Walk(root, listing).below(root, "", list_folder(root))


class _Walk:
    """The state of a walk: the folders that were read, by device and inode, and the real paths of its beginnings."""

    def __init__(self, root: str, listing: Listing) -> None:
        self._found, self._ignored, self._visited = listing, listing.ignored, {_identity(root)}
        self._roots = {os.path.realpath(root)}  # where the walk began, and where links led that it followed

    def below(self, folder: str, prefix: str, listed: list[Entry]) -> Iterator[tuple[str, Entry]]:
        self._found.listed += len(listed)
        reasons = [_why_ignored(folder, entry.name) for entry in listed]
        self._ignored.update(why for why in reasons if why)
        inside = [entry for entry, why in zip(listed, reasons, strict=True) if not why]
        folders = [(f"{folder}/{entry.name}", entry.is_link) for entry in inside if entry.kind == "folder"]
        # why 1: on a disk, a link may lead to an earlier folder, which must have been visited by then
        listings = thread_map(self._listing, folders, _AHEAD if is_url(folder) else 1)
        for entry in inside:
            if entry.kind == "other":
                self._ignored["pipes and devices"] += 1
            elif entry.kind == "file":
                yield prefix + entry.name, entry
            else:
                content = next(listings)
                if content is None:
                    self._ignored["links to a folder read already"] += 1
                    continue
                self._found.listed -= 1  # its entries count
                yield prefix + entry.name, entry
                yield from self.below(f"{folder}/{entry.name}", f"{prefix}{entry.name}/", content)

    def _listing(self, folder_and_is_link: tuple[str, bool]) -> list[Entry] | None:
        """The entries of a folder; None if it is read by another path."""
        folder, is_link = folder_and_is_link
        identity = _identity(folder)
        if identity in self._visited or (is_link and self._is_read_by_its_own_path(folder)):
            return None
        self._visited.add(identity)
        return list_folder(folder)

    def _is_read_by_its_own_path(self, link: str) -> bool:
        parts = os.path.realpath(link).split("/")
        for depth in range(len(parts) - 1, 0, -1):
            if ignore_reason(parts[depth]):
                break  # the walk does not get there
            if ("/".join(parts[:depth]) or "/") in self._roots:
                return True
        self._roots.add("/".join(parts))
        return False


def _why_ignored(folder: str, name: str) -> str | None:
    return "unsafe names" if "::" in name and is_url(folder) else ignore_reason(name)


def _identity(folder: str) -> object:
    if is_url(folder):
        return folder
    try:
        info = os.stat(folder)  # noqa: PTH116
    except OSError:
        return folder  # `list_folder` reports the error
    # why: some network file systems have no inode numbers
    return (info.st_dev, info.st_ino) if info.st_ino else os.path.realpath(folder)
