"""Label files: tables (CSV, TSV) of a folder's images, and lists of image paths and labels. Both are sources.

Errors name the line, counted from 1. Labels are UTF-8; file names may hold any bytes (surrogateescape).
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from pipeline.errors import ResoluteError

from .filesystem import file_name, file_size, open_file, without_query
from .image_folder import walk
from .image_ref import UNSEEN, ImageRef, is_url
from .names import is_image, other_file_kind, safe_below, safe_relative_path

__all__ = [
    "LABEL_COLUMNS", "LabelListSource", "LabelTableSource", "is_text", "is_utf16", "label_rows", "not_utf8",
    "two_columns",
]  # fmt: skip

_UTF16_MARKS = ("\udcff\udcfe", "\udcfe\udcff")  # the byte-order marks, decoded with surrogateescape
_NAME_COLUMNS = ("id", "image", "image_id", "image_name", "filename", "file_name", "file", "path", "filepath",
                 "image_path", "img", "name")  # fmt: skip
LABEL_COLUMNS = ("label", "labels", "breed", "class", "category", "target", "species", "kind", "diagnosis",
                 "class_name")  # fmt: skip
_DELIMITERS = (",", "\t", ";", "|")


class LabelTableSource:
    """A folder of images, flat or nested, and a CSV or TSV file of names and labels, as on Kaggle. A `Source`.

    A name may be the path below the folder or the file's own name, with or without suffix. A row without a file is
    yielded under its name and becomes a reject; a file without a row is ignored as unlabelled. A name that leads out of
    the folder (`..`, an absolute path elsewhere, a URL) is never read; its row is ignored as an unsafe name. Links
    inside the folder are followed, as in `ImageFolderSource`. `numbered` if all labels are integers. Holds the names of
    all files in memory.
    """

    label_names: Sequence[str] | None = None
    copies = False

    def __init__(self, src: str, labels: str, columns: str | None) -> None:
        self.root = src
        self.ignored: Counter[str] = Counter()
        self.numbered = True
        self._labels, self._columns = labels, columns

    def __iter__(self) -> Iterator[ImageRef]:
        self.ignored.clear()
        self.numbered = True
        sizes: dict[str, int | None] = {}
        aliases: dict[str, str | None] = {}  # other forms of a name; None: ambiguous
        for name, entry in walk(self.root, self.ignored):
            if entry.kind == "file" and is_image(name):
                sizes[name] = entry.nbytes
                for alias in {_stem(name), entry.name, _stem(entry.name)} - {name}:
                    aliases[alias] = name if alias not in aliases else None
            else:
                self.ignored[other_file_kind(name)] += entry.kind == "file"
        labelled: set[str] = set()
        for row in label_rows(self._labels, self._columns):
            written = row.name.removeprefix("./")
            if written not in sizes and written not in aliases:
                if not is_text(written):
                    raise not_utf8(self._labels, row.line, repr(written))
                below = safe_below(self.root, written)
                if below is None:
                    self.ignored["unsafe names"] += 1
                    continue
                written = below
            name = written if written in sizes else aliases.get(written, written) or self._ambiguous(written, row.line)
            if not row.label:
                self.ignored["unlabelled"] += name not in sizes
                continue
            labelled.add(name)
            self.numbered &= is_number(row.label)
            yield ImageRef.file(name, row.label, sizes.get(name))
        self.ignored["unlabelled"] += len(sizes.keys() - labelled)
        self.ignored += Counter()

    def _ambiguous(self, written: str, line: int) -> str:
        raise ResoluteError(
            f"{self._labels}: line {line} names several files, got {written}, of which {self.root} holds more than "
            "one, expected a unique name; write the full path with its suffix, or remove the other files"
        )


def _stem(name: str) -> str:
    return name[: name.rindex(".")]


class LabelListSource:
    """A text file of `path label` lines, as ImageNet's train.txt, or a CSV or TSV file with such columns. A `Source`.

    Paths are relative to the list's folder, or absolute. `numbered` if all labels are integers. Images behind URLs are
    not requested while listing (UNSEEN). From a list behind a URL, only paths below its folder and URLs of the same
    scheme are accepted.
    """

    label_names: Sequence[str] | None = None
    copies = False

    def __init__(self, src: str, columns: str | None) -> None:
        self.root = without_query(src).rpartition("/")[0] or ("/" if src.startswith("/") else ".")
        self.ignored: Counter[str] = Counter()
        self.numbered = True
        self._src, self._columns = src, columns

    def __iter__(self) -> Iterator[ImageRef]:
        self.ignored.clear()
        self.numbered = True
        for row in label_rows(self._src, self._columns):
            name = row.name.removeprefix("./")
            # why: a remote list must not name files of this machine
            scheme = f"{self.root.partition('://')[0]}://"
            is_allowed = name.startswith(scheme) if is_url(name) else safe_relative_path(name)
            if is_url(self.root) and ("::" in name or not is_allowed):
                self.ignored["unsafe names"] += 1
                continue
            if not row.label:
                self.ignored["unlabelled"] += 1
                continue
            self.numbered &= is_number(row.label)
            if is_url(self.root) or is_url(name):
                yield ImageRef(name, row.label, 0, packed=UNSEEN)
            else:
                yield ImageRef.file(name, row.label, file_size(name if name.startswith("/") else f"{self.root}/{name}"))


class LabelRow(NamedTuple):
    name: str
    label: str
    line: int  # in the file, from 1


def is_number(label: str) -> bool:
    """Whether a label is a class number in canonical form: no sign, no leading zeros."""
    return label.isascii() and label.isdigit() and (label == "0" or label[0] != "0")


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
    usual_columns = _usual_columns(names)
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


def _usual_columns(header: Sequence[str]) -> tuple[int, int] | None:
    """Positions of the image and the label column, recognised by their names; None if either is missing."""
    lower = [name.lower() for name in header]
    image, label = (
        next((lower.index(name) for name in usual if name in lower), None) for usual in (_NAME_COLUMNS, LABEL_COLUMNS)
    )
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
