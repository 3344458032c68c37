"""The sources of images that a table names: a folder with a table of its images, and a list of paths and labels."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from resolute.console import counted
from resolute.errors import ResoluteError, StorageError
from resolute.urls import is_url

from .filesystem import file_size, list_folder, path_kind, version_stamp, without_query
from .folders.image_folder import walk
from .image_ref import MISSING, UNSEEN, ImageRef, Label, Listing
from .names import is_image, other_file_kind, safe_below, safe_relative_path
from .tables.forms import is_text, not_utf8
from .tables.photo_names import EXACT, WITHOUT_SUFFIX, AmbiguousName, NameIndex, differences
from .tables.split_column import LEFT_OUT, Part, SplitSetting
from .tables.table import TargetTable
from .targets import AUTO, TargetSetting

__all__ = ["BothFolders", "FolderFiles", "LabelListSource", "LabelTableSource", "table_covers"]

Row = tuple[str, Label, int]  # the name as it is written, the target and the line


class FolderFiles(NameIndex):
    """The image files below a folder, by any form of their names; `sizes` are in bytes. Others count in `listing`
    as ignored, and all files as listed.

    `table` is the path of the table that names them, to whose folder names may be relative.
    """

    def __init__(self, root: str, table: str = "") -> None:
        self.listing = Listing()
        self.root = root
        self.sizes: dict[str, int | None] = {}
        for name, entry in walk(root, self.listing):
            if entry.kind == "file" and is_image(name):
                self.sizes[name] = entry.nbytes
            else:
                self.listing.ignored[other_file_kind(name)] += entry.kind == "file"
        super().__init__(self.sizes, root, table)


class BothFolders:
    """The images of two folders that one table names, as `PhotoNames`."""

    def __init__(self, files: FolderFiles, others: FolderFiles) -> None:
        self._both = (files, others)

    @property
    def example(self) -> str:
        return self._both[0].example

    def rank(self, written: str) -> int | None:
        ranks = [rank for files in self._both if (rank := files.rank(written)) is not None]
        return min(ranks, default=None)

    def looks_like(self, written: str) -> bool:
        return any(files.looks_like(written) for files in self._both)


class LabelTableSource:
    """A folder of images, flat or nested, and a table of names and targets, as on Kaggle. A `Source`.

    A name may be the path below the folder, or relative to a folder above it, or the file's own name, with or without
    suffix; names that differ only in form are matched one to one, and that is said. A row without a file is yielded
    under its name and becomes a reject, unless there are more of them than `max_bad` (0..1) of the rows: then the error
    explains how the names differ. A file without a row is ignored as unlabelled. As in a list, a name may
    also lead out of the folder (`..`, an absolute path, a URL), unless the folder or the table is behind a URL: then
    such a row is ignored as an unsafe name. Links inside the folder are followed, as in `ImageFolderSource`. `numbered`
    if all labels are integers. Holds the names of all files in memory.

    `elsewhere` is another folder whose images the table names too; these rows are left out here. `only_files`: rows
    without a file are left out, since the source of the other folder yields them. `also` is another table of the same
    folder, whose images are not unlabelled; `only_rows`: files without a row are not counted, since the source of that
    other table does. `listed` are folders that have been listed already, by path. `setting`
    names the table in messages, `known_classes` are those of the training part if it is one for validation, and `note`
    is a line for `target.about`. With `split`, only the rows of `part` are yielded; the source of train counts those
    of no part. `asks_for_split`, `group` and `hints_at_group` are as for `choose_columns`. `table` is the table, after
    an iteration.
    """

    unpacks = False
    files: Sequence[str] = ()

    def __init__(
        self,
        src: str,
        labels: str,
        columns: str | None,
        target: TargetSetting = AUTO,
        *,
        elsewhere: str | None = None,
        only_files: bool = False,
        only_rows: bool = False,
        also: str | None = None,
        listed: Mapping[str, FolderFiles] | None = None,
        known_classes: Sequence[str] = (),
        max_bad: float = 1.0,
        setting: str = "LABELS",
        note: str | None = None,
        split: SplitSetting | None = None,
        part: Part = "train",
        asks_for_split: bool = False,
        group: str | None = None,
        hints_at_group: bool = False,
    ) -> None:
        self.root = src
        self.listing = Listing()
        self._labels, self._setting, self._columns = labels, target, columns
        self._known_classes, self._max_bad, self._name, self._note = known_classes, max_bad, setting, note
        self._elsewhere, self._only_files, self._only_rows = elsewhere, only_files, only_rows
        self._also, self._listed = also, listed or {}
        self._split, self._part, self._asks_for_split = split, part, asks_for_split
        self._group, self._hints_at_group = group, hints_at_group

    def __iter__(self) -> Iterator[ImageRef]:
        self.listing = Listing()
        files = self._files(self.root)
        if not self._only_rows:
            self.listing.ignored.update(files.listing.ignored)
        others = None if self._elsewhere is None else self._files(self._elsewhere)
        table = TargetTable(
            self._labels,
            self._columns,
            self._setting,
            photos=files if others is None else BothFolders(files, others),
            known_classes=self._known_classes,
            name=self._name,
            split=self._split,
            part=self._part,
            asks_for_split=self._asks_for_split,
            group=self._group,
            hints_at_group=self._hints_at_group,
        )
        self.table = table
        self.listing.target = table.target()
        if self._note is not None:
            self.listing.target = replace(self.listing.target, about=(self._note, *self.listing.target.about))
        self.listing.numbered = table.numbered
        named: set[str] = set()  # the files of rows
        unknown: list[Row] = []
        rows = 0
        is_remote = is_url(self.root) or is_url(self._labels)
        for written, label, line in table:
            rows += 1
            name = written if written in files.sizes else self._find(files, written, line)
            if others is not None and self._find(others, written, line) is not None:
                if name is not None:
                    raise ResoluteError(
                        f"{self._labels}: line {line} names two files, got {written}, which both {self.root} and "
                        f"{others.root} hold, expected one; set VAL_LABELS to a table for VAL alone"
                    )
                continue
            if name is None and self._only_files:
                continue
            self.listing.listed += 1
            if name is not None:
                named.add(name)
            several = self.listing.target.several_words
            if self._setting.is_dropped(label, self._labels, name or written, line, several_words=several):
                self.listing.ignored["unlabelled"] += 1
                continue
            assert label is not None
            if name is None:
                unknown.append((written, label, line))
                continue
            yield ImageRef.file(name, label, files.sizes[name], line)
        yield from self._others(table, files, unknown, named, rows, is_remote=is_remote)
        if not self._only_rows:
            self.listing.listed += files.listing.listed - len(named)  # a file and its row count once
        if self._also is not None:
            rows_of_val = TargetTable(self._also, self._columns, photos=files, name="VAL_LABELS").rows()
            of_val = {name for written, _, line in rows_of_val if (name := self._find(files, written, line))} - named
            self.listing.listed -= len(of_val)
            named |= of_val
        if not self._only_rows:
            of_others = [(self._find(files, row[0], row[2]), part) for row, part in table.other_rows()]
            others_named = {name for name, _ in of_others if name is not None} - named
            left_out = sum(part is None for _, part in of_others)
            self.listing.ignored[LEFT_OUT] += left_out
            self.listing.listed += left_out - len(others_named)
            named |= others_named
            self.listing.ignored["unlabelled"] += len(files.sizes.keys() - named)
        self.listing.ignored += Counter()

    def _files(self, root: str) -> FolderFiles:
        return self._listed.get(root) or FolderFiles(root, self._labels)

    def _find(self, files: FolderFiles, written: str, line: int) -> str | None:
        try:
            return files.find(written.removeprefix("file://"))
        except AmbiguousName:
            raise ResoluteError(
                f"{self._labels}: line {line} names several files, got {written}, of which {files.root} holds more "
                "than one, expected a unique name; write the full path with its suffix, or remove the other files"
            ) from None

    def _others(
        self,
        table: TargetTable,
        files: FolderFiles,
        unknown: Sequence[Row],
        named: set[str],
        rows: int,
        *,
        is_remote: bool,
    ) -> Iterator[ImageRef]:
        """The images of the rows whose names no file has as they are written."""
        same = _one_to_one(files, unknown, named)
        missing: list[Row] = []
        renamed: list[tuple[str, str]] = []
        for written, label, line in unknown:
            name = same.get(written)
            if name is not None:
                named.add(name)
                renamed.append((written, name))
                yield ImageRef.file(name, label, files.sizes[name], line)
                continue
            below = safe_below(self.root, written)
            if below is None and is_remote:
                self.listing.ignored["unsafe names"] += 1
            elif below is None:
                try:
                    image = _named_image(self.root, written, label, line, is_remote=False)
                except StorageError:
                    if not _lacks_folder(self.root, written):
                        raise
                    row = (written, label, line)
                    raise StorageError(str(_not_there(self._labels, self.root, [row], 0, files, self._name))) from None
                if image.stored_as == MISSING:
                    missing.append((written, label, line))
                yield image
            else:
                if not is_image(written) and table.layout.names_have_suffixes:
                    raise ResoluteError(
                        f"{self._labels}: line {line} names no photo, got {written!a}, expected the name of an image "
                        f"file such as {files.example!a}; correct or remove the row"
                    )
                missing.append((written, label, line))
                if not is_text(written):
                    raise not_utf8(self._labels, line, repr(written))
                yield ImageRef.file(below or written, label, None, line)
        if renamed:
            self.listing.target = replace(
                self.listing.target, about=(*self.listing.target.about, _said(self._labels, renamed))
            )
        if len(missing) > max(self._max_bad > 0, self._max_bad * rows):
            raise _not_there(self._labels, self.root, missing, rows, files, self._name)


def _one_to_one(files: NameIndex, unknown: Sequence[Row], taken: set[str]) -> dict[str, str]:
    """{name as written: file} of names that differ from a file's in form only, one from each and none `taken`."""
    same = {written: name for written in dict.fromkeys(row[0] for row in unknown) if (name := files.same_form(written))}
    counts = Counter(same.values())
    return {written: name for written, name in same.items() if counts[name] == 1 and name not in taken}


def _said(table: str, renamed: Sequence[tuple[str, str]]) -> str:
    """The line about names that were matched although they differ in form."""
    written, name = renamed[0]
    what = " and ".join(differences(written, name)) or "the form"
    count = counted(len(renamed), "name")
    return f"{table}: {count} matched in spite of a difference ({what}), such as {written!a} and {name!a}"


def _not_there(
    table: str, root: str, missing: Sequence[Row], rows: int, files: NameIndex, setting: str
) -> ResoluteError:
    """The error that explains why names are not found."""
    source = "VAL" if setting == "VAL_LABELS" else "SRC"
    count = f"{len(missing)} of {rows} names are not in {root}" if rows else f"a name is not in {root}"
    for written, _, line in missing[:20]:
        elsewhere = None if is_url(root) or is_url(table) else _relative_to(written, root, table)
        if elsewhere is not None:
            return ResoluteError(
                f"{table}: {count}, got {written!a} in line {line}, which is relative to another folder, {elsewhere}; "
                f"use {source}={elsewhere}"
            )
    found = next(((row, near) for row in missing[:20] if (near := files.closest(row[0]))), None)
    if found is None:
        return ResoluteError(
            f"{table}: {count}, got {missing[0][0]!a} in line {missing[0][2]}, expected names such as "
            f"{files.example!a}; point {source} at the folder that holds these photos, or leave rows without a photo "
            "out of the table"
        )
    (written, _, line), (name, what) = found
    return ResoluteError(
        f"{table}: {count}, got {written!a} in line {line}, expected {name!a} (difference: {' and '.join(what)}); "
        f"{_remedy(what, source)}"
    )


def _remedy(what: Sequence[str], source: str) -> str:
    if what == ("a folder in front",):
        return f"write the names as in the folder, or point {source} at the folder to which they are relative"
    if what == ("leading zeros",):
        return "write the zeros (pandas drops them unless the column is read as text, dtype=str)"
    if what == ("the suffix",):
        return "write the photos' suffix, or none"
    return "write the names as in the folder"


def _relative_to(written: str, root: str, table: str) -> Path | None:
    """Another folder in which the file is: the table's, the working directory, or one above `root`; else None."""
    if safe_relative_path(written) is None:
        return None
    for folder in (Path(table).absolute().parent, Path.cwd(), *Path(root).absolute().parents):
        if (folder / written).is_file():
            return folder
    return None


def table_covers(labels: str, columns: str | None, files: FolderFiles, others: FolderFiles) -> bool:
    """Whether a table for the folder of `files` also names images that only the folder of `others` holds."""
    table = TargetTable(labels, columns, photos=BothFolders(files, others))
    return any(others.rank(name) is not None and files.rank(name) is None for name, _, _ in table.rows())


class LabelListSource:
    """A text file of `path label` lines, as ImageNet's train.txt, or a table with such columns. A `Source`.

    Paths are relative to the list's folder, or absolute. `numbered` if all labels are integers. Images behind URLs are
    not requested while listing (UNSEEN). A list of this machine may name any file of it; from one behind a URL, only
    paths below its folder and URLs of the same scheme are accepted. Names that are not there are treated as in
    `LabelTableSource`.
    """

    unpacks = False

    def __init__(
        self,
        src: str,
        columns: str | None,
        target: TargetSetting = AUTO,
        *,
        known_classes: Sequence[str] = (),
        max_bad: float = 1.0,
        setting: str = "SRC",
        split: SplitSetting | None = None,
        part: Part = "train",
        asks_for_split: bool = False,
        group: str | None = None,
        hints_at_group: bool = False,
    ) -> None:
        self._part = part
        self.root = without_query(src).rpartition("/")[0] or ("/" if src.startswith("/") else ".")
        self.listing = Listing()
        self.files: Sequence[str] = (src,)
        self._src, self._setting, self._max_bad, self._name = src, target, max_bad, setting
        self.table = TargetTable(
            src,
            columns,
            target,
            photos=_ListedFiles(self.root),
            known_classes=known_classes,
            name=setting,
            split=split,
            part=part,
            asks_for_split=asks_for_split,
            group=group,
            hints_at_group=hints_at_group,
        )

    def __iter__(self) -> Iterator[ImageRef]:
        self.listing = Listing()
        stamp = version_stamp(self._src)
        self.listing.target = self.table.target()
        self.listing.numbered = self.table.numbered
        root, is_remote = self.root, is_url(self.root)
        scheme = f"{root.partition('://')[0]}://"
        are_urls = True
        seen: set[Label] = set()  # classes that were checked: most rows have one of them
        other_forms = _OtherForms(root)
        rows, missing = 0, 0
        renamed: list[tuple[str, str]] = []
        examples: list[Row] = []  # of names that are not there
        for written, label, line in self.table:
            rows += 1
            self.listing.listed += 1
            name = written.removeprefix("./")
            if is_remote and (  # it must not name files of this machine
                "::" in name or not (name.startswith(scheme) if is_url(name) else safe_relative_path(name))
            ):
                self.listing.ignored["unsafe names"] += 1
                continue
            several = self.listing.target.several_words
            if label not in seen and self._setting.is_dropped(label, self._src, name, line, several_words=several):
                self.listing.ignored["unlabelled"] += 1
                continue
            assert label is not None
            image = None if is_remote or is_url(name) else _file_there(root, name, label, line)
            if image is None and (same := None if is_remote else other_forms.take(name)) is not None:
                renamed.append((written, same))
                image = _file_there(root, same, label, line)
            if image is None:
                image = self._named(name, label, line, is_remote=is_remote)
            if image.stored_as == MISSING:
                missing += 1
                if len(examples) < 20:
                    examples.append((written, label, line))
            if isinstance(label, str):
                seen.add(label)
            are_urls = are_urls and image.stored_as == UNSEEN
            yield image
        if renamed:
            self.listing.target = replace(
                self.listing.target, about=(*self.listing.target.about, _said(self._src, renamed))
            )
        if missing > max(self._max_bad > 0, self._max_bad * rows):
            raise self._explained(examples, missing, rows)
        if self._part == "train":
            left_out = sum(part is None for _, part in self.table.other_rows())
            self.listing.ignored[LEFT_OUT] += left_out
            self.listing.listed += left_out
            self.listing.ignored += Counter()
        self.listing.stamps = (stamp,) if are_urls else ()

    def _named(self, name: str, label: Label, line: int, *, is_remote: bool) -> ImageRef:
        """As `_named_image`. Raises `StorageError` if not even the folder of the image is there: it may come back."""
        try:
            return _named_image(self.root, name, label, line, is_remote=is_remote)
        except StorageError:
            if _lacks_folder(self.root, name):
                raise StorageError(str(self._explained([(name, label, line)], 1, 1))) from None
            raise

    def _explained(self, examples: Sequence[Row], count: int, rows: int) -> ResoluteError:
        """The error that explains why names are not found."""
        written, _, line = examples[0]
        written = written.removeprefix("file://")
        got = f"got {written!a} in line {line}"
        many = f"{count} of {rows} names are not there" if rows > 1 else "a name is not there"
        folder = Path(self.root, written).parent
        if written.startswith("/") and not folder.is_dir():
            return ResoluteError(
                f"{self._src}: {many}, {got}, which is an absolute path, as it begins with /, and there is no folder "
                f"{folder}, expected one; if the path is relative to another folder, use {self._name}=that folder and "
                f"LABELS={self._src}"
            )
        elsewhere = _relative_to(written, self.root, self._src)
        if elsewhere is not None:
            return ResoluteError(
                f"{self._src}: {many}, {got}, which is relative to another folder, {elsewhere}, expected a path "
                f"relative to the list's own folder; use {self._name}={elsewhere} LABELS={self._src}"
            )
        if not folder.is_dir():
            return ResoluteError(
                f"{self._src}: {many}, {got}, and there is no folder {folder}, expected a path relative to the list's "
                f"own folder; if the photos are elsewhere, use {self._name}=their folder and LABELS={self._src}"
            )
        return _not_there(self._src, self.root, examples, rows, _OtherForms(self.root).index(written), self._name)


class _ListedFiles:
    """The files that a list names, relative to the folder `root`, as `PhotoNames`."""

    def __init__(self, root: str) -> None:
        self._root = root

    @property
    def example(self) -> str:
        return ""

    def rank(self, written: str) -> int | None:
        if is_url(written):
            return EXACT
        if is_image(written):
            return EXACT if is_url(self._root) or _is_file(self._root, written) else WITHOUT_SUFFIX
        return None

    def looks_like(self, written: str) -> bool:
        return False


def _is_file(root: str, name: str) -> bool:
    try:
        return os.path.isfile(os.path.join(root, name))  # noqa: PTH118, PTH113  # why not Path: called for every cell
    except ValueError:
        return False


def _lacks_folder(root: str, name: str) -> bool:
    """Whether the folder of a file does not exist."""
    try:
        Path(root, name.removeprefix("file://")).parent.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        pass
    return False


def _named_image(root: str, name: str, label: Label, line: int, *, is_remote: bool) -> ImageRef:
    """The image that a label file names, relative to `root`, or by any path or URL. `is_remote`: `root` is a URL."""
    name = name.removeprefix("file://")
    if is_remote or is_url(name):
        return ImageRef(name, label, 0, "", -1, UNSEEN, -1, line)
    size = file_size(name if name.startswith("/") else f"{root}/{name}")
    return ImageRef.file(name, label, size, line)


def _file_there(root: str, name: str, label: Label, line: int) -> ImageRef | None:
    """The file that a list names, relative to `root`; None if it is not there at once (see `_named_image`)."""
    name = name.removeprefix("file://")
    try:
        size = os.stat(name if name.startswith("/") else f"{root}/{name}").st_size  # noqa: PTH116
    except (OSError, ValueError):
        return None
    return ImageRef.file(name, label, size, line)


class _OtherForms:
    """The files below a folder, by names that differ from theirs in form only."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._folders: dict[str, NameIndex] = {}
        self._taken: set[str] = set()

    def take(self, name: str) -> str | None:
        """The file whose path differs from `name` in form only; None if there is none, or several, or it is taken."""
        parts = [part for part in name.replace("\\", "/").split("/") if part not in ("", ".")]
        found = ""
        for part in () if ".." in parts else parts:
            index = self._listed(found)
            own = part if part in index else index.same_form(part)
            if own is None:
                return None
            found = f"{found}/{own}" if found else own
        if not found or found in self._taken or not _is_file(self._root, found):
            return None
        self._taken.add(found)
        return found

    def index(self, name: str) -> NameIndex:
        """The images in the folder of the file `name`."""
        folder = os.path.normpath(name.rpartition("/")[0]).removeprefix(".")
        images = sorted(image for image in self._listed(folder) if is_image(image))
        return NameIndex(f"{folder}/{image}" if folder else image for image in images)

    def _listed(self, folder: str) -> NameIndex:
        if folder not in self._folders:
            path = f"{self._root}/{folder}".rstrip("/")
            entries = list_folder(path) if path_kind(path) == "folder" else []
            self._folders[folder] = NameIndex(entry.name for entry in entries)
        return self._folders[folder]
