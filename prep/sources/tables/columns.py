"""Which columns of a table hold the names of photos and their targets: decided by the cells, or asked of the user.

A column names the photos if its cells are names of photos that the source holds: exactly, then without their suffix,
then with another one. If that is one column, it is taken. The target is the column that remains, or the only one with
a usual name. Everything else is a question, which `COLUMNS` answers. Only the first rows are looked at.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from resolute.errors import ResoluteError
from resolute.prep.sources.filesystem import file_name
from resolute.prep.sources.names import is_image
from resolute.urls import is_url

from .forms import (
    CocoForm,
    DelimitedForm,
    JoinedForm,
    JsonForm,
    ListForm,
    ParquetForm,
    TableForm,
    WordForm,
    is_document,
)
from .group_column import hint_at_group
from .photo_names import EXACT, SAME_STEM, WITHOUT_SUFFIX, NameIndex
from .split_column import SplitSetting, looks_like_a_split, question

__all__ = ["IMAGE_NAMES", "LABEL_COLUMNS", "Layout", "PhotoNames", "choose_columns", "column_names", "column_span"]

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
_SAMPLE = 1000  # rows by which columns are chosen
_SHOWN = 12  # columns in a message
_NUMBERS_OF_ROWS = ("", "unnamed: 0", "index", "idx", "row")  # columns of a running number that nobody means


class PhotoNames(Protocol):
    """The photos that a table may name."""

    @property
    def example(self) -> str:
        """The name of one of them."""
        ...

    def rank(self, written: str) -> int | None:
        """How well a text names a photo: EXACT, WITHOUT_SUFFIX or SAME_STEM; None if it names none."""
        ...

    def looks_like(self, written: str) -> bool:
        """Whether a photo has a similar name."""
        ...


class _ImageNames:
    """Any names of image files, where it is not known which photos there are, as `PhotoNames`."""

    example = ""

    def rank(self, written: str) -> int | None:
        return EXACT if is_image(written) or is_url(written) else None

    def looks_like(self, written: str) -> bool:
        return False


IMAGE_NAMES = _ImageNames()


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The form of a table, the positions of its columns of images and targets, and the names of the latter.

    `has_header`: the first row of `form` holds the names of the columns. `names_have_suffixes`: those of photos do.
    """

    form: TableForm
    image: int
    targets: tuple[int, ...]
    names: tuple[str, ...]
    has_header: bool = False
    names_have_suffixes: bool = False
    split: int | None = None  # the position of the column that SPLIT names
    group: int | None = None  # and of that which GROUP names
    group_hint: str | None = None  # a line about a column that may say which photos belong together


def choose_columns(
    path: str,
    columns: str | None,
    photos: PhotoNames,
    known_classes: Sequence[str] = (),
    setting: str = "LABELS",
    *,
    split: SplitSetting | None = None,
    asks_for_split: bool = False,
    group: str | None = None,
    hints_at_group: bool = False,
) -> Layout:
    """The layout of the table `path`, or of several that are joined, `a.txt,b.txt`.

    `columns` names the image and target columns, "id,breed", or gives their positions from 0. `known_classes` are those
    of the training part, if this is a validation table. `setting` names the table in messages. `split` names the column
    that divides the rows; `asks_for_split`: nobody has said whether one does. `group` names the column of GROUP;
    `hints_at_group`: a column that looks like one is to be named. Raises `ResoluteError` with the question if the cells
    do not decide.
    """
    parts = _parts(path)
    if len(parts) > 1:
        form, sample = _joined(parts, photos)
    else:
        form, sample = _form_of_file(parts[0], columns, photos)
    if not sample:
        got = "only a header" if form.header else "an empty file"
        raise ResoluteError(f"{path}: no rows, got {got}, expected an image and its label per row; correct it")
    if form.header is None and len(sample) == 1 and not any(map(sum, _counts(sample, photos))) and columns is None:
        raise ResoluteError(
            f"{path}: no rows, got only {str(list(sample[0]))[:80]}, expected an image per row; correct it"
        )
    if isinstance(form, ListForm):
        return Layout(form=form, image=0, targets=(1,), names=("label",))
    return _Choice(
        form,
        sample,
        columns,
        photos,
        known_classes,
        setting,
        split,
        group,
        asks_for_split=asks_for_split,
        hints_at_group=hints_at_group,
    ).layout()


# ---- the form


def _parts(path: str) -> list[str]:
    """The files of several tables to join, "a.txt,b.txt"; the path alone if it is one file."""
    parts = path.split(",")
    if len(parts) == 1 or is_url(path) or Path(path).exists():
        return [path]
    return parts if all(Path(part).is_file() for part in parts) else [path]


def _sample(form: TableForm) -> tuple[list[Sequence[Any]], ResoluteError | None]:
    """The first rows, and the error that ends them, if there is one."""
    rows: list[Sequence[Any]] = []
    try:
        with closing(form.rows()) as all_rows:  # type: ignore[type-var]
            rows.extend(row for _, row in islice(all_rows, _SAMPLE))
    except ResoluteError as error:
        return rows, error
    return rows, None


def _form_of_file(path: str, columns: str | None, photos: PhotoNames) -> tuple[TableForm, list[Sequence[Any]]]:
    name = file_name(path).lower()
    form: TableForm
    if name.endswith(".parquet"):
        form = ParquetForm(path)
    elif name.endswith((".jsonl", ".ndjson", ".json")):
        form = CocoForm(path) if not name.endswith(("jsonl", "ndjson")) and is_document(path) else JsonForm(path)
    else:
        return _form_of_text(path, name, columns, photos)
    sample, error = _sample(form)
    if error is not None:
        raise error
    return form, sample


def _form_of_text(
    path: str, name: str, columns: str | None, photos: PhotoNames
) -> tuple[TableForm, list[Sequence[Any]]]:
    """The form in which a column of a text file names photos."""
    is_list = not name.endswith((".csv", ".tsv"))
    delimiters = "\t" if name.endswith(".tsv") else _DELIMITERS
    candidates: list[TableForm] = [DelimitedForm(path, delimiter) for delimiter in delimiters]
    if is_list and columns is not None:
        candidates.append(WordForm(path))
    wanted = None if columns is None else column_names(columns)
    best: tuple[tuple[int, int, int], TableForm, list[Sequence[Any]], ResoluteError | None] | None = None
    for form in candidates:
        sample, error = _sample(form)
        if sample and len(sample[0]) < 2 and not (error and len(candidates) == 1):
            continue
        if not sample:
            if error is not None and len(candidates) == 1:
                raise error
            continue
        names_found = sum(each in sample[0] for each in wanted or ())
        counts = _counts(sample[1:] or sample, photos)
        score = (names_found, max(map(sum, counts), default=0), len(sample[0]))
        if best is None or score > best[0]:
            best = (score, form, sample, error)
    if is_list and columns is None and (best is None or not best[0][1]):
        return _list(path, photos)
    if best is None:
        form = candidates[0]
        sample, error = _sample(form)
        if error is not None:
            raise error
        return form, sample
    if best[3] is not None:
        raise best[3]
    return best[1], best[2]


def _list(path: str, photos: PhotoNames) -> tuple[TableForm, list[Sequence[Any]]]:
    """A file of names and labels with blanks between them; a table of words if it can only be that."""
    words = WordForm(path)
    rows, error = _sample(words)
    is_table = error is None and len(rows) > 1 and max(map(sum, _counts(rows[1:], photos))) > 0
    form = ListForm(path, photos if isinstance(photos, NameIndex) else None)
    sample, list_error = _sample(form)
    if is_table and len(rows[0]) > 2 and all(_is_number(row[-1]) for row in rows[1:]):
        raise ResoluteError(
            f"{path}: each line has {len(rows[0])} words, got {' '.join(rows[-1])[:80]!r}, expected a photo and its "
            "label; name the two by position with COLUMNS=0,1, or put a tab before labels that hold blanks"
        )
    names_of_list = sum(photos.rank(row[0]) is not None for row in sample)
    if is_table and 2 * names_of_list < max(map(sum, _counts(rows[1:], photos))):
        return words, rows
    if list_error is not None:
        raise list_error
    return form, sample


def _joined(parts: Sequence[str], photos: PhotoNames) -> tuple[TableForm, list[Sequence[Any]]]:
    """Tables that are joined by their first columns. A text file is one of words unless its suffix is that of a table
    of delimited cells, and a header is not joined."""
    forms = []
    for part in parts:
        name = file_name(part).lower()
        if name.endswith((".parquet", ".jsonl", ".ndjson", ".json")):
            raise ResoluteError(f"LABELS: got {part} among tables to join, expected text files; join them yourself")
        candidates: list[TableForm] = [DelimitedForm(part, each) for each in _DELIMITERS]
        candidates += [WordForm(part)] if not name.endswith((".csv", ".tsv")) else []
        sampled = [(form, *_sample(form)) for form in candidates]
        usable = [form for form, sample, error in sampled if error is None and sample and len(sample[0]) > 1]
        if not usable:
            raise next(error for _, _, error in reversed(sampled) if error is not None)
        forms.append(usable[0])
    form = JoinedForm(*forms)
    sample, error = _sample(form)
    if error is not None:
        raise error
    return form, sample


# ---- the columns


def _text(cell: Any) -> str | None:
    """A cell as the name of a photo; None if it cannot be one."""
    if isinstance(cell, str):
        return cell
    return str(cell) if isinstance(cell, int) and not isinstance(cell, bool) else None


def _counts(rows: Sequence[Sequence[Any]], photos: PhotoNames) -> list[list[int]]:
    """For each column, how many cells name photos by each rank."""
    counts = [[0, 0, 0] for _ in rows[0]]
    for row in rows:
        for column, cell in zip(counts, row, strict=False):
            text = _text(cell)
            rank = photos.rank(text) if text else None
            if rank is not None:
                column[rank] += 1
    return counts


def _is_number(cell: Any) -> bool:
    try:
        float(cell)
    except (TypeError, ValueError):
        return False
    return True


class _Choice:
    """The choice of the columns of `form` by the rows of `sample`."""

    def __init__(
        self,
        form: TableForm,
        sample: list[Sequence[Any]],
        columns: str | None,
        photos: PhotoNames,
        known_classes: Sequence[str],
        setting: str,
        split: SplitSetting | None,
        group: str | None,
        *,
        asks_for_split: bool,
        hints_at_group: bool,
    ) -> None:
        self.form, self.path, self.photos = form, form.path, photos
        self.columns, self.known_classes, self.setting = columns, frozenset(known_classes), setting
        self.split = None if split is None or not split.column else split.column
        self.group = group
        self.asks_for_split, self.hints_at_group = asks_for_split, hints_at_group
        self.sample = sample
        self.first = list(form.header) if form.header is not None else [str(cell) for cell in sample[0]]
        # The rows that are data in any case.
        self.rows = sample if form.header is not None or len(sample) == 1 else sample[1:]

    def layout(self) -> Layout:
        if self.columns is not None:
            positions, are_names = self._positions(self.columns)
            has_header = self.form.header is None and (are_names or self._is_header(*positions))
            named = are_names or has_header or self.form.header is not None
            names = [self.first[i] if named else str(i) for i in positions[1:]]
            image, targets = positions[0], positions[1:]
            divides = self._named_column(self.split, "SPLIT", named=named)
            group = self._named_column(self.group, "GROUP", named=named)
            self._ask_for_split(positions, named=named)
        else:
            image = self._image()
            has_header = self.form.header is None and self._is_header(image)
            named = has_header or self.form.header is not None
            divides = self._named_column(self.split, "SPLIT", named=named)
            group = self._named_column(self.group, "GROUP", named=named)
            self._ask_for_split([image], named=named)
            targets = self._targets(image, self.first if named else None, without=(divides, group))
            names = [self.first[i] if named else str(i) if len(targets) > 1 else "label" for i in targets]
        return Layout(
            form=self.form,
            image=image,
            targets=tuple(targets),
            names=tuple(names),
            has_header=has_header,
            names_have_suffixes=self._holds_files(image, nearly_all=True),
            split=divides,
            group=group,
            group_hint=self._group_hint([image, *targets], named=named),
        )

    def _named_column(self, name: str | None, setting: str, *, named: bool) -> int | None:
        """The position of the column that a setting names."""
        if name is None:
            return None
        if named and name in self.first:
            return self.first.index(name)
        position = None if named else _position(name, len(self.first))
        if position is None:
            known = ", ".join(self.first)[:200] if named else f"no header, and {len(self.first)} columns from 0"
            raise ResoluteError(f"{self.path}: has no column {name}, got {known}, expected it; correct {setting}")
        return position

    def _group_hint(self, taken: Sequence[int], *, named: bool) -> str | None:
        """A line about the first column that is not `taken` and may say which photos belong together."""
        for i, name in enumerate(self.first) if self.hints_at_group and named else ():
            if i not in taken and (hint := hint_at_group(self.path, name, [row[i] for row in self.rows])) is not None:
                return hint
        return None

    def _ask_for_split(self, taken: Sequence[int], *, named: bool) -> None:
        """Raise `ResoluteError` if a column that is not `taken` may divide the rows into parts."""
        for i, name in enumerate(self.first) if self.asks_for_split and named else ():
            cells = [row[i] for row in self.rows]
            if i not in taken and (values := looks_like_a_split(name, cells)) is not None:
                raise question(self.path, name, cells, values)

    def _image(self) -> int:
        """The column of the images."""
        counts = _counts(self.rows, self.photos)
        best = max(map(sum, counts))
        if best == 0:
            return self._similar()
        for rank in (EXACT, WITHOUT_SUFFIX, SAME_STEM):
            found = [sum(column[: rank + 1]) for column in counts]
            if 2 * max(found) < best:
                continue
            columns = [i for i, count in enumerate(found) if 2 * count >= max(found)]
            if len(columns) > 1:
                raise self._question("several columns name photos", [(i, found[i]) for i in columns])
            files = [i for i in range(len(counts)) if i not in columns and self._holds_files(i)]
            if rank != EXACT and files and not self._holds_files(columns[0]):
                # why: a running number may be the stem of a photo's name by chance
                raise self._question(
                    "the names of photos may be in several columns", [(i, found[i]) for i in (*columns, *files)]
                )
            return columns[0]
        raise AssertionError("the last rank counts all cells that name photos")

    def _similar(self) -> int:
        """The only column whose cells are similar to names of photos, so that the difference can be explained."""
        texts = [[_text(row[i]) for row in self.rows[:20]] for i in range(len(self.first))]
        similar = [i for i, cells in enumerate(texts) if any(cell and self.photos.looks_like(cell) for cell in cells)]
        files = [i for i in similar if self._holds_files(i)]
        if len(files or similar) == 1:
            return (files or similar)[0]
        files = [i for i in range(len(self.first)) if self._holds_files(i)]
        if len(files) == 1 and not similar:
            return files[0]
        raise self._question("no column names photos", [(i, 0) for i in range(len(self.first))])

    def _holds_files(self, column: int, *, nearly_all: bool = False) -> bool:
        """Whether most cells of a column are names of image files, at least half of them or nine of ten."""
        texts = [_text(row[column]) for row in self.rows]
        count = sum(text is not None and (is_image(text) or is_url(text)) for text in texts)
        return count >= (0.9 if nearly_all else 0.5) * len(texts)

    def _question(self, what: str, columns: Sequence[tuple[int, int]]) -> ResoluteError:
        """The error that asks for `COLUMNS`; (position, cells that name photos) of columns."""
        texts = []
        for i, count in columns[:_SHOWN]:
            example = next((text for row in self.rows if (text := _text(row[i]))), "")
            shown = f"such as {example[:40]!r}" if not count else f"{count} of {len(self.rows)} rows"
            texts.append(f"{self.first[i][:40]} ({shown})" if self._first_is_header() else f"{i} ({shown})")
        rest = f" and {len(columns) - _SHOWN} more" if len(columns) > _SHOWN else ""
        photo = f", such as {self.photos.example!r}" if self.photos.example else ""
        return ResoluteError(
            f"{self.path}: {what}, got {', '.join(texts)}{rest}, expected one column with names of photos{photo}; "
            f"{'' if columns[0][1] else f'point {self._source} at the folder of these photos, or '}name the columns of "
            "images and labels with COLUMNS=image,label (positions, COLUMNS=0,1, if there is no header)"
        )

    @property
    def _source(self) -> str:
        return "VAL" if self.setting == "VAL_LABELS" else "SRC"

    def _first_is_header(self) -> bool:
        return self.form.header is not None or self.rows is not self.sample

    def _is_header(self, image: int, *targets: int) -> bool:
        """Whether the first row holds names of columns: it names no photo, and has no target as the rows below.

        Without `targets`, all other columns count."""
        first = self.sample[0]
        if len(self.sample) == 1:
            return self.photos.rank(str(first[image])) is None
        if self.photos.rank(str(first[image])) is not None or is_image(str(first[image])):
            return False
        for i in targets or [i for i in range(len(first)) if i != image]:
            cell, below = first[i], [row[i] for row in self.rows]
            if cell and (cell in below or (_is_number(cell) and all(map(_is_number, below)))):
                return False
        return True

    def _targets(self, image: int, names: Sequence[str] | None, *, without: Sequence[int | None]) -> list[int]:
        """The columns of the targets, none of those `without`; several if none of them can be preferred."""
        rest = [i for i in range(len(self.first)) if i not in (image, *without)]
        if len(rest) == 1:
            return rest
        if names is not None:
            rest = [i for i in rest if names[i].lower() not in _NUMBERS_OF_ROWS or not self._is_row_number(i)]
            rest = [i for i in rest if names[i]]  # pandas writes a column without a name
            usual = [i for i in rest if names[i].lower() in LABEL_COLUMNS]
            if len(usual) == 1 or len(rest) == 1:
                return usual if len(usual) == 1 else rest
            if usual:
                raise self._which_target(image, usual)
        known = [i for i in rest if self.known_classes and all(row[i] in self.known_classes for row in self.rows)]
        if len(known) == 1:
            return known
        if not rest:
            raise self._which_target(image, rest)
        if names is None or any(map(self._is_row_number, rest)):
            raise self._which_target(image, rest)
        return rest

    def _is_row_number(self, column: int) -> bool:
        """Whether a column holds a running number."""
        cells = [str(row[column]) for row in self.rows]
        if len(cells) < 3 or not all(cell.isascii() and cell.isdecimal() for cell in cells):
            return False
        first = int(cells[0])
        return [int(cell) for cell in cells] == list(range(first, first + len(cells)))

    def _which_target(self, image: int, columns: Sequence[int]) -> ResoluteError:
        named = self._is_header(image) if self.form.header is None else True
        names = [self.first[i] if named else str(i) for i in columns]
        example = f"{self.first[image] if named else image},{names[-1] if names else 'label'}"
        texts = ", ".join(
            f"{name[:40]} (such as {self.rows[0][i]!r:.40})"
            for name, i in list(zip(names, columns, strict=True))[:_SHOWN]
        )
        return ResoluteError(
            f"{self.path}: several columns may be the target, got {texts or 'none'}, expected one; name the columns of "
            f"images and targets with COLUMNS, such as COLUMNS={example}"
        )

    def _positions(self, columns: str) -> tuple[list[int], bool]:
        """(the positions of `columns`, whether they are named in the first row)."""
        names, wanted = self.first, column_names(columns)
        by_name = [column_span(each, lambda name: names.index(name) if name in names else None) for each in wanted]
        by_position = [column_span(each, lambda text: _position(text, len(names))) for each in wanted]
        are_names = None not in by_name
        spans = by_name if are_names else by_position
        if None in spans:
            spans = by_name if any(by_name) else by_position
            raise ResoluteError(
                f"{self.path}: has no column {wanted[spans.index(None)]}, got {', '.join(names)[:200]}, expected "
                f"{columns}; correct COLUMNS (for a table without a header use positions from 0, such as COLUMNS=0,1)"
            )
        repeated = next((each for each in wanted if are_names and names.count(each) > 1), None)
        if repeated is not None:
            raise ResoluteError(
                f"{self.path}: got {names.count(repeated)} columns called {repeated}, expected different names; name "
                "the columns by position with COLUMNS=0,1, counted from 0"
            )
        positions = [i for span in spans for i in span or ()]
        if len(set(positions)) < len(positions):
            twice = next(names[i] for i in positions if positions.count(i) > 1)
            raise ResoluteError(
                f"{self.path}: got column {twice} twice, expected each column once; correct COLUMNS={columns}"
            )
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
