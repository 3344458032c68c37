"""Which images are there, and what class and split does each belong to?"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from pipeline.errors import ResoluteError
from pipeline.rng import permute, stream_key

from .settings import Settings

__all__ = ["Photo", "Photos", "Sources", "find_sources"]

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
_HELD_OUT = 0x5641_4C  # names the random stream that picks validation images


@dataclass(frozen=True, slots=True)
class Photo:
    """A file that claims to be an image: POSIX path relative to its root, class number, size in bytes."""

    path: str
    label: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Photos:
    """One split before shuffling: `photos` in ascending order of path, all below `root`."""

    root: Path
    photos: tuple[Photo, ...]


@dataclass(frozen=True, kw_only=True)
class Sources:
    classes: tuple[str, ...]
    splits: Mapping[str, Photos]
    ignored: int  # files that are hidden, of another kind, or outside a class folder

    @property
    def count(self) -> int:
        return sum(len(split.photos) for split in self.splits.values())

    def fingerprint(self) -> str:
        """SHA-256 over (split, path, size in bytes) of every image, in order: changes with the sources."""
        digest = hashlib.sha256()
        for name in sorted(self.splits):
            for photo in self.splits[name].photos:
                digest.update(os.fsencode(f"{name}\0{photo.path}\0{photo.size_bytes}\n"))
        return digest.hexdigest()


def find_sources(settings: Settings) -> Sources:
    """List the images of `settings.src` (and `.val`), split them, number the classes.

    Raises `ResoluteError` for folders that are missing, overlap or hold too little, and for validation
    lists that do not fit.
    """
    _check_places(settings)
    found, ignored = _scan(settings.src)
    classes = tuple(sorted(found))
    if not classes:
        raise ResoluteError(
            f"{settings.src}: no classes, got no sub-folder with images ({ignored} other files), "
            f"expected one folder per class; point SRC at the folder that holds the class folders"
        )
    if len(classes) < 2:
        raise ResoluteError(
            f"{settings.src}: nothing to tell apart, got one class ({classes[0]}), expected at least two; "
            "point SRC at the folder that holds the class folders"
        )
    train = [Photo(path, n, size) for n, name in enumerate(classes) for path, size in found[name]]
    if settings.val is not None:
        found_val, ignored_val = _scan(settings.val)
        ignored += ignored_val
        unknown = sorted(set(found_val) - set(classes))
        if unknown:
            raise ResoluteError(
                f"{settings.val}: classes that training lacks, got {len(unknown)} such as {unknown[0]}, "
                f"expected only those of {settings.src}; rename or remove them"
            )
        number = {name: n for n, name in enumerate(classes)}
        val = [Photo(path, number[name], size) for name in found_val for path, size in found_val[name]]
        val_root = settings.val
    else:
        held_out = _listed(settings, train) if settings.val_list else _held_out(settings, classes, train)
        val = [photo for photo in train if photo.path in held_out]
        train = [photo for photo in train if photo.path not in held_out]
        val_root = settings.src
    for name, photos in (("train", train), ("val", val)):
        if not photos:
            raise ResoluteError(
                f"{settings.src}: no image is left for {name}, got {len(train)} for train and {len(val)} for "
                "val, expected some for both; give more images per class or change what is held out"
            )
    return Sources(
        classes=classes,
        splits={"train": _sorted(settings.src, train), "val": _sorted(val_root, val)},
        ignored=ignored,
    )


def _sorted(root: Path, photos: list[Photo]) -> Photos:
    return Photos(root=root, photos=tuple(sorted(photos, key=lambda photo: photo.path)))


def _check_places(settings: Settings) -> None:
    out = settings.out.resolve()
    for name, place in (("SRC", settings.src), ("VAL", settings.val)):
        if place is None:
            continue
        if not place.is_dir():
            got = "a file" if place.exists() else "nothing there"
            raise ResoluteError(
                f"{place}: no such folder, got {got}, expected a folder of class folders; correct {name}"
            )
        if out.is_relative_to(place.resolve()):
            raise ResoluteError(
                f"{settings.out}: lies inside {name}, got {place}, expected a folder apart from the photos; "
                "choose another OUT"
            )
    if settings.val is not None:
        src, val = settings.src.resolve(), settings.val.resolve()
        if src.is_relative_to(val) or val.is_relative_to(src):
            raise ResoluteError(
                f"{settings.val}: overlaps SRC, got {settings.src}, expected two folders side by side; "
                "correct VAL, or hold out a part of SRC with --val-frac"
            )


def _scan(root: Path) -> tuple[dict[str, list[tuple[str, int]]], int]:
    """{class: [(path relative to root, size in bytes)]} for classes with images; number of files ignored."""
    found: dict[str, list[tuple[str, int]]] = {}
    ignored = 0
    try:
        for path, size_bytes in _files(root, "", frozenset()):
            name, slash, _ = path.partition("/")
            hidden = any(part.startswith(".") for part in path.split("/"))
            if hidden or not slash or PurePosixPath(path).suffix.lower() not in SUFFIXES:
                ignored += 1
            else:
                found.setdefault(name, []).append((path, size_bytes))
    except OSError as error:
        raise ResoluteError(
            f"{error.filename or root}: cannot be listed, got {error.strerror}, expected a readable folder; "
            "correct its permissions or remove it"
        ) from None
    return found, ignored


def _files(folder: Path, prefix: str, above: frozenset[tuple[int, int]]) -> Iterator[tuple[str, int]]:
    """Every file below `folder`, following links, without going round in circles (`above`: its parents)."""
    stat = folder.stat()
    here = (stat.st_dev, stat.st_ino)
    if here in above:
        return
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.is_dir():
                yield from _files(folder / entry.name, f"{prefix}{entry.name}/", above | {here})
            elif entry.is_file():
                yield prefix + entry.name, entry.stat().st_size
            elif entry.is_symlink():  # why: points nowhere; becomes a reject that names it
                yield prefix + entry.name, 0


def _listed(settings: Settings, photos: list[Photo]) -> set[str]:
    """The paths that the validation list names. Raises if the list or one of them does not exist."""
    assert settings.val_list is not None
    try:
        lines = settings.val_list.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError as error:
        raise ResoluteError(
            f"{settings.val_list}: cannot be read, got {error.strerror}, expected a file with one path per "
            "line; correct VAL_LIST"
        ) from None
    listed = {str(PurePosixPath(line.strip())) for line in lines if line.strip()}
    missing = sorted(listed - {photo.path for photo in photos})
    if missing:
        raise ResoluteError(
            f"{settings.val_list}: {len(missing)} of {len(listed)} paths are no images of {settings.src}, "
            f"got {missing[0]}, expected paths such as {photos[0].path}; correct the list"
        )
    return listed


def _held_out(settings: Settings, classes: tuple[str, ...], photos: list[Photo]) -> set[str]:
    """A seeded part of every class: at least one image, and at least one left, where a class has two."""
    by_class: dict[int, list[str]] = {}
    for photo in photos:
        by_class.setdefault(photo.label, []).append(photo.path)
    chosen: set[str] = set()
    for label, paths in by_class.items():
        paths.sort()
        total = len(paths)
        wanted = min(total - 1, max(1, round(total * settings.val_frac)))
        # why: keyed by name, so that a class that comes or goes leaves the others' split alone
        key = stream_key(settings.seed, _HELD_OUT, zlib.crc32(os.fsencode(classes[label])))
        picks = permute(key, np.arange(wanted, dtype=np.int64), total)
        chosen.update(paths[pick] for pick in picks.tolist())
    return chosen
