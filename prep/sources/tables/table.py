"""A table of images and their targets in any form: CSV, TSV, JSONL, COCO JSON, Parquet, a list of paths and labels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from decimal import Decimal
from functools import cached_property
from itertools import islice
from typing import Any

from resolute.errors import ResoluteError
from resolute.prep.sources.image_ref import Label, SourceTarget
from resolute.prep.sources.targets import AUTO, Cell, Meaning, Targets, TargetSetting

from .columns import IMAGE_NAMES, Layout, PhotoNames, choose_columns
from .forms import checked_name, is_text, not_utf8
from .split_column import Part, SplitSetting

__all__ = ["Row", "TargetTable", "as_cell"]

# A plain tuple, since a table may have a hundred million rows: the name of the image, the cells of the columns of
# targets, and the line in the file (in Parquet the row), from 1.
Row = tuple[str, tuple[Cell, ...], int]


class TargetTable:
    """A table of the targets of `photos`. `target` reads all of it; iterating reads it again: the name, the target
    (None: it has none) and the line of each row.

    `columns`, `known_classes`, `name`, `split`, `asks_for_split`, `group` and `hints_at_group` are as for
    `choose_columns`. With `split`, only the
    rows of `part` are those of the table.
    """

    def __init__(
        self,
        path: str,
        columns: str | None,
        setting: TargetSetting = AUTO,
        *,
        photos: PhotoNames = IMAGE_NAMES,
        known_classes: Sequence[str] = (),
        name: str = "LABELS",
        split: SplitSetting | None = None,
        part: Part | None = None,
        asks_for_split: bool = False,
        group: str | None = None,
        hints_at_group: bool = False,
    ) -> None:
        self._group, self._hints_at_group = group, hints_at_group
        self.path, self._columns, self._setting = path, columns, setting
        self._split, self._part, self._asks_for_split = split, part, asks_for_split
        self._photos, self._known_classes, self._name = photos, known_classes, name
        self.meaning: Meaning | None = None  # when `target` has returned

    @cached_property
    def layout(self) -> Layout:
        """Raises `ResoluteError` if the cells do not decide which columns are meant."""
        return choose_columns(
            self.path,
            self._columns,
            self._photos,
            self._known_classes,
            self._name,
            split=self._split,
            asks_for_split=self._asks_for_split,
            group=self._group,
            hints_at_group=self._hints_at_group,
        )

    def group_cells(self) -> Iterator[tuple[int, str]]:
        """Yield the line of each row and the text of its cell in the column of GROUP, "" for a blank one."""
        layout = self.layout
        assert layout.group is not None
        for line, (cell,) in islice(layout.form.rows((layout.group,)), int(layout.has_header), None):
            is_blank = cell is None or (isinstance(cell, float) and math.isnan(cell))
            yield line, "" if is_blank else str(cell).strip()

    def target(self) -> SourceTarget:
        """The targets of the file. Raises `ResoluteError` for a file that is unreadable, malformed, or without rows."""
        targets = Targets(
            self.path,
            self.layout.names,
            self._setting,
            is_text=self.layout.form.is_text,
            are_chosen=self._columns is not None,
        )
        add, count = targets.add, 0
        for name, cells, line in self.rows():
            add(name, cells, line)
            count += 1
        if not count:
            raise ResoluteError(
                f"{self.path}: no rows, got only a header, expected an image and its label per row; correct it"
            )
        self.meaning = targets.meaning()
        target = self.meaning.source_target()
        hint = self.layout.group_hint
        return target if hint is None else replace(target, about=(*target.about, hint))

    @property
    def numbered(self) -> bool:
        """Whether all labels are class numbers."""
        return self.meaning is not None and self.meaning.numbered

    def __iter__(self) -> Iterator[tuple[str, Label | None, int]]:
        assert self.meaning is not None
        label, are_classes = self.meaning.label, self.meaning.are_plain_classes
        for name, cells, line in self.rows():
            yield name, (cells[0] or None) if are_classes else label(cells, line), line  # type: ignore[misc]

    def rows(self) -> Iterator[Row]:
        """Yield all rows. Raises `ResoluteError` for a file that is unreadable or malformed."""
        layout = self.layout
        if layout.split is not None:
            yield from (row for row, part in self._divided() if part == self._part)
            return
        rows = layout.form.rows((layout.image, *layout.targets))
        rows = islice(rows, int(layout.has_header), None)
        if not layout.form.is_text:
            for line, (value, *values) in rows:
                cells = tuple(as_cell(each, f"{self.path}: line {line}") for each in values)
                yield self._checked(value, cells, line)
            return
        if len(layout.targets) > 1:
            for line, (name, *several) in rows:
                yield self._checked(name, tuple(several), line)
            return
        for line, (name, cell) in rows:
            if cell.isascii() and name.isascii() and name and "\n" not in cell and "\0" not in name:
                yield name, (cell,), line  # as nearly always, and several times as fast
            else:
                yield self._checked(name, (cell,), line)

    def other_rows(self) -> Iterator[tuple[Row, Part | None]]:
        """Yield the rows that `split` gives to other parts, with these; None: left out."""
        if self.layout.split is not None:
            yield from ((row, part) for row, part in self._divided() if part != self._part)

    def _divided(self) -> Iterator[tuple[Row, Part | None]]:
        """Yield all rows and their parts."""
        layout = self.layout
        assert self._split is not None
        assert layout.split is not None
        rows = layout.form.rows((layout.image, *layout.targets, layout.split))
        for line, (name, *values, where) in islice(rows, int(layout.has_header), None):
            part = self._split.part(where, f"{self.path}: line {line}")
            cells = values
            if not layout.form.is_text:
                cells = [as_cell(each, f"{self.path}: line {line}") for each in values] if part else []
            yield self._checked(name, tuple(cells), line), part

    def _checked(self, name: Any, cells: tuple[Cell, ...], line: int) -> Row:
        """The row. Raises `ResoluteError` for a name or cells that cannot be used."""
        is_written = self.layout.form.is_text
        if is_written and not name:
            raise ResoluteError(
                f"{self.path}: line {line} is incomplete, got {', '.join(map(str, cells))[:80]!r} without the name of "
                "an image, expected one; correct it"
            )
        for cell in cells:
            if isinstance(cell, str) and not is_text(cell):
                raise not_utf8(self.path, line, repr(cell))
            if is_written and isinstance(cell, str) and "\n" in cell:  # names may hold line breaks, as of files
                raise ResoluteError(
                    f"{self.path}: line {line} has an open quote, got {cell[:80]!r}, expected a label in one line; "
                    "correct it"
                )
        return checked_name(self.path, name, line), cells, line


def as_cell(value: Any, where: str) -> Cell:
    """A value of JSON or Parquet as a cell. Raises `ResoluteError`, naming `where`, for what cannot be a target."""
    if isinstance(value, list) and all(isinstance(item, str | int | float) for item in value):
        return value
    if isinstance(value, Decimal):
        return float(value)
    if value is None or isinstance(value, str | int | float):
        return None if isinstance(value, float) and math.isnan(value) else value
    raise ResoluteError(
        f"{where}: got {str(value)[:80]}, expected a text, a number or a list of these as a target; correct it, or "
        "name the columns with COLUMNS=image,label"
    )
