"""The forms of tables, as they lie in files: rows of cells with the lines that they are in.

A CSV or TSV file is read by Python's `csv`, a list line by line: both name lines in errors and read file names in any
bytes (surrogateescape), which DuckDB's reader does not. All else in them has to be UTF-8. Parquet is read by DuckDB.

Every row of a table has as many fields as the first one. Source of COCO JSON: https://cocodataset.org, "Data format".
"""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain, islice
from typing import Any, Protocol

from resolute.errors import ResoluteError
from resolute.prep.sources.filesystem import open_file
from resolute.prep.sources.names import SUFFIXES, is_image
from resolute.prep.sources.parquet_file import open_parquet

from .photo_names import NameIndex

__all__ = [
    "CocoForm",
    "DelimitedForm",
    "JoinedForm",
    "JsonForm",
    "ListForm",
    "ParquetForm",
    "TableForm",
    "WordForm",
    "checked_name",
    "is_document",
    "is_text",
    "is_utf16",
    "not_utf8",
    "text_lines",
]

_UTF16_MARKS = ("\udcff\udcfe", "\udcfe\udcff")  # the byte-order marks, decoded with surrogateescape
_LINES = 1 << 10  # of a list, in memory at once
_PARQUET_ROWS = 1 << 14  # likewise

# The beginnings of files that are no text.
_BINARY = {
    "PK\3\4": "an Excel file or a zip archive",
    "\udcd0\udccf\x11": "an old Excel file",
    "\x1f\udc8b": "a file compressed by gzip",
    "MATLAB": "a MATLAB file",
    "\udc89HDF": "an HDF5 file",
    "\udc80\4": "a Python pickle",
    "\udc80\5": "a Python pickle",
    "\udc93NUMPY": "a NumPy file",
    "SQLite format": "an SQLite database",
    "<": "XML or HTML",
}

csv.field_size_limit(sys.maxsize)  # why: cells may hold masks of any length


class TableForm(Protocol):
    """A table in a file. `header` are the names of the columns, None if the form has none or the first row may be one;
    `is_text`: numbers and lists are written as text."""

    path: str
    is_text: bool

    @property
    def header(self) -> Sequence[str] | None: ...

    def rows(self, wanted: Sequence[int] | None = None) -> Iterator[tuple[int, Sequence[Any]]]:
        """Yield the line of each row, from 1 (in Parquet and COCO JSON the row), and its cells, all or the `wanted`
        ones. Raises `ResoluteError` for a file that is unreadable or malformed."""
        ...


# ---- text


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


def checked_name(path: str, value: Any, line: int) -> str:
    """The cell `value` as the name of an image. Raises `ResoluteError` for what no file can be called."""
    name = str(value) if isinstance(value, str | int) and not isinstance(value, bool) else ""
    if not name:
        raise ResoluteError(f"{path}: line {line}: got {value!r} as the image's name, expected a text; correct it")
    if "\0" in name or not _is_encodable(name):
        what = "a NUL (\\0)" if "\0" in name else "half a character (a lone surrogate)"
        raise ResoluteError(
            f"{path}: line {line}: got {name[:80]!r} as the image's name, which holds {what}, expected the name of a "
            "file; correct it"
        )
    return name


def _is_encodable(name: str) -> bool:
    """Whether `name` has bytes, valid UTF-8 or not, as names of files have."""
    try:
        return name.isascii() or bool(name.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError:
        return False


@contextmanager
def text_lines(path: str) -> Iterator[Iterator[str]]:
    """The lines of a text file. Raises `ResoluteError` for UTF-16, and while it is open as `open_file`."""
    with (
        open_file(path, forward=True) as raw,
        io.TextIOWrapper(raw, encoding="utf-8-sig", errors="surrogateescape", newline="") as text,
    ):
        first = text.readline()
        for magic, what in _BINARY.items():
            if first.startswith(magic):
                raise ResoluteError(
                    f"{path}: not a text file, got {what}, expected a table as CSV, TSV, JSONL or Parquet; save it as "
                    "one of these"
                )
        if is_utf16(first) and not _is_json_line(first):
            raise not_utf8(path, 1, "UTF-16")
        yield chain([first], text) if first else iter(())


def _is_json_line(line: str) -> bool:
    return line.startswith("{") and not line.startswith("{\0")


class DelimitedForm:
    """A CSV or TSV file."""

    is_text = True
    header = None

    def __init__(self, path: str, delimiter: str) -> None:
        self.path, self.delimiter = path, delimiter

    def rows(self, wanted: Sequence[int] | None = None) -> Iterator[tuple[int, Sequence[str]]]:
        fields = first_line = 0
        with text_lines(self.path) as lines:
            rows = csv.reader(lines, delimiter=self.delimiter, strict=True)
            while True:
                line = rows.line_num + 1  # an open quote swallows later lines, and the error is where the row begins
                try:
                    row = next(rows)
                except StopIteration:
                    return
                except csv.Error as error:
                    raise ResoluteError(
                        f"{self.path}: line {line} is not a table row, got {error}, expected fields separated by "
                        f"{self.delimiter!r} and balanced quotes; correct it"
                    ) from None
                if len(row) != fields:
                    if not any(map(str.strip, row)):
                        continue
                    if fields:
                        raise self._other_width(row, line, fields, first_line)
                    if line == 1 and row[0].startswith("sep="):  # Excel's own line
                        continue
                    fields, first_line = len(row), line
                if row[0] or any(map(str.strip, row)):
                    yield line, [row[i].strip() for i in wanted] if wanted is not None else [*map(str.strip, row)]

    def _other_width(self, row: Sequence[str], line: int, fields: int, first_line: int) -> ResoluteError:
        open_quote = next((cell for cell in row if "\n" in cell), None)
        if open_quote is not None:
            return ResoluteError(
                f"{self.path}: line {line} has an open quote, got {open_quote[:80]!r}, expected {fields} fields in a "
                "line; correct it"
            )
        return ResoluteError(
            f"{self.path}: line {line} has {len(row)} fields, got {self.delimiter.join(row)[:80]!r}, expected {fields} "
            f"as in line {first_line}; put text that holds {self.delimiter!r} in double quotes"
        )


class WordForm:
    """A text file whose lines are words between blanks; lines before the first row that begin with # are skipped."""

    is_text = True
    header = None

    def __init__(self, path: str) -> None:
        self.path = path

    def rows(self, wanted: Sequence[int] | None = None) -> Iterator[tuple[int, Sequence[str]]]:
        fields = first_line = 0
        with text_lines(self.path) as lines:
            for number, line in enumerate(lines, start=1):
                row = line.split()
                if not row or (not fields and row[0].startswith("#")):
                    continue
                if not fields:
                    fields, first_line = len(row), number
                elif len(row) != fields:
                    raise ResoluteError(
                        f"{self.path}: line {number} has {len(row)} words, got {line.strip()[:80]!r}, expected "
                        f"{fields} as in line {first_line}; correct it, or separate the fields by tabs"
                    )
                yield number, row if wanted is None else [row[i] for i in wanted]


class ListForm:
    """A text file of `path label` lines, as ImageNet's train.txt. Both may hold blanks.

    They are separated at a tab, otherwise at the last space or comma that follows an image suffix, or the first that
    follows the name of one of `photos`.
    """

    is_text = True
    header = None

    def __init__(self, path: str, photos: NameIndex | None = None) -> None:
        self.path, self._photos = path, photos

    def rows(self, wanted: Sequence[int] | None = None) -> Iterator[tuple[int, Sequence[str]]]:
        number = 1
        with text_lines(self.path) as lines:
            while block := list(islice(lines, _LINES)):
                text = "".join(block)
                usual = _USUAL_LINE.findall(text) if "\0" not in text else []
                if len(usual) == len(block):  # as nearly always, and several times as fast
                    for name_and_label in usual:
                        yield number, name_and_label
                        number += 1
                    continue
                for line in block:
                    if (line := line.strip()) and not (number == 1 and line.startswith("#")):
                        yield number, self._name_and_label(line, number)
                    number += 1

    def _name_and_label(self, line: str, number: int) -> tuple[str, str]:
        split = _split(line)
        if split is None and self._photos is not None:
            ends = [*(match.span() for match in _SEPARATOR.finditer(line)), (len(line), len(line))]
            split = next(
                ((line[:end], line[start:]) for end, start in ends if self._photos.rank(line[:end]) is not None), None
            )
        if split is not None:
            return split
        example = f" (the photos are called such as {self._photos.example})" if self._photos is not None else ""
        raise ResoluteError(
            f"{self.path}: line {number} is not an image and its label, got {line[:80]!r}, expected a form such as "
            f"'cat/1.jpg 0', with the name of a photo and its suffix{example}; correct it"
        )


# Most lines; what it finds in them is what `_split` finds.
_USUAL_LINE = re.compile(
    rf'^([^\s"]+(?:{"|".join(map(re.escape, sorted(SUFFIXES)))}))[ \t]([!#-+\--~]+)\r?$',
    re.ASCII | re.IGNORECASE | re.MULTILINE,
)
_SEPARATOR = re.compile(r"\s*,\s*|\s+")
_QUOTED_PATH = re.compile(r'"([^"]+)"(?:\s*,\s*|\s+)(.+)')


def _split(line: str) -> tuple[str, str] | None:
    """(path, label) of a line, either of them with spaces or in quotes, the label perhaps empty; None if `line` has no
    such form with an image suffix."""
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


# ---- JSON and Parquet


class JsonForm:
    """A JSONL file: an object in each line; the columns are the keys of the first."""

    is_text = False

    def __init__(self, path: str) -> None:
        self.path = path

    @cached_property
    def header(self) -> list[str]:
        with text_lines(self.path) as lines:
            first = next(((number, line) for number, line in enumerate(lines, start=1) if line.strip()), None)
        return [] if first is None else list(_json_row(self.path, first[1], first[0]))

    def rows(self, wanted: Sequence[int] | None = None) -> Iterator[tuple[int, Sequence[Any]]]:
        keys = self.header if wanted is None else [self.header[i] for i in wanted]
        with text_lines(self.path) as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    row = _json_row(self.path, line, number)
                    yield number, [row.get(key) for key in keys]


def _json_row(path: str, line: str, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if isinstance(row, dict):
        return row
    raise ResoluteError(
        f"{path}: line {number} is not a row, got {line.strip()[:80]!r}, expected a JSON object in each line, such as "
        '{"file_name": "a.jpg", "label": "cat"}, or COCO\'s JSON; correct it, or write the table as CSV'
    )


class ParquetForm:
    """A Parquet file; columns of bytes are left out."""

    is_text = False

    def __init__(self, path: str) -> None:
        self.path = path

    @cached_property
    def header(self) -> list[str]:
        with open_parquet(self.path) as file:
            return [name for name, kind in file.types.items() if "BLOB" not in kind]

    def rows(self, wanted: Sequence[int] | None = None) -> Iterator[tuple[int, Sequence[Any]]]:
        names = self.header if wanted is None else [self.header[i] for i in wanted]
        quoted = [f'"{name.replace(chr(34), chr(34) * 2)}"' for name in names]
        with open_parquet(self.path) as file:
            yield from enumerate(file.rows(quoted, _PARQUET_ROWS), start=1)


class CocoForm:
    """COCO's JSON, as of iNaturalist: the file names of `images`, and the names of the categories of their
    `annotations`: one if no image has several, else a list. An image without annotations has None, or an empty list.
    """

    is_text = False
    header = ("file_name", "category")

    def __init__(self, path: str) -> None:
        self.path = path

    def rows(self, wanted: Sequence[int] | None = None) -> Iterator[tuple[int, Sequence[Any]]]:
        for number, row in enumerate(self._rows, start=1):
            yield number, row if wanted is None else [row[i] for i in wanted]

    @cached_property
    def _rows(self) -> list[tuple[str, Any]]:
        found = self._document()
        names = {each["id"]: str(each["name"]) for each in found["categories"]}
        if len(set(names.values())) < len(names):
            twice = next(name for name in names.values() if [*names.values()].count(name) > 1)
            raise self._error(f"several categories called {twice!r}", "different names")
        of_images: dict[Any, dict[str, None]] = {each["id"]: {} for each in found["images"]}
        for each in found["annotations"]:
            image, category = each["image_id"], each["category_id"]
            if image not in of_images or category not in names:
                what = f"image_id {image!r}" if image not in of_images else f"category_id {category!r}"
                raise self._error(f"an annotation with {what}, which the file lacks", "the id of one of its entries")
            of_images[image][names[category]] = None
        has_several = any(len(labels) > 1 for labels in of_images.values())
        return [
            (
                each["file_name"],
                list(of_images[each["id"]]) if has_several else next(iter(of_images[each["id"]]), None),
            )
            for each in found["images"]
        ]

    def _document(self) -> dict[str, list[dict[str, Any]]]:
        with open_file(self.path, forward=True) as file:
            data = file.read()
        try:
            found = json.loads(data)
            if not isinstance(found, dict):
                raise self._error(f"a {type(found).__name__}", "an object")
            wanted = {
                "images": ("id", "file_name"),
                "annotations": ("image_id", "category_id"),
                "categories": ("id", "name"),
            }
            missing = [part for part in wanted if not isinstance(found.get(part), list) or not found[part]]
            if missing:
                raise self._error(f"no {' and no '.join(missing)}", "images, annotations and categories")
            for part, keys in wanted.items():
                for number, each in enumerate(found[part]):
                    if not isinstance(each, dict) or not set(keys) <= each.keys():
                        raise self._error(f"{part}[{number}] without {' or '.join(keys)}", "both")
        except (ValueError, RecursionError) as error:
            raise self._error(f"'{' '.join(str(error).split())[:80]}'", "one JSON document") from None
        return dict(found)

    def _error(self, got: str, expected: str) -> ResoluteError:
        return ResoluteError(
            f"{self.path}: not COCO's JSON, got {got}, expected {expected}; correct it, or write a table of names and "
            "labels as CSV or JSONL"
        )


def is_document(path: str) -> bool:
    """Whether a JSON file is one document rather than an object in each of several lines."""
    with text_lines(path) as lines:
        first, second = islice(chain(filter(None, map(str.strip, lines)), ["", ""]), 2)
    return not (second and first.startswith("{") and first.endswith("}"))


# ---- several files


class JoinedForm:
    """Tables that are joined by an id, which is in the first column of each. The id is not a column of the result.

    Held in memory, except for the first. Raises `ResoluteError` unless all tables have the same ids, each once.
    """

    is_text = True

    def __init__(self, first: TableForm, *others: TableForm) -> None:
        self.path, self._forms = ",".join(each.path for each in (first, *others)), (first, *others)

    @property
    def header(self) -> Sequence[str] | None:
        headers = [form.header for form in self._forms]
        return [name for header in headers if header for name in header[1:]] if all(headers) else None

    def rows(self, wanted: Sequence[int] | None = None) -> Iterator[tuple[int, Sequence[Any]]]:
        first, *others = self._forms
        joined = [self._by_id(form) for form in others]
        seen: set[str] = set()
        for line, (key, *cells) in first.rows():
            if key in seen:
                raise ResoluteError(f"{first.path}: line {line}: id {key!r} again, expected each once; correct it")
            seen.add(key)
            for form, by_id in zip(others, joined, strict=True):
                if key not in by_id:
                    raise ResoluteError(
                        f"{form.path}: has no row for id {key!r} of {first.path}, line {line}, expected the same ids "
                        "in the first column of both; correct LABELS"
                    )
                cells += by_id[key]
            yield line, cells if wanted is None else [cells[i] for i in wanted]
        for form, by_id in zip(others, joined, strict=True):
            if extra := by_id.keys() - seen:
                raise ResoluteError(
                    f"{form.path}: ids that {first.path} lacks, got {len(extra)} such as {min(extra)!r}, expected the "
                    "same ids in the first column of both; correct LABELS"
                )

    def _by_id(self, form: TableForm) -> dict[str, list[Any]]:
        rows: dict[str, list[Any]] = {}
        for line, (key, *cells) in form.rows():
            if key in rows:
                raise ResoluteError(f"{form.path}: line {line}: id {key!r} again, expected each once; correct it")
            rows[key] = list(cells)
        return rows
