"""Tables of images and their targets: CSV, TSV, JSONL and Parquet files, and lists of paths and labels.

A CSV or TSV file is read by Python's `csv`, a list line by line: both name lines in errors and read file names in any
bytes (surrogateescape), which DuckDB's reader does not. All else in them has to be UTF-8. Parquet is read by DuckDB.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from itertools import chain, islice
from typing import Any, NamedTuple

from resolute.errors import ResoluteError

from .filesystem import file_name, open_file
from .image_ref import Label, SourceTarget
from .names import SUFFIXES, is_image
from .parquet_file import open_parquet
from .targets import AUTO, Cell, Meaning, Targets, TargetSetting

__all__ = [
    "LABEL_COLUMNS",
    "TargetTable",
    "as_cell",
    "column_names",
    "column_span",
    "is_text",
    "is_utf16",
    "not_utf8",
    "table_rows",
]

_UTF16_MARKS = ("\udcff\udcfe", "\udcfe\udcff")  # the byte-order marks, decoded with surrogateescape
_NAME_COLUMNS = (
    "id",
    "image",
    "image_id",
    "image_name",
    "filename",
    "file_name",
    "file",
    "path",
    "filepath",
    "image_path",
    "img",
    "name",
    "image index",
    "img_id",
    "img_name",
    "img_path",
    "photo",
)
LABEL_COLUMNS = (
    "label",
    "labels",
    "breed",
    "class",
    "category",
    "target",
    "species",
    "kind",
    "diagnosis",
    "class_name",
    "tags",
    "finding labels",
    "attribute_ids",
    "targets",
)
_DELIMITERS = (",", "\t", ";", "|")
_PARQUET_ROWS = 1 << 14  # in memory at once
_LINES = 1 << 10  # of a list, likewise

# A plain tuple, since a table may have a hundred million rows: the name of the image, the cells of the columns of
# targets, and the line in the file (in Parquet the row), from 1.
Row = tuple[str, tuple[Cell, ...], int]


class TargetTable:
    """A table of targets. `target` reads all of it; iterating reads it again: the name, the target (None: it has
    none) and the line of each row.
    """

    def __init__(self, path: str, columns: str | None, setting: TargetSetting = AUTO) -> None:
        self._path, self._columns, self._setting = path, columns, setting
        self.meaning: Meaning | None = None  # when `target` has returned

    def target(self) -> SourceTarget:
        """The targets of the file. Raises `ResoluteError` for a file that is unreadable, malformed, or without rows."""
        with _open_rows(self._path, self._columns) as (layout, rows):
            targets = Targets(
                self._path,
                layout.names,
                self._setting,
                is_text=layout.is_text,
                are_chosen=self._columns is not None,
            )
            add = targets.add
            for name, cells, line in rows:
                add(name, cells, line)
        self.meaning = targets.meaning()
        return self.meaning.source_target()

    @property
    def numbered(self) -> bool:
        """Whether all labels are class numbers."""
        return self.meaning is not None and self.meaning.numbered

    def __iter__(self) -> Iterator[tuple[str, Label | None, int]]:
        assert self.meaning is not None
        label, are_classes = self.meaning.label, self.meaning.are_plain_classes
        with _open_rows(self._path, self._columns) as (_, rows):
            for name, cells, line in rows:
                yield name, (cells[0] or None) if are_classes else label(cells, line), line  # type: ignore[misc]


def table_rows(path: str, columns: str | None) -> Iterator[Row]:
    """Yield the rows of a table or list; blank ones are skipped.

    `columns` names the image and target columns, "id,breed", or gives their positions from 0, "0,1", in a table without
    a header; by default they are recognised by usual names. Raises `ResoluteError` for a file that is unreadable,
    malformed or without rows.
    """
    with _open_rows(path, columns) as (_, rows):
        yield from rows


class _Layout(NamedTuple):
    """The columns of a table: the positions of the image's and the targets', and the latter's names."""

    image: int
    targets: tuple[int, ...]
    names: tuple[str, ...]
    has_header: bool = True
    is_text: bool = False


@contextmanager
def _open_rows(path: str, columns: str | None) -> Iterator[tuple[_Layout, Iterator[Row]]]:
    """The columns and the rows of a file, as `table_rows`."""
    name = file_name(path).lower()
    if name.endswith(".parquet"):
        with open_parquet(path) as file:
            layout = _layout(path, list(file.types), columns)
            wanted = [_quoted(list(file.types)[i]) for i in (layout.image, *layout.targets)]
            yield layout, _not_empty(path, _typed_rows(path, file.rows(wanted, _PARQUET_ROWS)), "a file without rows")
        return
    with (
        open_file(path, forward=True) as raw,
        io.TextIOWrapper(raw, encoding="utf-8-sig", errors="surrogateescape", newline="") as text,
    ):
        first = text.readline()
        if is_utf16(first):
            raise not_utf8(path, 1, "UTF-16")
        lines = chain([first], text)
        got = "only a header" if first.strip() else "an empty file"
        if name.endswith((".jsonl", ".ndjson")):
            first_row = _json_row(path, first, 1) if first.strip() else {}
            layout = _layout(path, list(first_row), columns) if first_row else _Layout(0, (1,), ("label",))
            keys = [list(first_row)[i] for i in (layout.image, *layout.targets)] if first_row else []
            yield layout, _not_empty(path, _json_rows(path, lines, keys), got)
        elif columns is None and not name.endswith((".csv", ".tsv")):
            layout = _Layout(0, (1,), ("label",), has_header=False, is_text=True)
            yield layout, _not_empty(path, _lines(path, lines), got)
        else:
            delimiter = max(_DELIMITERS, key=first.count)
            header = next(csv.reader([first], delimiter=delimiter), [])
            layout = _layout_of_text(path, header, columns)
            yield layout, _not_empty(path, _table(path, lines, delimiter, layout), got)


def _not_empty(path: str, rows: Iterator[Row], got: str) -> Iterator[Row]:
    """The rows. Raises `ResoluteError` if there are none."""
    first = next(rows, None)
    if first is None:
        raise ResoluteError(f"{path}: no rows, got {got}, expected an image and its label per row; correct it")
    return chain([first], rows)


def _check_encoding(path: str, cells: Iterable[Cell], line: int) -> None:
    for cell in cells:
        if isinstance(cell, str) and not is_text(cell):
            raise not_utf8(path, line, repr(cell))


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


# ---- columns


def _layout(path: str, names: Sequence[str], columns: str | None) -> _Layout:
    """The columns of a table with these names."""
    if columns is not None:
        positions, _ = _positions(path, names, columns)
        return _Layout(positions[0], tuple(positions[1:]), tuple(names[i] for i in positions[1:]))
    image, label = _usual_columns(names)
    if image is not None and label is not None:
        return _Layout(image, (label,), (names[label],))
    rest = tuple(i for i, name in enumerate(names) if i != image and name)  # pandas writes a column without a name
    if image is None or not rest:
        raise ResoluteError(
            f"{path}: unrecognised columns, got {', '.join(names)[:200]}, expected names such as id,label; name the "
            "two with COLUMNS=image,label, or by position, COLUMNS=0,1, if there is no header"
        )
    return _Layout(image, rest, tuple(names[i] for i in rest))


def _layout_of_text(path: str, header: Sequence[str], columns: str | None) -> _Layout:
    """The columns of a CSV or TSV file with that first row, which may be data."""
    names = [name.strip() for name in header]
    if columns is not None:
        positions, are_names = _positions(path, names, columns)
        is_header = are_names or None not in _usual_columns(names) or names[positions[0]].lower() in _NAME_COLUMNS
        of_targets = tuple(names[i] if is_header else str(i) for i in positions[1:])
        return _Layout(positions[0], tuple(positions[1:]), of_targets, is_header, is_text=True)
    if None in _usual_columns(names) and len(names) == 2 and is_image(names[0]):
        return _Layout(0, (1,), ("label",), has_header=False, is_text=True)
    if not any(names):  # an empty file: `_not_empty` says so
        return _Layout(0, (1,), ("label",), is_text=True)
    return _layout(path, names, None)._replace(is_text=True)


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


def _quoted(column: str) -> str:
    return '"' + column.replace('"', '""') + '"'


# ---- rows


def as_cell(value: Any, where: str) -> Cell:
    """A value of JSON or Parquet as a cell. Raises `ResoluteError`, naming `where`, for what cannot be a target."""
    if isinstance(value, list) and all(isinstance(item, str | int | float) for item in value):
        return value
    if isinstance(value, Decimal):
        return float(value)
    if value is None or isinstance(value, str | int | float):
        return value
    raise ResoluteError(
        f"{where}: got {str(value)[:80]}, expected a text, a number or a list of these as a target; correct it, or "
        "name the columns with COLUMNS=image,label"
    )


def _typed_rows(path: str, rows: Iterable[Sequence[Any]]) -> Iterator[Row]:
    for number, (name, *values) in enumerate(rows, start=1):
        yield _image_name(path, name, number), tuple(as_cell(each, f"{path}: line {number}") for each in values), number


def _json_rows(path: str, lines: Iterable[str], keys: Sequence[str]) -> Iterator[Row]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            row = _json_row(path, line, number)
            cells = tuple(as_cell(row.get(key), f"{path}: line {number}") for key in keys[1:])
            _check_encoding(path, cells, number)
            yield _image_name(path, row.get(keys[0]), number), cells, number


def _json_row(path: str, line: str, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if isinstance(row, dict):
        return row
    raise ResoluteError(
        f"{path}: line {number} is not a row, got {line.strip()[:80]!r}, expected a JSON object such as "
        '{"file_name": "a.jpg", "label": "cat"}; correct it'
    )


def _image_name(path: str, value: Any, number: int) -> str:
    if isinstance(value, str | int) and str(value):
        return str(value)
    raise ResoluteError(f"{path}: line {number}: got {value!r} as the image's name, expected a text; correct it")


def _table(path: str, lines: Iterable[str], delimiter: str, layout: _Layout) -> Iterator[Row]:
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    image, targets = layout.image, layout.targets
    last, only = max(image, *targets), targets[0] if len(targets) == 1 else None
    fields = 0
    while True:
        line = rows.line_num + 1  # an open quote swallows later lines, and the error is where the row begins
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
        _check_encoding(path, cells, line)
        for cell in cells:
            if "\n" in cell:  # names may hold line breaks, as file names may
                raise ResoluteError(
                    f"{path}: line {line} has an open quote, got {cell[:80]!r}, expected a label in one line; "
                    "correct it"
                )
        yield name, cells, line


def _lines(path: str, lines: Iterator[str]) -> Iterator[Row]:
    number = 1
    while block := list(islice(lines, _LINES)):
        usual = _USUAL_LINE.findall("".join(block))
        if len(usual) == len(block):  # as nearly always, and several times as fast
            for name, label in usual:
                yield name, (label,), number
                number += 1
            continue
        for line in block:
            if line := line.strip():
                yield *_name_and_label(path, line, number), number
            number += 1


def _name_and_label(path: str, line: str, number: int) -> tuple[str, tuple[str]]:
    split = _split(line)
    if split is None:
        raise ResoluteError(
            f"{path}: line {number} is not an image and its label, got {line[:80]!r}, expected a form such as "
            "'cat/1.jpg 0' with an image suffix; correct it"
        )
    _check_encoding(path, split[1:], number)
    return split[0], (split[1],)


# Most lines; what it finds in them is what `_split` finds.
_USUAL_LINE = re.compile(
    rf'^([^\s"]+(?:{"|".join(map(re.escape, sorted(SUFFIXES)))}))[ \t]([!#-+\--~]+)\r?$',
    re.ASCII | re.IGNORECASE | re.MULTILINE,
)
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
    for separator in ("\t", None):  # the usual forms, and the fastest check
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
