"""Rows of label tables (CSV, TSV) and label lists. Errors name the line, counted from 1."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from pipeline.errors import ResoluteError

from .filesystem import file_name, open_file
from .names import is_image
from .text_encoding import is_text, is_utf16, not_utf8

__all__ = ["LABEL_COLUMNS", "LabelRow", "is_number", "label_rows", "two_columns"]

_NAME_COLUMNS = ("id", "image", "image_id", "image_name", "filename", "file_name", "file", "path", "filepath",
                 "image_path", "img", "name")  # fmt: skip
LABEL_COLUMNS = ("label", "labels", "breed", "class", "category", "target", "species", "kind", "diagnosis",
                 "class_name")  # fmt: skip
_DELIMITERS = (",", "\t", ";", "|")


class LabelRow(NamedTuple):
    name: str
    label: str
    line: int  # in the file, from 1


def is_number(label: str) -> bool:
    """Whether a label is a class number in canonical form: no sign, no leading zeros."""
    return label.isascii() and label.isdigit() and (label == "0" or label[0] != "0")


def label_rows(path: str, columns: str | None) -> Iterator[LabelRow]:
    """Yield the rows of a CSV or TSV file, or of lines of path and label; blank ones are skipped.

    `columns` names the image and label column, "id,breed", or gives their positions from 0, "0,1", in a table without a
    header; by default they are recognised by usual names. Labels are UTF-8; names may hold other bytes
    (surrogateescape), as file names may. Raises `ResoluteError` for a file that is unreadable, malformed or without
    rows.
    """
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
        positions, has_header = _positions(path, header, columns, is_table)
        if positions is not None:
            rows = _table(path, lines, delimiter, positions, has_header=has_header)
        else:
            rows = _lines(path, lines, header if is_table else None)
        row = None
        for row in rows:
            if not is_text(row.label):
                raise not_utf8(path, row.line, repr(row.label))
            yield row
        if row is None:
            got = "only a header" if first.strip() else "an empty file"
            raise ResoluteError(f"{path}: no rows, got {got}, expected an image and its label per row; correct it")


def _positions(
    path: str, header: list[str], columns: str | None, is_table: bool
) -> tuple[tuple[int, int] | None, bool]:
    """((image column, label column), whether the first row is a header); None for the positions in a list file."""
    names = [name.strip() for name in header]
    usual_columns = _guess(names, _LABEL_AND_NAME)
    if columns is None:
        if usual_columns is not None and is_table:
            return usual_columns, True
        return ((0, 1), False) if is_table and len(names) == 2 and is_image(names[0]) else (None, False)
    names_wanted = two_columns(columns)
    if all(name in names for name in names_wanted):
        return (names.index(names_wanted[0]), names.index(names_wanted[1])), True
    missing = [name for name in names_wanted if not (name.isascii() and name.isdecimal() and int(name) < len(names))]
    if not missing:
        return (int(names_wanted[0]), int(names_wanted[1])), usual_columns is not None
    missing = [name for name in missing if name not in names] or [name for name in names_wanted if name not in names]
    raise ResoluteError(
        f"{path}: has no column {missing[0]}, got {', '.join(names)}, expected {columns}; correct COLUMNS (for a table "
        "without a header use positions from 0, such as COLUMNS=0,1)"
    )


def two_columns(columns: str) -> tuple[str, str]:
    """Parse `"id,breed"` to ("id", "breed"). Raises `ResoluteError` unless there are two names."""
    names = tuple(name.strip() for name in columns.split(","))
    if len(names) != 2 or not all(names):
        raise ResoluteError(
            f"COLUMNS: not two names, got {columns!r}, expected the image's and the label's column such as "
            "id,breed (or their positions, such as 0,1); correct COLUMNS"
        )
    return names[0], names[1]


_LABEL_AND_NAME = (_NAME_COLUMNS, LABEL_COLUMNS)


def _guess(header: Sequence[str], names_wanted: tuple[Sequence[str], Sequence[str]]) -> tuple[int, int] | None:
    """Positions of the first usual name of each of the two columns; None if either is missing."""
    lower = [name.lower() for name in header]
    image, label = (next((lower.index(name) for name in names if name in lower), None) for names in names_wanted)
    return None if image is None or label is None else (image, label)


def _table(
    path: str, lines: Iterable[str], delimiter: str, positions: tuple[int, int], *, has_header: bool
) -> Iterator[LabelRow]:
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    image, label = positions
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
        if not any(row) or (line == 1 and has_header):
            continue
        if len(row) <= max(positions) or not row[image].strip():
            raise ResoluteError(
                f"{path}: line {line} is incomplete, got {delimiter.join(row)[:80]!r}, expected {fields} fields; "
                "correct it"
            )
        name, text = row[image].strip(), row[label].strip()
        if "\n" in text:  # why not for names: file names may hold line breaks
            raise ResoluteError(
                f"{path}: line {line} has an open quote, got {text[:80]!r}, expected a label in one line; correct it"
            )
        yield LabelRow(name, text, line)


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
        yield LabelRow(*split, number)


_SEPARATOR = re.compile(r"\s*,\s*|\s+")
_QUOTED_PATH = re.compile(r'"([^"]+)"(?:\s*,\s*|\s+)(.+)')


def _split(line: str) -> tuple[str, str] | None:
    """(path, label) of a line, either of them with spaces or in quotes; None if `line` has no such form.

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
    return None


def _unquoted(path: str, label: str) -> tuple[str, str] | None:
    if path.startswith('"'):
        return None
    if label.startswith('"'):
        if len(label) < 2 or not label.endswith('"'):
            return None
        label = label[1:-1].strip()
    return (path, label) if label else None
