"""The level of folders that are the classes in several archives that form one source."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from resolute.errors import ResoluteError
from resolute.prep.sources.folders.folder_names import holds_photos_only, splits_of

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


class _Archive(NamedTuple):
    """An archive with images in folders.

    `shared` are the folders that they all are in; `last` is the deepest level, from 0, at which its classes can be.
    """

    file: str
    names: Names
    shared: list[str]
    last: int


def class_level(
    root: str, archives: Sequence[tuple[str, Names]], *, known: Collection[str] = (), is_certain: bool = False
) -> ClassLevel:
    """Where the classes are in the archives, (file name, names of its images) each.

    Top-level folders that all images share are above the classes. Where an archive has a further folder of its own,
    that is a class, or its content is several classes: the latter if the folders say that they are parts. `known` are
    names of classes. `is_certain`: the uppermost level is meant. Raises `ResoluteError` if two levels could be meant.
    """
    found = [_archive(file, names) for file, names in archives]
    foldered = [archive for archive in found if isinstance(archive, _Archive)]
    if not foldered:
        return ClassLevel(None)
    flat = next((file for (file, _), archive in zip(archives, found, strict=True) if archive == "flat"), None)
    if flat is not None and not is_certain:
        raise ResoluteError(
            f"{root}: archives of two forms, got {flat} without folders and {foldered[0].file} with folders, expected "
            "class folders in each, or in none (then each archive is a class); name those of one form in SRC, or set "
            "KIND=archive to leave out photos that are in no folder"
        )
    first = min(len(_common(archive.shared for archive in foldered)), *(archive.last for archive in foldered))
    levels = [first] * len(foldered)
    if not is_certain and any(archive.last > first for archive in foldered):
        levels = _levels(root, foldered, first, known)
    tops = sorted({each.shared[first] for each, level in zip(foldered, levels, strict=True) if level > first})
    note = f"{root}: the top folders {_some(tops)} are read as parts of the data, not as classes" if tops else None
    cuts = iter("".join(f"{folder}/" for folder in each.shared[:n]) for each, n in zip(foldered, levels, strict=True))
    return ClassLevel([next(cuts) if isinstance(archive, _Archive) else "" for archive in found], note)


def _levels(root: str, archives: Sequence[_Archive], first: int, known: Collection[str]) -> list[int]:
    """The level of the classes in each archive, from `first` on."""
    names = [_folders(archive, first, max(each.last for each in archives) + 1) for archive in archives]
    fitting = [
        {level for level in range(first, archive.last + 1) if inside[level].issubset(known)}
        for archive, inside in zip(archives, names, strict=True)
    ]
    if len(same := set.intersection(*fitting)) == 1:
        return [*same] * len(archives)
    if all(len(levels) == 1 for levels in fitting):
        return [level for (level,) in fitting]
    last = min(archive.last for archive in archives)
    together = {level: set().union(*(inside[level] for inside in names)) for level in range(first, last + 1)}
    possible = [level for level, folders in together.items() if len(folders) > 1 and not _are_parts(folders)]
    level = (possible or [first])[0]
    if len(possible) > 1 and not splits_of(together[level]):  # `Look` asks about splits
        upper, lower = (_some(sorted(together[each])) for each in possible[:2])
        raise ResoluteError(
            f"{root}: two levels of folders in the archives could be the classes, got {upper}, and in them {lower}, "
            f"expected one; use {_insist(upper, level, first)}"
        )
    if level == last:
        _check_same_depth(root, archives, names, level, first)
    return [level] * len(archives)


def _check_same_depth(
    root: str, archives: Sequence[_Archive], names: Sequence[Mapping[int, set[str]]], level: int, first: int
) -> None:
    """Raise `ResoluteError` if a folder at `level` may hold classes, while those of other archives hold photos."""
    ends = [i for i, archive in enumerate(archives) if archive.last == level]
    classes, inside = (set().union(*(names[i][each] for i in ends)) for each in (level, level + 1))
    for archive, own in zip(archives, names, strict=True):
        if archive.last == level or archive.shared[level] in classes:
            continue
        if inside.isdisjoint(own[level + 1]) and not all(map(holds_photos_only, own[level + 1])):
            top = archive.shared[level]
            raise ResoluteError(
                f"{root}: archives of two forms, got the folders {_some(sorted(own[level + 1]))} in {top} of "
                f"{archive.file}, and {_some(sorted(classes))} in {archives[ends[0]].file}, expected class folders at "
                f"one level; use {_insist(top, level, first)}"
            )


def _insist(folders: str, level: int, first: int) -> str:
    kind = f"KIND=archive for {folders}, or " if level == first else ""
    return f"{kind}CLASSES=names.txt, a file with the names of the classes"


def _archive(file: str, names: Names) -> _Archive | Literal["flat", "empty"]:
    shared: list[str] | None = None
    depth = 0  # folders around the image that is in the fewest, at least one
    form: Literal["flat", "empty"] = "empty"
    for name in names():
        form = "flat"
        folders = name.split("/")[:-1]
        if not folders:
            continue
        depth = min(depth, len(folders)) if depth else len(folders)
        if shared is None or folders[: len(shared)] != shared:
            shared = folders if shared is None else _common([shared, folders])
    return form if shared is None else _Archive(file, names, shared, min(len(shared), depth - 1))


def _folders(archive: _Archive, first: int, last: int) -> dict[int, set[str]]:
    """{level: names of the folders there}, from `first` to `last`."""
    found: dict[int, set[str]] = {level: set() for level in range(first, last + 1)}
    for name in archive.names():
        for level, folder in enumerate(name.split("/")[first:-1][: last + 1 - first], first):
            found[level].add(folder)
    return found


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
