"""Label files: tables (CSV, TSV) of a folder's images, and lists of image paths and labels. Both are sources.

A file is read twice: for what its targets mean (`target_cells`), then row by row. Errors name the line, counted from 1.
Labels are UTF-8; file names may hold any bytes (surrogateescape).
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import NamedTuple

from resolute.errors import ResoluteError

from .filesystem import file_name, file_size, open_file, without_query
from .image_folder import walk
from .image_ref import UNSEEN, ImageRef, Label, SourceTarget, is_url
from .names import is_image, other_file_kind, safe_below, safe_relative_path
from .targets.target_cells import AUTO, Cells, Meaning, TargetSetting, describe_label, is_number

__all__ = [
    "LABEL_COLUMNS", "LabelListSource", "LabelTableSource", "TargetTable", "column_names", "column_span", "is_text",
    "is_utf16", "label_rows", "not_utf8", "table_covers",
]  # fmt: skip

_UTF16_MARKS = ("\udcff\udcfe", "\udcfe\udcff")  # the byte-order marks, decoded with surrogateescape
_NAME_COLUMNS = ("id", "image", "image_id", "image_name", "filename", "file_name", "file", "path", "filepath",
                 "image_path", "img", "name", "image index", "img_id", "img_name", "img_path", "photo")  # fmt: skip
LABEL_COLUMNS = ("label", "labels", "breed", "class", "category", "target", "species", "kind", "diagnosis",
                 "class_name", "tags", "finding labels", "attribute_ids", "targets")  # fmt: skip
_DELIMITERS = (",", "\t", ";", "|")
_EXAMPLES = 3  # rows shown of a table


class LabelTableSource:
    """A folder of images, flat or nested, and a CSV or TSV file of names and targets, as on Kaggle. A `Source`.

    A name may be the path below the folder or the file's own name, with or without suffix. A row without a file is
    yielded under its name and becomes a reject; a file without a row is ignored as unlabelled. As in a list, a name may
    also lead out of the folder (`..`, an absolute path, a URL), unless the folder or the table is behind a URL: then
    such a row is ignored as an unsafe name. Links inside the folder are followed, as in `ImageFolderSource`. `numbered`
    if all labels are integers. Holds the names of all files in memory.

    `elsewhere` is another folder whose images the table names too; these rows are left out here. `only_files`: rows
    without a file are left out, since the source of the other folder yields them.
    """

    label_names: Sequence[str] | None = None
    copies = False

    def __init__(
        self, src: str, labels: str, columns: str | None, setting: TargetSetting = AUTO, *,
        elsewhere: str | None = None, only_files: bool = False,
    ) -> None:  # fmt: skip
        self.root = src
        self.ignored: Counter[str] = Counter()
        self.numbered = True
        self.target = SourceTarget()
        self._labels, self._table, self._setting = labels, TargetTable(labels, columns, setting), setting
        self._elsewhere, self._only_files = elsewhere, only_files

    def __iter__(self) -> Iterator[ImageRef]:
        self.ignored.clear()
        self.numbered = True
        files = _Files(self.root, self.ignored)
        others = None if self._elsewhere is None else _Files(self._elsewhere, Counter())
        labelled: set[str] = set()
        is_remote = is_url(self.root) or is_url(self._labels)
        self.target = self._table.target()
        for name_in_table, label, line in self._table:
            written = name_in_table.removeprefix("./")
            if others is not None and written in others:
                if written in files:
                    raise ResoluteError(
                        f"{self._labels}: line {line} names two files, got {written}, which both {self.root} and "
                        f"{others.root} hold, expected one; set VAL_LABELS to a table for VAL alone"
                    )
                continue
            if written not in files:
                if self._only_files:
                    continue
                if not is_text(written):
                    raise not_utf8(self._labels, line, repr(written))
                below = safe_below(self.root, written)
                if below is None:
                    image = None if is_remote or label is None else _named_image(
                        self.root, written, label, line, is_remote=False
                    )  # fmt: skip
                    if image is not None:
                        self.numbered &= _is_numbered(image.label)
                        yield image
                    else:
                        self.ignored["unlabelled" if label is None else _unusable(written)] += 1
                    continue
                written = below
            name = files.name(written)
            if name is None:
                raise ResoluteError(
                    f"{self._labels}: line {line} names several files, got {written}, of which {self.root} holds "
                    "more than one, expected a unique name; write the full path with its suffix, or remove the other "
                    "files"
                )
            if self._setting.is_dropped(label, self._labels, name, line):
                self.ignored["unlabelled"] += name not in files.sizes
                continue
            assert label is not None
            labelled.add(name)
            self.numbered &= _is_numbered(label)
            yield ImageRef.file(name, label, files.sizes.get(name), line)
        self.ignored["unlabelled"] += len(files.sizes.keys() - labelled)
        self.ignored += Counter()


class _Files:
    """The image files below a folder, by any form of their names; `sizes` are in bytes. Counts others in `ignored`."""

    def __init__(self, root: str, ignored: Counter[str]) -> None:
        self.root = root
        self.sizes: dict[str, int | None] = {}
        self._aliases: dict[str, str | None] = {}  # other forms of a name; None: ambiguous
        for name, entry in walk(root, ignored):
            if entry.kind == "file" and is_image(name):
                self.sizes[name] = entry.nbytes
                for alias in {_stem(name), entry.name, _stem(entry.name)} - {name}:
                    self._aliases[alias] = name if alias not in self._aliases else None
            else:
                ignored[other_file_kind(name)] += entry.kind == "file"

    def __contains__(self, written: str) -> bool:
        written = self._below(written)
        return written in self.sizes or written in self._aliases

    def name(self, written: str) -> str | None:
        """The file's name; `written` itself if there is none, None if there are several."""
        written = self._below(written)
        return written if written in self.sizes else self._aliases.get(written, written)

    def _below(self, written: str) -> str:
        return written.removeprefix(f"{self.root.rstrip('/')}/")


def table_covers(labels: str, columns: str | None, src: str, val: str) -> bool:
    """Whether a table for the folder `src` also names images of the folder `val` that `src` does not hold."""
    files, others = _Files(src, Counter()), _Files(val, Counter())
    names = (name.removeprefix("./") for name, _, _ in label_rows(labels, columns))
    return any(name in others and name not in files for name in names)


def _stem(name: str) -> str:
    return name[: name.rindex(".")]


class LabelListSource:
    """A text file of `path label` lines, as ImageNet's train.txt, or a CSV or TSV file with such columns. A `Source`.

    Paths are relative to the list's folder, or absolute. `numbered` if all labels are integers. Images behind URLs are
    not requested while listing (UNSEEN). A list of this machine may name any file of it; from one behind a URL, only
    paths below its folder and URLs of the same scheme are accepted.
    """

    label_names: Sequence[str] | None = None
    copies = False

    def __init__(self, src: str, columns: str | None, setting: TargetSetting = AUTO) -> None:
        self.root = without_query(src).rpartition("/")[0] or ("/" if src.startswith("/") else ".")
        self.ignored: Counter[str] = Counter()
        self.numbered = True
        self.target = SourceTarget()
        self._table, self._src, self._setting = TargetTable(src, columns, setting), src, setting

    def __iter__(self) -> Iterator[ImageRef]:
        self.ignored.clear()
        self.numbered = True
        self.target = self._table.target()
        root, is_remote = self.root, is_url(self.root)
        scheme = f"{root.partition('://')[0]}://"
        seen: set[Label] = set()  # classes that were checked: most rows have one of them
        for written, label, line in self._table:
            name = written.removeprefix("./")
            # why: a remote list must not name files of this machine
            if is_remote and (
                "::" in name or not (name.startswith(scheme) if is_url(name) else safe_relative_path(name))
            ):
                self.ignored[_unusable(name)] += 1
                continue
            if label not in seen and self._setting.is_dropped(label, self._src, name, line):
                self.ignored["unlabelled"] += 1
                continue
            assert label is not None
            image = _named_image(root, name, label, line, is_remote=is_remote)
            if image is None:
                self.ignored[_unusable(name)] += 1
                continue
            if label not in seen:
                self.numbered &= _is_numbered(label)
                if isinstance(label, str):
                    seen.add(label)
            yield image


def _named_image(root: str, name: str, label: Label, line: int, *, is_remote: bool) -> ImageRef | None:
    """The image that a label file names, relative to `root`, or by any path or URL; None for a Windows path.

    `is_remote`: `root` is a URL.
    """
    name = name.removeprefix("file://")
    if is_remote or is_url(name):
        return ImageRef(name, label, 0, "", -1, UNSEEN, -1, line)
    size = file_size(name if name.startswith("/") else f"{root}/{name}")
    return None if size is None and "\\" in name else ImageRef.file(name, label, size, line)


def _unusable(name: str) -> str:
    """The kind under which a name that is not read is counted."""
    return "names with backslashes (write / instead)" if "\\" in name else "unsafe names"


def _is_numbered(label: Label) -> bool:
    """Whether all labels are class numbers; values have none."""
    if isinstance(label, str):
        return is_number(label)
    return all(isinstance(each, str) and is_number(each) for each in label)


# Plain tuples, since a table may have a hundred million rows: the name of the image, the cells of the target columns or
# the target (None: the cell is blank), and the line in the file, from 1.
LabelRow = tuple[str, tuple[str, ...], int]
TargetRow = tuple[str, Label | None, int]


class TargetTable:
    """A table or list of targets. `target` reads all of it; iterating reads it again, row by row."""

    def __init__(self, path: str, columns: str | None, setting: TargetSetting = AUTO) -> None:
        self._path, self._columns, self._setting = path, columns, setting
        self.meaning: Meaning | None = None  # when `target` has returned

    def target(self) -> SourceTarget:
        """The targets of the file. Raises `ResoluteError` for a file that is unreadable, malformed, or without rows."""
        first: list[LabelRow] = []
        with _open_rows(self._path, self._columns) as (layout, rows):
            cells = Cells(self._path, layout.names, are_chosen=self._columns is not None)
            for row in rows:
                cells.add(row[1], row[2])
                if len(first) < _EXAMPLES:
                    first.append(row)
        self.meaning = meaning = cells.meaning(self._setting)
        return SourceTarget(
            kind=meaning.kind, names=meaning.names, units=meaning.units, classes=meaning.classes,
            columns=meaning.columns, separator=meaning.separator, about=tuple(_about(meaning, first)),
        )  # fmt: skip

    def __iter__(self) -> Iterator[TargetRow]:
        assert self.meaning is not None
        label = self.meaning.label
        with _open_rows(self._path, self._columns) as (_, rows):
            for name, cells, line in rows:
                yield name, label(cells, line), line


def _about(meaning: Meaning, first: Sequence[LabelRow]) -> Iterator[str]:
    """The recognised targets of a table, and its first rows."""
    values = "a number" if len(meaning.names) == 1 else f"{len(meaning.names)} numbers"
    what = {"class": "a class", "labels": "any number of labels", "values": values}[meaning.kind]
    why = f": {meaning.why}" if meaning.why else ", as set by TARGET"
    yield f"{meaning.path}: {what} for each of {meaning.rows} photos (TARGET={meaning.kind}){why}"
    for name, cells, line in first:
        yield f"  line {line}: {name}: {describe_label(meaning.label(cells, line), meaning.names, meaning.units)}"


def is_text(text: str) -> bool:
    """Whether `text`, decoded with surrogateescape, was valid UTF-8."""
    return text.isascii() or not any("\ud800" <= sign <= "\udfff" for sign in text)


def is_utf16(text: str) -> bool:
    """Whether the beginning of a file, decoded as UTF-8 with surrogateescape, is UTF-16."""
    return text.startswith(_UTF16_MARKS) or "\0" in text


def not_utf8(path: object, line: int, got: str) -> ResoluteError:
    """The error for a file in another encoding; `line` counts from 1."""
    return ResoluteError(
        f"{path}: not UTF-8, line {line}: got {got}, expected UTF-8; save it as UTF-8 (for example with "
        "`iconv -f latin1 -t utf-8`, or -f utf-16)"
    )


class _Layout(NamedTuple):
    """The columns of a table: the positions of the image's and the targets', and the latter's names."""

    image: int
    targets: tuple[int, ...]
    names: tuple[str, ...]
    has_header: bool


def label_rows(path: str, columns: str | None) -> Iterator[LabelRow]:
    """Yield the rows of a CSV or TSV file, or of lines of path and label; blank ones are skipped.

    `columns` names the image and target columns, "id,breed", or gives their positions from 0, "0,1", in a table without
    a header; by default they are recognised by usual names. Labels are UTF-8; names may hold other bytes
    (surrogateescape), as file names may. Raises `ResoluteError` for a file that is unreadable, malformed or without
    rows.
    """
    with _open_rows(path, columns) as (_, rows):
        yield from rows


@contextmanager
def _open_rows(path: str, columns: str | None) -> Iterator[tuple[_Layout, Iterator[LabelRow]]]:
    """The columns and the rows of a file, as `label_rows`."""
    with (
        open_file(path, forward=True) as raw,
        io.TextIOWrapper(raw, encoding="utf-8-sig", errors="surrogateescape", newline="") as text,
    ):
        first = text.readline()
        if is_utf16(first):
            raise not_utf8(path, 1, "UTF-16")
        lines = chain([first], text)
        delimiter = max(_DELIMITERS, key=first.count)
        header = next(csv.reader([first], delimiter=delimiter), [])
        is_table = file_name(path).lower().endswith((".csv", ".tsv"))
        layout = _layout(path, header, columns, is_table)
        if layout is not None:
            rows = _table(path, lines, delimiter, layout)
        else:
            rows = _lines(path, lines, header if is_table else None)
        yield layout or _Layout(0, (1,), ("label",), has_header=False), _checked(path, rows, first)


def _checked(path: str, rows: Iterator[LabelRow], first: str) -> Iterator[LabelRow]:
    """The rows. Raises `ResoluteError` for cells in another encoding, and without rows; `first` is the first line."""
    row = None
    for row in rows:
        for cell in row[1]:
            if not cell.isascii() and not is_text(cell):
                raise not_utf8(path, row[2], repr(cell))
        yield row
    if row is None:
        got = "only a header" if first.strip() else "an empty file"
        raise ResoluteError(f"{path}: no rows, got {got}, expected an image and its label per row; correct it")


def _layout(path: str, header: list[str], columns: str | None, is_table: bool) -> _Layout | None:
    """The columns of a table with that first row; None for a list, which has none."""
    names = [name.strip() for name in header]
    image, label = _usual_columns(names)
    if columns is not None:
        positions, are_names = _positions(path, names, columns)
        is_header = are_names or None not in (image, label) or names[positions[0]].lower() in _NAME_COLUMNS
        targets = tuple(names[i] if is_header else str(i) for i in positions[1:])
        return _Layout(positions[0], tuple(positions[1:]), targets, is_header)
    if not is_table:
        return None
    if image is not None and label is not None:
        return _Layout(image, (label,), (names[label],), has_header=True)
    if len(names) == 2 and is_image(names[0]):
        return _Layout(0, (1,), ("label",), has_header=False)
    rest = tuple(i for i, name in enumerate(names) if i != image and name)  # why: pandas writes a column without a name
    return _Layout(image, rest, tuple(names[i] for i in rest), has_header=True) if image is not None and rest else None


def _positions(path: str, names: Sequence[str], columns: str) -> tuple[list[int], bool]:
    """(the positions of `columns` in a table with the first row `names`, whether they are named there)."""
    wanted = column_names(columns)
    by_name = [column_span(each, lambda name: names.index(name) if name in names else None) for each in wanted]
    by_position = [column_span(each, lambda text: _position(text, len(names))) for each in wanted]
    are_names = None not in by_name
    spans = by_name if are_names else by_position
    if None in spans:
        spans = by_name if any(by_name) else by_position
        raise ResoluteError(
            f"{path}: has no column {wanted[spans.index(None)]}, got {', '.join(names)}, expected {columns}; correct "
            "COLUMNS (for a table without a header use positions from 0, such as COLUMNS=0,1)"
        )
    positions = [i for span in spans for i in span or ()]
    if len(set(positions)) < len(positions):
        twice = next(names[i] for i in positions if positions.count(i) > 1)
        raise ResoluteError(f"{path}: got column {twice} twice, expected each column once; correct COLUMNS={columns}")
    return positions, are_names


def column_span(text: str, find: Callable[[str], int | None]) -> range | None:
    """The positions that `name` or `first..last` means; None if a column is missing."""
    position = find(text)
    if position is not None:
        return range(position, position + 1)
    ends = [find(end.strip()) for end in text.split("..")]
    if len(ends) != 2 or ends[0] is None or ends[1] is None or ends[0] > ends[1]:
        return None
    return range(ends[0], ends[1] + 1)


def _position(text: str, columns: int) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and int(text) < columns else None


def column_names(columns: str) -> list[str]:
    """Parse `"id,breed"` to ["id", "breed"]; a name with a comma is in quotes. Raises `ResoluteError` unless there are
    two or more names."""
    names = [name.strip() for name in next(csv.reader([columns], skipinitialspace=True), [])]
    if len(names) < 2 or not all(names):
        raise ResoluteError(
            f"COLUMNS: not two names, got {columns!r}, expected the image's and the target's column such as id,breed "
            "(or their positions, such as 0,1; or several targets, such as id,first..last); correct COLUMNS"
        )
    return names


def _usual_columns(header: Sequence[str]) -> tuple[int | None, int | None]:
    """Positions of the image and the label column, recognised by their names; None for one that is missing."""
    lower = [name.lower() for name in header]
    image, label = (
        next((lower.index(name) for name in usual if name in lower), None) for usual in (_NAME_COLUMNS, LABEL_COLUMNS)
    )
    return image, label


def _table(path: str, lines: Iterable[str], delimiter: str, layout: _Layout) -> Iterator[LabelRow]:
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    image, targets = layout.image, layout.targets
    last, only = max(image, *targets), targets[0] if len(targets) == 1 else None
    fields = 0
    while True:
        line = rows.line_num + 1  # why: an open quote swallows later lines, and the error is where the row begins
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            raise ResoluteError(
                f"{path}: line {line} is not a table row, got {error}, expected fields separated by {delimiter!r} and "
                "balanced quotes; correct it"
            ) from None
        if line == 1:
            fields = len(row)
            if layout.has_header:
                continue
        name = row[image].strip() if len(row) > last else ""
        if not name and not any(row):
            continue
        if not name:
            raise ResoluteError(
                f"{path}: line {line} is incomplete, got {delimiter.join(row)[:80]!r}, expected {fields} fields; "
                "correct it"
            )
        cells = (row[only].strip(),) if only is not None else tuple([row[i].strip() for i in targets])
        for cell in cells:
            if "\n" in cell:  # why not for names: file names may hold line breaks
                raise ResoluteError(
                    f"{path}: line {line} has an open quote, got {cell[:80]!r}, expected a label in one line; "
                    "correct it"
                )
        yield name, cells, line


def _lines(path: str, lines: Iterable[str], header: list[str] | None) -> Iterator[LabelRow]:
    for number, line in enumerate(lines, start=1):
        line = line.strip()
        if not line:
            continue
        split = _split(line)
        if split is None and header is not None and number == 1:
            raise ResoluteError(
                f"{path}: unrecognised columns, got {', '.join(header)[:200]}, expected names "
                "such as id,label; name the two with COLUMNS=image,label, or by position, COLUMNS=0,1, if there is no "
                "header"
            )
        if split is None:
            raise ResoluteError(
                f"{path}: line {number} is not an image and its label, got {line[:80]!r}, expected a form such as "
                "'cat/1.jpg 0' with an image suffix; correct it"
            )
        yield split[0], (split[1],), number


_SEPARATOR = re.compile(r"\s*,\s*|\s+")
_QUOTED_PATH = re.compile(r'"([^"]+)"(?:\s*,\s*|\s+)(.+)')


def _split(line: str) -> tuple[str, str] | None:
    """(path, label) of a line, either of them with spaces or in quotes, the label perhaps empty; None if `line` has no
    such form.

    They are separated at a tab, otherwise at the last space or comma that follows an image suffix.
    """
    if quoted := _QUOTED_PATH.fullmatch(line):
        path, label = quoted.groups()
        return _unquoted(path, label) if is_image(path) else None
    for separator in ("\t", None):  # why: the usual forms, and the fastest check
        parts = line.rsplit(separator, 1)
        if len(parts) == 2 and is_image(parts[0].strip()):
            return _unquoted(parts[0].strip(), parts[1].strip())
    for match in reversed(list(_SEPARATOR.finditer(line))):
        if is_image(line[: match.start()]):
            return _unquoted(line[: match.start()], line[match.end() :])
    return _unquoted(line, "") if is_image(line) else None


def _unquoted(path: str, label: str) -> tuple[str, str] | None:
    if path.startswith('"'):
        return None
    if label.startswith('"'):
        if len(label) < 2 or not label.endswith('"'):
            return None
        label = label[1:-1].strip()
    return path, label
