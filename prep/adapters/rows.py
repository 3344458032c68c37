"""Which label does a text file give to which image?"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from pipeline.errors import ResoluteError

from .files import opened
from .names import is_image

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
    """Whether a label is a class number, written as numbers are: no sign, no leading zeros."""
    return label.isascii() and label.isdigit() and (label == "0" or label[0] != "0")


def label_rows(path: str, columns: str | None) -> Iterator[LabelRow]:
    """The rows of a CSV or TSV file with a header, or lines of path and label. Blank ones are left out.

    `columns` names the two columns, "id,breed"; otherwise they go by their usual names. Raises `ResoluteError`
    for a file that cannot be read or understood.
    """
    with (
        opened(path, forward=True) as raw,
        io.TextIOWrapper(raw, encoding="utf-8-sig", errors="surrogateescape", newline="") as text,
    ):
        first = text.readline()
        lines = chain([first], text)
        delimiter = max(_DELIMITERS, key=first.count)
        header = next(csv.reader([first], delimiter=delimiter), [])
        is_table = path.lower().endswith((".csv", ".tsv"))
        if columns is not None or (is_table and _guess(header, _LABEL_AND_NAME) is not None):
            yield from _table(path, lines, delimiter, header, columns)
        else:
            yield from _lines(path, lines, header if is_table else None)


def two_columns(columns: str) -> tuple[str, str]:
    """`"id,breed"` -> ("id", "breed"). Raises `ResoluteError` for anything but two names."""
    names = tuple(name.strip() for name in columns.split(","))
    if len(names) != 2 or not all(names):
        raise ResoluteError(
            f"COLUMNS: not two names, got {columns!r}, expected the image's and the label's column such as "
            "id,breed; correct COLUMNS"
        )
    return names[0], names[1]


_LABEL_AND_NAME = (_NAME_COLUMNS, LABEL_COLUMNS)


def _guess(header: Sequence[str], wanted: Sequence[Sequence[str]]) -> list[int] | None:
    """Position of the first usual name, for each kind of column; None if a kind is missing."""
    low = [name.strip().lower() for name in header]
    found = [next((low.index(name) for name in names if name in low), None) for names in wanted]
    return None if None in found else [i for i in found if i is not None]


def _table(
    path: str, lines: Iterable[str], delimiter: str, header: list[str], columns: str | None
) -> Iterator[LabelRow]:
    names = [name.strip() for name in header]
    if columns is not None:
        wanted = two_columns(columns)
        missing = next((name for name in wanted if name not in names), None)
        if missing is not None:
            raise ResoluteError(
                f"{path}: has no column {missing}, got {', '.join(names)}, expected {columns}; correct COLUMNS"
            )
        places = [names.index(name) for name in wanted]
    else:
        places = _guess(header, _LABEL_AND_NAME) or []
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    try:
        next(rows)
        for row in rows:
            if not any(row):
                continue
            if len(row) <= max(places) or not row[places[0]].strip():
                raise ResoluteError(
                    f"{path}: line {rows.line_num} is incomplete, got {delimiter.join(row)[:80]!r}, expected "
                    f"{len(names)} fields; correct it"
                )
            yield LabelRow(row[places[0]].strip(), row[places[1]].strip(), rows.line_num)
    except csv.Error as error:
        raise ResoluteError(
            f"{path}: line {rows.line_num} is no table row, got {error}, expected fields parted by "
            f"{delimiter!r}; correct it"
        ) from None


def _lines(path: str, lines: Iterable[str], header: list[str] | None) -> Iterator[LabelRow]:
    for number, line in enumerate(lines, start=1):
        line = line.strip()
        if not line:
            continue
        split = _split(line)
        if split is None and header is not None and number == 1:
            raise ResoluteError(
                f"{path}: no column of images and one of labels, got {', '.join(header)[:200]}, expected names "
                "such as id,label; name the two with COLUMNS=image,label"
            )
        if split is None:
            raise ResoluteError(
                f"{path}: line {number} is no image and label, got {line[:80]!r}, expected such as "
                "'cat/1.jpg 0' with an image's suffix; correct it"
            )
        yield LabelRow(*split, number)


def _split(line: str) -> tuple[str, str] | None:
    """An image's path, by its suffix, and its label: parted by a tab, else the last space, else a comma."""
    for separator in ("\t", None, ","):
        parts = line.rsplit(separator, 1)
        if len(parts) == 2 and is_image(parts[0].strip()) and parts[1].strip():
            return parts[0].strip(), parts[1].strip()
    return None
