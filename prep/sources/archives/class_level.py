"""The level of folders that are the classes in several archives that form one source."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from resolute.errors import ResoluteError
from resolute.prep.sources.folder_names import splits_of

__all__ = ["ClassLevel", "class_level"]

_PART = re.compile(
    r"(?P<before>.*?)(?:part|batch|chunk|shard|vol|volume|split|disc|disk|archive|piece|section|images|imgs|photos|data"
    r"|dataset|download)s?[-_ .]*(?:\d+|[a-z])(?:[-_ .]*of[-_ .]*\d+)?",
    re.IGNORECASE,
)

Names = Callable[[], Iterator[str]]  # yields the names of the images of an archive


class ClassLevel(NamedTuple):
    """`tops` are the folders above the classes, one path with its slash per archive, and `note` a line about them.

    `tops` is None if no image is in a folder.
    """

    tops: list[str] | None
    note: str | None = None


class _Shape(NamedTuple):
    shared: list[str]  # the folders that all images in folders share
    depth: int  # folders around the image that is in the fewest, at least one; 0: no image is in a folder


def class_level(
    root: str, archives: Sequence[tuple[str, Names]], *, known: Collection[str] = (), is_certain: bool = False
) -> ClassLevel:
    """Where the classes are in the archives, (file name, names of its images) each.

    Top-level folders that all images share are above the classes. Where each archive has a further folder of its own,
    that is a class, or its content is several classes: the latter if the folders say that they are parts. `known` are
    names of classes. `is_certain`: the uppermost level is meant. Raises `ResoluteError` if two levels could be meant.
    """
    shapes = [_shape(names()) for _, names in archives]
    with_folders = [shape for shape in shapes if shape.depth]
    if not with_folders:
        return ClassLevel(None)
    if len(with_folders) < len(shapes) and not is_certain:
        flat = next(file for (file, _), shape in zip(archives, shapes, strict=True) if not shape.depth)
        other = next(file for (file, _), shape in zip(archives, shapes, strict=True) if shape.depth)
        raise ResoluteError(
            f"{root}: archives of two forms, got {flat} without folders and {other} with folders, expected class "
            f"folders in each, or in none (then each archive is a class); name those of one form in SRC, or set "
            "KIND=archive to leave out photos that are in no folder"
        )
    common = _common(shape.shared for shape in with_folders)
    first = min(len(common), min(shape.depth for shape in with_folders) - 1)
    last = min(min(len(shape.shared), shape.depth - 1) for shape in with_folders)
    level, note = first, None
    if last > first and not is_certain:
        level = _chosen(root, archives, first, last, known)
    if level > first:
        tops = sorted({shape.shared[first] for shape in with_folders})
        note = f"{root}: the top folders {_some(tops)} are read as parts of the data, not as classes"
    return ClassLevel(["".join(f"{folder}/" for folder in shape.shared[:level]) for shape in shapes], note)


def _chosen(root: str, archives: Sequence[tuple[str, Names]], first: int, last: int, known: Collection[str]) -> int:
    """The level of the classes, from 0, between `first` and `last`."""
    found: list[set[str]] = [set() for _ in range(first, last + 1)]
    for _, names in archives:
        for name in names():
            folders = name.split("/")[:-1]
            for i, folder in enumerate(folders[first : last + 1]):
                found[i].add(folder)
    fitting = [i for i, folders in enumerate(found) if folders.issubset(known)]
    possible = [i for i, folders in enumerate(found) if len(folders) > 1 and not _are_parts(folders)]
    if len(fitting) == 1:
        return first + fitting[0]
    if len(possible) < 2 or splits_of(found[possible[0]]):  # `Look` asks about splits
        return first + (possible or [0])[0]
    upper, lower = (_some(sorted(found[i])) for i in possible[:2])
    use = f"KIND=archive for {upper}, or " if possible[0] == 0 else ""
    raise ResoluteError(
        f"{root}: two levels of folders in the archives could be the classes, got {upper}, and in them {lower}, "
        f"expected one; use {use}CLASSES=names.txt, a file with the names of the classes"
    )


def _shape(names: Iterator[str]) -> _Shape:
    shared: list[str] | None = None
    depth = 0
    for name in names:
        folders = name.split("/")[:-1]
        if not folders:
            continue
        depth = min(depth, len(folders)) if depth else len(folders)
        if shared is None or folders[: len(shared)] != shared:
            shared = folders if shared is None else _common([shared, folders])
    return _Shape(shared or [], depth)


def _common(paths: Collection[list[str]] | Iterator[list[str]]) -> list[str]:
    """The folders that the paths begin with."""
    shared: list[str] | None = None
    for folders in paths:
        if shared is None:
            shared = folders
        same = next((i for i, (a, b) in enumerate(zip(shared, folders, strict=False)) if a != b), None)
        shared = shared[: min(len(shared), len(folders)) if same is None else same]
    return shared or []


def _are_parts(folders: Collection[str]) -> bool:
    """Whether the names say that they are parts of one whole, such as part-a and part-b."""
    parts = [_PART.fullmatch(folder) for folder in folders]
    return len({part["before"].lower() if part else None for part in parts}) == 1 and all(parts)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
