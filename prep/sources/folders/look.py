"""One look at the names of a source of class folders before anything is converted: are its top folders classes?

They may as well be splits, parts, versions or masks of the same photos, or hold the classes one level further down.
Where names leave that open, prep ends with a question: what was seen, and the settings that answer it.
"""

from __future__ import annotations

import re
import shlex
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from resolute.errors import ResoluteError
from resolute.prep.sources.archives.tar_members import stem
from resolute.prep.sources.filesystem import file_name, list_folder
from resolute.prep.sources.image_ref import ImageRef
from resolute.prep.sources.targets import is_word_for_none
from resolute.urls import is_url

from .folder_names import (
    are_counted,
    are_versions,
    holds_photos_only,
    is_never_a_class,
    is_table,
    label_tables,
    mask_words,
    masks_and_photos,
    numbered_parts,
    split_kind,
    splits_of,
    without_mask_suffix,
)

__all__ = ["Look"]

_MAX_FOLDERS = 20_000  # of which the names are kept
_MAX_STEMS = 4000  # of photos in a top folder, of which the names are kept; of more, a part chosen by their hash
_ALL = 1 << 32  # all hashes are smaller
_MAX_TABLES = 100
_COMPARED = 10  # top folders up to which the names of their photos are compared
_FEW = 3  # folders beside which a table, or photos, may be what is meant
_KINDS = ("train", "val", "test", "without labels")  # of splits, as `splits_of` names them
_NAMED = 4  # folders that a message names
_NO_TABLE = "=TABLE with a table of these photos"


class _Folder:
    """The photos of a folder: how many are directly inside, and the folders with photos in it, by name.

    The name "" stands for all further folders of a source that has very many.
    """

    __slots__ = ("folders", "photos")

    def __init__(self) -> None:
        self.photos = 0
        self.folders: dict[str, _Folder] = {}

    @property
    def holds_only_folders(self) -> bool:
        return not self.photos and len(self.folders) > 1

    def count(self) -> int:
        return self.photos + sum(folder.count() for folder in self.folders.values())


class _Inner(NamedTuple):
    """The folder that is reached from a top folder while there is nothing but a single folder, and its path."""

    path: Sequence[str]
    folder: _Folder

    @classmethod
    def of(cls, folder: _Folder, *path: str) -> _Inner:
        names = list(path)
        while not folder.photos and len(folder.folders) == 1:
            ((name, folder),) = folder.folders.items()
            names.append(name)
        return cls(names, folder)


class _Doubt(NamedTuple):
    """What was seen, in the form `what, got …, expected …`, and the settings that may be meant."""

    seen: str
    settings: Sequence[str]


class Look:
    """Collects the names of a source, and then judges them (`check`).

    `root` is the source that the setting `setting` (SRC or VAL) names, and `files` are its archives (none: it is a
    folder). `known` are names of classes that need no question. Memory: some ten megabytes at most.
    """

    def __init__(
        self, root: str, *, setting: str = "SRC", files: Sequence[str] = (), known: Iterable[str] = ()
    ) -> None:
        self._root, self._setting, self._files, self._known = root, setting, files, frozenset(known)
        self._top = _Folder()
        self._listed: list[str] = []  # top folders, with and without photos
        self._tables: list[str] = []  # at the top and in the top folders
        self._stems: dict[str, set[str]] = {}  # names of photos without their suffixes, by top folder
        self._limit = _ALL  # names with smaller hashes are kept
        self._folders = 0
        self._path, self._at = "", self._top
        self._kept: set[str] | None = None

    def watch(self, images: Iterable[ImageRef]) -> Iterator[ImageRef]:
        """Yield `images`, whose names begin with their top folders, and then check them."""
        for image in images:
            self.photo(image.name)
            yield image
        self.check()

    def photo(self, name: str) -> None:
        """Add a photo, by its path below the source."""
        path, _, file = name.rpartition("/")
        if path != self._path:
            self._enter(path)
        self._at.photos += 1
        if self._kept is not None:
            stem = file.rpartition(".")[0]
            if self._limit == _ALL or _hash(stem) < self._limit:
                self._kept.add(stem)
                if len(self._kept) > _MAX_STEMS:
                    self._keep_fewer()

    def folder(self, name: str) -> None:
        """Add a top folder, which may turn out to hold no photos."""
        if len(self._listed) < _MAX_FOLDERS:
            self._listed.append(name)

    def other_file(self, name: str) -> None:
        """Add a file that is no photo, by its path below the source."""
        if is_table(name) and name.count("/") < 2 and len(self._tables) < _MAX_TABLES:
            self._tables.append(name)

    def warnings(self) -> tuple[str, ...]:
        """A line that names the top folders without photos; none if there are none."""
        if self._folders >= _MAX_FOLDERS or not (empty := [n for n in self._listed if n not in self._top.folders]):
            return ()
        return (f"{self._root}: folders without photos are no classes: {_some(empty)}",)

    def check(self) -> None:
        """Raise `ResoluteError` if the top folders may be no classes."""
        tops = {name: folder for name, folder in self._top.folders.items() if name}
        self._check_archives(tops)
        if tops and self._known.issuperset(tops):
            return
        if not tops:
            doubt = self._no_folder()
        elif len(tops) == 1:
            doubt = self._one_folder(*next(iter(tops.items())))
        else:
            doubt = (
                self._splits(tops)
                or self._same_names_inside(tops)
                or self._masks_or_versions(tops)
                or self._same_folders(tops)
                or self._numbered(tops)
                or self._only_folders(tops)
                or self._same_photos(tops)
                or self._beside(tops)
            )
        if doubt is not None:
            settings = ", or ".join(filter(None, [", ".join(doubt.settings[:-1]), doubt.settings[-1]]))
            is_packed = self._files and not any(file in doubt.settings[0] for file in self._files)
            line = f"{self._root}: {doubt.seen}; {'unpack it and ' * bool(is_packed)}use {settings}"
            raise ResoluteError(line.replace("\n", "\\n"))  # why: a name may hold one

    def _enter(self, path: str) -> None:
        self._path, folder = path, self._top
        parts = path.split("/") if path else []
        for part in parts:
            inside = folder.folders.get(part)
            if inside is None:
                self._folders += 1
                inside = folder.folders.setdefault(part if self._folders <= _MAX_FOLDERS else "", _Folder())
            folder = inside
        self._at, self._kept = folder, None
        if parts and len(self._top.folders) <= _COMPARED:
            self._kept = self._stems.setdefault(parts[0], set())

    def _keep_fewer(self) -> None:
        """Keep names with smaller hashes alone, the same ones of all folders, whatever their order."""
        while any(len(stems) > _MAX_STEMS for stems in self._stems.values()):
            limit = self._limit = self._limit // 2
            for stems in self._stems.values():
                stems.difference_update([stem for stem in stems if _hash(stem) >= limit])

    def _check_archives(self, tops: Collection[str]) -> None:
        """Raise `ResoluteError` for archives that are named as splits."""
        files: dict[str, list[str]] = {}
        for file in self._files:
            files.setdefault(stem(file), []).append(file)
        splits = splits_of(files)
        if not splits or not splits.keys().isdisjoint(tops):  # why: the folders are asked about
            return
        of_kind = {kind: [file for name in splits if splits[name] == kind for file in files[name]] for kind in _KINDS}
        kinds = [kind for kind in _KINDS if of_kind[kind]]
        settings = zip(("SRC", "VAL") if self._setting == "SRC" else ("VAL",), kinds, strict=False)
        names = _some(file_name(file) for kind in kinds for file in of_kind[kind])
        values = " ".join(f"{setting}={_pattern(of_kind[kind], self._files)}" for setting, kind in settings)
        raise ResoluteError(
            f"{self._root}: holds splits, got {names}, expected the archives of one split; use {values}, or "
            "KIND=archive for all of them"
        )

    # ---- reasons to ask; each method returns None if there is none

    def _no_folder(self) -> _Doubt | None:
        """Photos without a class folder, and a table that names them."""
        if not self._top.photos:
            return None
        seen = "no class folders, got photos and a table, expected a folder per class, or LABELS"
        if self._label_tables():
            return _Doubt(seen, [self._with_labels([])])
        if tables := self._tables_above():
            labels = [f"{self._labels}={shlex.quote(table)}" for table in tables[:3]]
            return _Doubt(seen, [f"{self._value(self._setting)} {' or '.join(labels)}"])
        return None

    def _one_folder(self, name: str, folder: _Folder) -> _Doubt | None:
        """A single folder with photos: what is inside may be the classes."""
        path, inside = _Inner.of(folder, name)
        if splits := splits_of(inside.folders):
            return _Doubt(_holds_splits(splits), [self._with_val(splits, inside, path)])
        if len(inside.folders) > 1 or self._files or self._label_tables(path):
            seen = f"too few classes, got one folder with photos ({name}), expected at least two class folders"
            return _Doubt(seen, [self._classes_in([name], folder)])
        return None

    def _splits(self, tops: Mapping[str, _Folder]) -> _Doubt | None:
        """Folders that are named as splits, or one such folder whose content shows that it is one."""
        if splits := splits_of(tops):
            others = [name for name in tops if name not in splits]
            return _Doubt(_holds_splits(splits, others), [self._with_val(splits, self._top, []), self._insist(tops)])
        inner = {name: _Inner.of(folder, name) for name, folder in tops.items()}
        for path, inside in inner.values():
            if splits := splits_of(inside.folders):
                seen = _holds_splits(splits, where="/".join(path))
                return _Doubt(seen, [self._with_val(splits, inside, path), self._insist(tops)])
        for name, (_, inside) in inner.items():
            if is_never_a_class(name):
                others = [each for each in tops if each != name]
                seen = _holds_splits([name], others)
                left_out = [f"UNLABELLED=drop to leave out {name}"] if is_word_for_none(name) else []
                alone = f"{self._setting}=FOLDER with {_some(others)} alone"
                return _Doubt(seen, [alone, *left_out, self._insist(tops)])
            kind, more_words = split_kind(name)
            if not kind or more_words or not inside.holds_only_folders:
                continue
            others = [each for each in tops if each != name]
            elsewhere = {*others, *(each for other in others for each in inner[other].folder.folders)}
            are_flat = not all(inner[other].folder.holds_only_folders for other in others)
            if not elsewhere.isdisjoint(inside.folders) or (len(tops) <= _FEW and are_flat):
                seen = _holds_splits([name], others)
                return _Doubt(seen, [self._classes_in([name], tops[name]), self._insist(tops)])
        return None

    def _same_names_inside(self, tops: Mapping[str, _Folder]) -> _Doubt | None:
        """A folder that holds folders with the names of its neighbours."""
        for name, folder in tops.items():
            path, inside = _Inner.of(folder, name)
            same = [each for each in inside.folders if each in tops and each != name]
            if len(same) > 1:
                seen = (
                    f"the same folders twice, got {_some(same)} here and in {'/'.join(path)}, expected each class once"
                )
                return _Doubt(seen, [self._classes_in([name], folder), self._insist(tops)])
        return None

    def _masks_or_versions(self, tops: Mapping[str, _Folder]) -> _Doubt | None:
        """Names of folders that belong to the photos in another folder, or that are no names of classes."""
        container = next(filter(holds_photos_only, tops), None)
        if (found := masks_and_photos(tops)) is not None:
            masks, photos = found
            seen = f"masks or annotations beside photos, got {masks} beside {photos}"
        elif are_versions(tops):
            photos, seen = next(iter(tops)), f"versions of the same photos, got {_some(tops)}"
        elif container is not None and len(tops) <= _FEW + 2:
            photos, seen = container, f"folders that are no classes, got {_some([container, *tops])}"
        else:
            return None
        return _Doubt(
            f"{seen}, expected class folders alone", [self._classes_in([photos], tops[photos]), self._insist(tops)]
        )

    def _same_folders(self, tops: Mapping[str, _Folder]) -> _Doubt | None:
        """The same folders in each: parts or versions of one set, with the classes below."""
        inner = {name: _Inner.of(folder, name).folder for name, folder in tops.items()}
        groups = {name: list(folder.folders) for name, folder in inner.items() if folder.holds_only_folders}
        counts = Counter(each for names in groups.values() for each in names)
        repeated = [each for each, count in counts.items() if count > 1]
        same = [name for name, names in groups.items() if 2 * sum(counts[each] > 1 for each in names) >= len(names)]
        if len(repeated) < 2 or 2 * len(same) < len(tops):
            return None
        seen = f"the same folders in each, got {_some(repeated)} in {_some(same)}, expected each class in one folder"
        return _Doubt(seen, [f"{self._classes_in([same[0]], tops[same[0]])} for one of them", self._insist(tops)])

    def _numbered(self, tops: Mapping[str, _Folder]) -> _Doubt | None:
        """Names that differ only in a number: the folders may be parts of one set."""
        if not (parts := numbered_parts(tops)):
            return None
        seen = f"folders that differ only in a number, got {_some(parts)}, expected names of classes"
        if len(_Inner.of(tops[parts[0]]).folder.folders) > 1:
            return _Doubt(seen, [f"{self._classes_in([parts[0]], tops[parts[0]])} for one of them", self._insist(tops)])
        return _Doubt(seen, [self._with_labels([]), self._insist(tops)])

    def _only_folders(self, tops: Mapping[str, _Folder]) -> _Doubt | None:
        """Top folders without photos of their own, but with several folders each: these may be the classes."""
        inner = [_Inner.of(folder, name) for name, folder in tops.items()]
        groups = [each for each in inner if each.folder.holds_only_folders]
        if 2 * len(groups) <= len(tops):
            return None
        path, inside = groups[0]
        below = [f"{'/'.join(path)}/{each}" for each in inside.folders if each]
        return _Doubt(
            f"folders of folders, got {_some(below)}, expected photos in the class folders",
            [
                f"{self._value(self._setting, *path)} for the classes in one of them",
                f"{self._setting}=LIST with a list of paths and labels for all",
                self._insist(tops),
            ],
        )

    def _same_photos(self, tops: Mapping[str, _Folder]) -> _Doubt | None:
        """Two folders with photos of the same names: versions of the same photos, or masks of them."""
        if len(tops) > _COMPARED:
            return None
        stems = {name: {without_mask_suffix(stem) for stem in self._stems.get(name, ())} for name in tops}
        for one, other in combinations(tops, 2):
            common, fewest = stems[one] & stems[other], min(len(stems[one]), len(stems[other]))
            if fewest < 2 or 10 * len(common) < 9 * fewest:
                continue
            masks = mask_words(one) ^ mask_words(other)
            # why: mask and nomask may be the classes
            is_masked = sum(any(word in name.lower() for word in masks) for name in tops) == 1
            if is_masked or not are_counted(common, self._limit / _ALL):
                photos = one if mask_words(other) else other if mask_words(one) else one
                seen = f"photos of the same names in two folders, got {min(common)} in {one} and in {other}"
                return _Doubt(
                    f"{seen}, expected each photo once",
                    [self._classes_in([photos], tops[photos]), self._insist(tops)],
                )
        return None

    def _beside(self, tops: Mapping[str, _Folder]) -> _Doubt | None:
        """A table of labels beside few folders, or more photos beside them than in them."""
        if len(tops) > _FEW:
            return None
        inside = sum(folder.count() for folder in tops.values())
        if (tables := self._label_tables()) and all(folder.photos for folder in tops.values()):
            seen = (
                f"a table beside the folders, got {tables[0]} beside {_some(tops)}, expected one that says the classes"
            )
        elif self._top.photos > inside:
            seen = (
                f"more photos outside folders than in them, got {self._top.photos} outside and {inside} in "
                f"{_some(tops)}, expected all in class folders"
            )
        else:
            return None
        return _Doubt(seen, [self._with_labels([]), self._insist(tops)])

    # ---- the settings that answer the question

    @property
    def _labels(self) -> str:
        return "LABELS" if self._setting == "SRC" else "VAL_LABELS"

    def _insist(self, tops: Iterable[str]) -> str:
        return f"KIND={'archive' if self._files else 'folders'} if {_some(tops)} are the classes"

    def _archive(self, path: Sequence[str]) -> str | None:
        """The archive that is the folder `path`, if each archive is a folder by itself."""
        if len(self._files) < 2 or len(path) != 1:
            return None
        return next((file for file in self._files if file_name(file).startswith(f"{path[0]}.")), None)

    def _value(self, setting: str, *path: str) -> str:
        """`SRC=…` or another setting for a path below the source."""
        base = self._root
        if self._files:
            if (file := self._archive(path)) is not None:
                return f"{setting}={shlex.quote(file)}"
            base = re.sub(r"\.(zip|tar|tar\.\w+|t[bgx]z2?)$", "", base, flags=re.IGNORECASE)
        return f"{setting}={shlex.quote('/'.join([base.rstrip('/') if path else base, *path]))}"

    def _classes_in(self, path: Sequence[str], folder: _Folder) -> str:
        """The settings for the class folders below `folder`, at `path`, or for its photos and a table."""
        inner = _Inner.of(folder, *path)
        if len(inner.folder.folders) < 2:
            return self._with_labels(path)
        return self._value(self._setting, *inner.path)

    def _with_val(self, splits: Mapping[str, str], above: _Folder, path: Sequence[str]) -> str:
        """The settings for the folders `splits` ({name: kind}) of the folder `above`, at `path`."""

        def first(*kinds: str) -> str | None:
            return next((name for kind in kinds for name in splits if splits[name] == kind), None)

        if list(splits.values()).count("train") > 1:  # train_cat, train_dog and others
            return f"{self._setting}=LIST with a list of paths and labels of one split"
        if self._setting == "VAL":
            name = first("val", "test", "train")
            assert name is not None
            return self._classes_in([*path, name], above.folders[name])
        train = first("train", "val", "test")
        assert train is not None
        val = next((name for kind in ("val", "test") if (name := first(kind)) not in (None, train)), None)
        settings = self._classes_in([*path, train], above.folders[train])
        if val is None or settings.endswith(_NO_TABLE):
            return settings
        inner = _Inner.of(above.folders[val], *path, val)
        if len(inner.folder.folders) > 1:
            settings += f" {self._value('VAL', *inner.path)}"
        elif tables := [table for table in self._label_tables([*path, val]) if "/" in table]:
            settings += f" {self._value('VAL', *path, val)}"
            settings += "" if _is_found(tables[0]) else f" {self._value('VAL_LABELS', tables[0])}"
        return settings

    def _with_labels(self, path: Sequence[str]) -> str:
        """The settings for the photos in the folder `path`, without class folders, and their table."""
        place = self._value(self._setting, *path)
        tables = self._label_tables(path)
        if any(map(_is_found, tables)):
            return place
        if not tables:
            return f"{place} {self._labels}{_NO_TABLE}"
        return f"{place} {' or '.join(self._value(self._labels, table) for table in tables[:3])}"

    def _label_tables(self, path: Sequence[str] = ()) -> list[str]:
        """The tables at the top and in the folder `path` that by their names hold labels, the likeliest first."""
        folders = {"", "/".join(path)}
        tables = [table for table in self._tables if table.rpartition("/")[0] in folders]
        is_flat = bool(path) or bool(self._top.photos)
        return label_tables(tables, flat=is_flat, unlabelled="test" if self._setting == "SRC" else "train")

    def _tables_above(self) -> list[str]:
        """The tables of labels in the folder above the source."""
        if is_url(self._root):
            return []
        above, slash, _ = self._root.rpartition("/")
        prefix = above + slash
        try:
            names = [
                entry.name for entry in list_folder(prefix or ".") if entry.kind == "file" and is_table(entry.name)
            ]
        except ResoluteError:
            return []
        return [prefix + name for name in label_tables(names, flat=True, unlabelled="test")]


def _is_found(table: str) -> bool:
    """Whether prep finds a table in a folder by itself."""
    return "/" in table and table.rpartition("/")[2].startswith("metadata.")


def _pattern(files: Sequence[str], among: Sequence[str]) -> str:
    """A pattern for these files that no other one `among` all matches, or the first of them and `…`."""
    start = files[0]
    while not all(file.startswith(start) for file in files):
        start = start[:-1]
    if len(files) == 1:
        return shlex.quote(start)
    is_theirs = sum(file.startswith(start) for file in among) == len(files)
    return shlex.quote(f"{start}*") if is_theirs else f"{shlex.quote(files[0])},…"


def _hash(text: str) -> int:
    return zlib.crc32(text.encode("utf-8", "surrogatepass"))


def _some(names: Iterable[str]) -> str:
    """`a`, `a and b`, or `a, b, c, d and 8 more`."""
    unique = list(dict.fromkeys(names))
    if len(unique) > _NAMED + 1:
        unique = [*unique[:_NAMED], f"{len(unique) - _NAMED} more"]
    return " and ".join(filter(None, [", ".join(unique[:-1]), unique[-1]]))


def _holds_splits(splits: Iterable[str], others: Sequence[str] = (), where: str = "") -> str:
    place = f" in {where}" if where else f" beside {_some(others)}" if others else ""
    return f"holds splits, got {_some(splits)}{place}, expected the class folders of one split"
