"""The targets of a source's images: a class, any number of labels, or numbers. Recognised from all images, or set by
`TARGET`.

A target is one cell, or the cells of several columns. A cell holds what the source says: text, a number, true or false,
a list of texts or numbers, or nothing. In a table of text (CSV, a list of paths) numbers and lists are written as text;
lists are in JSON or as Python prints them.

Recognised are a column of classes (whole numbers or any text), columns of 0 and 1, columns of numbers, and lists.
What could mean two things is an error that asks for `TARGET`.

In columns of 0 and 1, a blank cell and -1 mean what `BLANK` and `UNCERTAIN` say, without which they are an error. In
columns of -1 and 1 alone, -1 is written for 0.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.target import TargetKind

from .image_ref import Ignored, ImageRef, Label, SourceTarget

__all__ = [
    "AUTO",
    "Cell",
    "Meaning",
    "Place",
    "TargetSetting",
    "Targets",
    "describe_label",
    "is_number",
    "is_word_for_none",
    "name_and_unit",
    "parse_target",
]

Cell = str | int | float | list[str | int | float] | None
Place = int | str  # the line of a row, from 1; or the name of the image

_SEPARATORS = {"space": " ", "comma": ",", "semicolon": ";", "bar": "|"}
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")
_UNIT = re.compile(r"(.*\S)\s*(?:\[([^\[\]]+)\]|\(([^()]+)\))")
_ONES, _ZEROS = frozenset({"1", "1.0", "true"}), frozenset({"0", "0.0", "false"})
_BLANK = frozenset({"", "nan", "na", "n/a", "<na>", "none", "null"})  # in columns of 0 and 1, as pandas and R write it
_BIT = re.compile(r"[+-]?[01](\.0*)?")
_MARKS: dict[object, str] = {cell: mark for mark in ("1", "0", "-1") for cell in (mark, f"{mark}.0", int(mark))} | {
    "": "",
    None: "",
}
_NOT_FINITE = frozenset({"nan", "inf", "+inf", "-inf", "infinity", "+infinity", "-infinity"})
_WHOLE_FLOAT = re.compile(r"(0|[1-9]\d*)(\.0*)?")
_SHORT = 64  # characters of a cell that may be kept in memory once parsed
_MAX_SEEN = 1 << 17  # different cells of a column that are remembered, so as to look at each once
_NO_LABEL = frozenset({"-1", "-1.0"})  # as a class. Source: `datasets`' ClassLabel, and scikit-learn's semi-supervised
# Written for a missing label, without case, separators and brackets. Not "empty" and "other", which are classes of
# camera traps and the like.
_WORDS_FOR_NONE = frozenset(
    {
        *("nan", "nat", "none", "null", "nil", "na", "n/a", "n.a", "#n/a", "#na", "n/d", "tbd", "todo"),
        *("no label", "no labels", "nolabel", "no class", "noclass", "unlabeled", "unlabelled", "unlabeled data"),
        *("not labeled", "not labelled", "not annotated", "unannotated", "not available", "not applicable"),
        *("unknown", "unknown class", "unknown label", "unk", "undefined", "unspecified", "not specified"),
        *("unassigned", "unclassified", "unidentified", "missing", "missing label", "unset", "not set"),
        *("unbekannt", "inconnu", "desconocido", "desconhecido", "sconosciuto", "\u672a\u77e5", "\u4e0d\u660e"),
    }
)
_SIGNS_FOR_NONE = re.compile(r"[?.\-_\u2013\u2014\uff1f]+")
_MAX_FLOAT32 = 3.4028234663852886e38  # without NumPy, which imports slowly
_SHOWN_VALUES = 12  # of a target in words
_EXAMPLES = 3  # images shown
_NAMES = ("text", "words", "boolean")  # in `_Column.examples`, what can only be names beside numbers


class TargetSetting(NamedTuple):
    """`TARGET` as parsed: a kind, None to recognise it, and the sign between the labels or numbers in a cell of text.

    `drop_unlabelled`: leave out images without a target, instead of refusing them; `keep_words`: words such as
    "unknown" are names of classes, as those among `named` are in any case. `blank` and `uncertain` are `BLANK` and
    `UNCERTAIN`. `signs`, for a validation source: what `SourceTarget.signs` is for the training source.
    """

    kind: TargetKind | None = None
    separator: str | None = None
    drop_unlabelled: bool = False
    keep_words: bool = False
    named: frozenset[str] = frozenset()
    blank: Literal["0", "drop"] | None = None
    uncertain: Literal["0", "1", "ignore"] | None = None
    signs: bool | None = None

    @property
    def of_bits(self) -> str | None:
        """The setting in words that is about columns of 0 and 1; None if there is none."""
        if self.blank is not None:
            return f"BLANK={self.blank}"
        return None if self.uncertain is None else f"UNCERTAIN={self.uncertain}"

    def is_dropped(self, label: Label | None, file: str, name: str, line: int = 0, *, several_words: str = "") -> bool:
        """Whether the image `name` is left out, because it has no target: nothing, -1 as a class, or a word for it.

        `several_words`: as in `SourceTarget`.
        Raises `ResoluteError`, naming the file and line (0: none) of the target, if such images are to be refused.
        """
        if isinstance(label, str) and not _is_doubtful(label):
            return False  # as nearly always, and several times as fast
        labels = (label,) if isinstance(label, str) else label or ()
        is_unlabelled = label is None or not _NO_LABEL.isdisjoint(labels)
        word = None if is_unlabelled else next(filter(self.is_no_label, labels), None)
        if not is_unlabelled and word is None:
            return False
        if self.drop_unlabelled or (label is None and self.blank == "drop"):
            return True
        where = f"{file}: line {line}" if line else file
        tags = ""
        if several_words:
            tags = f"; if cells such as {several_words} are several labels, and a photo may have none, set "
            tags += "TARGET=labels:space"
        if word is not None:
            raise ResoluteError(
                f"{where}: {name} has the label {word!r}, expected a class; leave such photos out with "
                "UNLABELLED=drop, or take such words for names of classes with UNLABELLED=keep"
                f"{tags}"
            )
        got = "nothing or a word such as nan" if label is None else "-1"
        raise ResoluteError(
            f"{where}: {name} is unlabelled, got {got}, expected its target; label it, or leave out all unlabelled "
            f"photos with UNLABELLED=drop{tags}"
        )

    def is_no_label(self, label: object) -> bool:
        """Whether a label is a word that programs and people write for a missing one, and is not said to be a class."""
        return isinstance(label, str) and not self.keep_words and is_word_for_none(label) and label not in self.named

    def drops_folder(self, name: str) -> bool:
        """Whether the images of the class folder `name` are left out."""
        return self.drop_unlabelled and self.is_no_label(name)

    def with_class_folders(self, images: Iterable[ImageRef], root: str) -> Iterator[ImageRef]:
        """Yield `images`, labelled by the folders of `root`. Raises as `is_dropped`, but after the last one, since
        other questions about the folders come first.
        """
        label: Label = ""
        doubtful: ImageRef | None = None
        for image in images:
            if image.label != label:
                label = image.label
                if doubtful is None and self.is_no_label(label):
                    doubtful = image
            yield image
        if doubtful is not None:
            self.is_dropped(doubtful.label, root, doubtful.name)


def is_word_for_none(text: str) -> bool:
    """Whether `text` is a word that is written for a missing label, such as nan, None or unknown."""
    return not text[-1:].isdigit() and _is_word_for_none(text)  # why: most cells are numbers


@lru_cache(maxsize=1 << 12)
def _is_doubtful(label: str) -> bool:
    return label in _NO_LABEL or is_word_for_none(label)


@lru_cache(maxsize=1 << 12)
def _is_word_for_none(text: str) -> bool:
    word = re.sub(r"[\s_-]+", " ", text).strip(" .<>()[]{}\"'").casefold()
    return word in _WORDS_FOR_NONE or _SIGNS_FOR_NONE.fullmatch(text.strip()) is not None


AUTO = TargetSetting()


def parse_target(text: str | None) -> TargetSetting:
    """Parse "class", "labels", "values", or one of the latter with a separator, "labels:space".

    Raises `ResoluteError` for anything else.
    """
    if text is None:
        return AUTO
    kind, colon, separator = text.partition(":")
    if kind == "class" and not colon:
        return TargetSetting("class")
    if kind in ("labels", "values") and (separator in _SEPARATORS or not colon):
        return TargetSetting("labels" if kind == "labels" else "values", _SEPARATORS.get(separator))
    raise ResoluteError(
        f"TARGET: got {text!r}, expected class, labels or values, or labels:space, labels:comma, labels:semicolon or "
        "labels:bar for several labels in a cell; correct TARGET"
    )


def is_number(label: str) -> bool:
    """Whether a label is a class number in canonical form: no sign, no leading zeros."""
    return label.isascii() and label.isdigit() and (label == "0" or label[0] != "0")


def describe_label(label: Label | None, names: Sequence[str] = (), units: Sequence[str] = ()) -> str:
    """A target in words: `cat`, `cat + dog`, `age 3.5 years, mass 2 kg`."""
    if label is None:
        return "unlabelled"
    if isinstance(label, str):
        return label
    if not names:
        return " + ".join(map(str, label)) or "no label"
    texts = [f"{name} {value:.6g} {unit}".rstrip() for name, value, unit in zip(names, label, units, strict=True)]
    return ", ".join(texts[:_SHOWN_VALUES]) + (", …" if len(texts) > _SHOWN_VALUES else "")


def name_and_unit(names: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names without the units in them, `age [years]` or `mass (kg)`, and the units, "" where there is none."""
    matches = [_UNIT.fullmatch(name) for name in names]
    bare = tuple(match[1] if match else name for match, name in zip(matches, names, strict=True))
    if len(set(bare)) < len(bare):  # as in `size [px]` beside `size [cm]`
        return tuple(names), ("",) * len(bare)
    return bare, tuple((match[2] or match[3]).strip() if match else "" for match in matches)


class _Parsed(NamedTuple):
    """What a cell holds. `items` are the labels or numbers in it, none if it is missing; `number` is that of an integer
    or a float.

    `mark` is what the cell means in columns of 0 and 1: "1", "0", "-1", "" (blank) or "?" (none of these). `note` is
    what a text may be besides: "words", "separated" (by a bar or semicolon), "decimal comma", "not finite", "boolean"
    or "bad list"; and "vector" for a list of numbers with fractions.
    """

    type: Literal["missing", "integer", "float", "list", "text"]
    items: Sequence[str | int | float]
    mark: str
    number: float | None = None
    note: str = ""


_NOTHING = _Parsed("missing", (), "")


@dataclass(frozen=True)
class _Form:
    """How cells are to be read: `is_text` if numbers and lists are written as text."""

    is_text: bool
    separator: str | None

    def parse(self, cell: Cell) -> _Parsed:
        if cell is None or cell == "":
            return _NOTHING
        if isinstance(cell, list):
            return _parsed_list(cell)
        if not isinstance(cell, str):
            mark = "" if cell != cell else _MARKS.get(cell, "?")  # why: NaN is blank
            return _Parsed("float" if isinstance(cell, float) else "integer", (cell,), mark, cell)
        if not self.is_text:
            return _Parsed("text", (cell,), _mark(cell))
        parsed = _parse_short(cell) if len(cell) <= _SHORT else _parse_text(cell)
        if self.separator is None:
            return parsed
        return parsed._replace(items=[part for part in map(str.strip, cell.split(self.separator)) if part])

    def is_class_number(self, item: str | int | float) -> bool:
        return self.is_text and is_number(item) if isinstance(item, str) else isinstance(item, int)

    def marks(self, cells: tuple[Cell, ...]) -> list[str]:
        """The `mark` of each cell."""
        try:
            return [_MARKS[cell] for cell in cells]  # most rows, and several times as fast
        except (KeyError, TypeError):  # the latter: of a list
            return [self.parse(cell).mark for cell in cells]


def _parse_text(text: str) -> _Parsed:
    """Parse a cell that is not blank, in a table of text."""
    if _NUMBER.fullmatch(text):
        value = float(text)
        is_whole = abs(value) <= _MAX_FLOAT32 and value.is_integer()
        mark = _mark(text) if abs(value) <= 1 else "?"
        return _Parsed("integer" if is_whole else "float", (text,), mark, value)
    if text[0] == "[" and text[-1] == "]":
        items = _parse_list(text)
        return _Parsed("text", (text,), "?", note="bad list") if items is None else _parsed_list(items)
    lower = text.lower()
    if lower in _ONES | _ZEROS:
        note = "boolean"
    elif lower in _NOT_FINITE:
        note = "not finite"
    elif _DECIMAL_COMMA.fullmatch(text):
        note = "decimal comma"
    elif "|" in text or ";" in text:
        note = "separated"
    else:
        note = "words" if " " in text or "," in text else ""
    return _Parsed("text", (text,), _mark(text), note=note)


_parse_short = lru_cache(maxsize=1 << 12)(_parse_text)


def _parsed_list(items: Sequence[str | int | float]) -> _Parsed:
    return _Parsed("list", items, "?", note="vector" if any(isinstance(item, float) for item in items) else "")


def _parse_list(text: str) -> list[str | int | float] | None:
    """The items of a list in JSON, or as Python prints it; None for anything else."""
    for parse in (json.loads, ast.literal_eval):
        try:
            parsed = parse(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(parsed, list) and all(isinstance(item, str | int | float) for item in parsed):
            return parsed
    return None


def _mark(text: str) -> str:
    text = text.strip().lower()
    if text in _BLANK:
        return ""
    if _BIT.fullmatch(text):
        return str(int(float(text)))
    return "1" if text in _ONES else "0" if text in _ZEROS else "?"


class _Column:
    """What the cells of a column hold; `examples` maps each note, or else type, of `_Parsed` to its first cell and the
    place of that; and "no label", for words that say so."""

    def __init__(self, name: str, setting: TargetSetting, form: _Form) -> None:
        self.name, self._setting, self._form = name, setting, form
        self.are_whole_floats = False  # labels are whole numbers, and some are written with a point, as pandas does
        self._may_be_whole_floats = True
        self.are_whole = True  # the numbers
        self.has_fractions = False  # numbers with a fraction other than 0.0 and 1.0
        self.examples: dict[str, tuple[Cell, Place]] = {}
        self.in_unit_range = True  # of the numbers
        self.numbered = True  # all labels are class numbers
        self.marks: set[str] = set()  # of its cells up to the first "?"
        self._seen: set[str] = set()

    def add(self, cell: Cell, place: Place) -> None:
        if isinstance(cell, str):
            if cell in self._seen:
                return
            if len(self._seen) < _MAX_SEEN:
                self._seen.add(cell)
        parsed = self._form.parse(cell)
        is_no_label = self._setting.is_no_label(cell)
        if "?" not in self.marks:
            self.marks.add(parsed.mark)
        self.examples.setdefault("no label" if is_no_label else parsed.note or parsed.type, (cell, place))
        if is_no_label or parsed.type == "missing":
            return
        number = parsed.number
        if number is not None:
            self.in_unit_range = self.in_unit_range and 0 <= number <= 1
            self.are_whole = self.are_whole and (parsed.type == "integer" or float(number).is_integer())
            self.has_fractions = self.has_fractions or (parsed.type == "float" and number not in (0, 1))
        if parsed.type == "integer" and number == -1:
            return
        is_whole = isinstance(cell, str) and _WHOLE_FLOAT.fullmatch(cell) is not None
        self._may_be_whole_floats = self._may_be_whole_floats and is_whole
        self.are_whole_floats = self._may_be_whole_floats and (self.are_whole_floats or "." in str(cell))
        self.numbered = self.numbered and all(map(self._form.is_class_number, parsed.items))

    def first(self, *kinds: str) -> tuple[Cell, Place] | None:
        """The first example of the first of `kinds` that occurs."""
        return next((self.examples[kind] for kind in kinds if kind in self.examples), None)


class _Bits:
    """The rows of several columns, as far as they are columns of 0 and 1."""

    def __init__(self, setting: TargetSetting, form: _Form) -> None:
        self._setting, self._form = setting, form
        self.other: tuple[int, Cell, Place] | None = None  # the first cell that is something else; none after it counts
        self.blank = self.uncertain = 0  # cells
        self.with_blank = self.partly_blank = 0  # rows with blank cells, and those that have others too
        self.first_blank: tuple[int, Place] = (0, 0)  # column, from 0, of the first of `partly_blank`
        self.first_uncertain: tuple[int, Place] = (0, 0)
        self.one_each = True  # each row that is not left out has a single 1
        self._marks: set[str] = set()

    def add(self, cells: tuple[Cell, ...], place: Place) -> None:
        if self.other is not None:
            return
        marks = self._form.marks(cells)
        if "?" in marks:
            at = marks.index("?")
            self.other = at, cells[at], place
            return
        self._marks.update(marks)
        ones, blank = marks.count("1"), marks.count("")
        if uncertain := marks.count("-1"):
            if not self.uncertain:
                self.first_uncertain = marks.index("-1"), place
            self.uncertain += uncertain
            ones += uncertain if self._setting.uncertain == "1" else 0
        if blank:
            self.blank += blank
            self.with_blank += 1
            if blank < len(marks):
                if not self.partly_blank:
                    self.first_blank = marks.index(""), place
                self.partly_blank += 1
            if self._setting.blank == "drop":
                return
        self.one_each = self.one_each and ones == 1

    @property
    def signs(self) -> bool:
        """Whether -1 is written for 0: no cell is 0 or blank, and UNCERTAIN says nothing else.

        A validation source follows the training source.
        """
        if self._setting.uncertain is not None or self.other is not None:
            return False
        return (
            self._marks == {"-1", "1"}
            if self._setting.signs is None
            else self._setting.signs and "0" not in self._marks
        )

    def notes(self) -> Iterator[str]:
        """What the cells that are neither 0 nor 1 are taken for."""
        if self.signs:
            yield "-1 counts as 0, since no cell is 0 or blank (if it means unknown, set UNCERTAIN)"
        if self.blank and self._setting.blank == "0":
            yield f"{_counted(self.blank, 'blank cell')} as 0 (BLANK=0)"
        if self.with_blank and self._setting.blank == "drop":
            yield f"{_counted(self.with_blank, 'photo')} with blank cells left out (BLANK=drop)"
        if self.uncertain and self._setting.uncertain is not None:
            what = "ignored" if self._setting.uncertain == "ignore" else f"as {self._setting.uncertain}"
            yield f"{_counted(self.uncertain, 'cell')} of -1 {what} (UNCERTAIN={self._setting.uncertain})"


class Targets:
    """Collects the targets of all images of a source; `meaning` is then what they mean.

    `path` is the file or folder, for messages; `columns` are the names of the columns of targets (none: a single one
    without a name). `is_text`: numbers and lists are written as text. `are_chosen`: the user has named the columns.
    """

    def __init__(
        self,
        path: str,
        columns: Sequence[str],
        setting: TargetSetting = AUTO,
        *,
        is_text: bool,
        are_chosen: bool = True,
    ) -> None:
        self._path, self._setting, self._are_chosen = path, setting, are_chosen
        self._form = _Form(is_text, setting.separator)
        self._columns = [_Column(name, setting, self._form) for name in columns or ["target"]]
        self._rows = 0
        self._bits = _Bits(setting, self._form)
        self._first: list[tuple[str, tuple[Cell, ...], Place]] = []

    def add(self, name: str, cells: tuple[Cell, ...], place: Place) -> None:
        """Add the target of the image `name`."""
        self._rows += 1
        if len(self._first) < _EXAMPLES:
            self._first.append((name, cells, place))
        if len(cells) == 1:
            self._columns[0].add(cells[0], place)
            return
        for column, cell in zip(self._columns, cells, strict=True):
            column.add(cell, place)
        self._bits.add(cells, place)

    def meaning(self) -> Meaning:
        """Raises `ResoluteError` if the cells cannot be targets, are ambiguous, or do not fit the setting."""
        columns, setting = self._columns, self._setting
        kind, why = self._one(columns[0]) if len(columns) == 1 else self._several()
        is_signed = len(columns) == 1 and self._is_signed(columns[0])
        is_of_bits = len(columns) > 1 and kind != "values"
        if is_of_bits:
            self._check_bits(kind)
        elif setting.of_bits is not None and setting.signs is None:
            name, _, value = setting.of_bits.partition("=")
            what = f"{len(columns)} columns of numbers" if len(columns) > 1 else f"column {columns[0].name}"
            raise ResoluteError(
                f"{name}: has no effect on {what} of {self._path}, got {value}, expected it for several columns of 0 "
                f"and 1; drop {name}, or name these columns with COLUMNS=image,first..last"
            )
        names, units = name_and_unit([column.name for column in columns]) if kind == "values" else ((), ())
        if kind == "values" and len(columns) == 1 and (width := self._width()) > 1:
            names, units = tuple(f"{names[0]} {i}" for i in range(width)), units * width
        are_names = len(columns) > 1 or is_signed
        numbered = all(is_number(column.name) for column in columns) if are_names else columns[0].numbered
        if kind == "class" and self._form.is_text and columns[0].first("list", "vector"):
            numbered = False  # `[0]` is a name
        notes = [*self._bits.notes()] if is_of_bits else []
        whole_floats = kind == "class" and len(columns) == 1 and self._form.is_text and columns[0].are_whole_floats
        if whole_floats:
            numbered, notes = True, ["numbers such as 1.0 are the class numbers 1 and so on"]
        if is_signed:
            notes = [f"1 is the label {columns[0].name}, -1 is none"]
        return Meaning(
            path=self._path,
            kind=kind,
            columns=tuple(column.name for column in columns),
            names=names,
            units=units,
            numbered=numbered and kind != "values",
            why="; ".join(["as TARGET says" if setting.kind else why, *notes]),
            rows=self._rows,
            first=tuple(self._first),
            form=self._form,
            signs=is_signed or (is_of_bits and self._bits.signs),
            whole_floats=whole_floats,
            setting=setting,
            several_words=self._several_words(kind),
        )

    def _several_words(self, kind: TargetKind) -> str:
        words = None
        if kind == "class" and self._setting.kind is None and len(self._columns) == 1:
            words = self._columns[0].first("words")
        return "" if words is None else _shown(words[0])

    def _width(self) -> int:
        """How many numbers the first target has."""
        examples = self._columns[0].examples
        first = next((example for kind, example in examples.items() if kind not in ("missing", "no label")), None)
        return 1 if first is None else len(self._form.parse(first[0]).items)

    def _one(self, column: _Column) -> tuple[TargetKind, str]:
        """(kind, how it was recognised) of the targets in a single column."""
        name, kind = column.name, self._setting.kind
        if self._is_signed(column):
            return "labels", f"column {name} holds -1 and 1"
        if kind is None and column.marks == {"-1", "1"} and not self._setting.drop_unlabelled:
            raise self._ambiguous(
                f"column {name}",
                "-1 and 1 alone",
                f"TARGET=labels if a photo with 1 has the label {name} and one with -1 has not, or UNLABELLED=drop if "
                "-1 means unlabelled",
            )
        if kind != "class" and (bad := column.first("bad list")):
            raise self._error(
                bad,
                f"in column {name}",
                "a list of texts or numbers in JSON",
                "correct it, or set TARGET=class if it is a name",
            )
        # One label that is written with spaces looks like several of them.
        is_one_label = kind == "labels" and self._setting.separator is None and self._form.is_text
        if is_one_label and (words := column.first("separated", "words")):
            raise self._ambiguous(
                f"column {name}",
                _example(words),
                "TARGET=labels:space, :comma, :semicolon or :bar, which say what separates labels (a sign that no "
                "label has, if there is one label in each cell)",
            )
        if kind is not None:
            return kind, ""
        if lists := column.first("list", "vector"):
            if others := [kind for kind in column.examples if kind not in ("list", "vector", "missing")]:
                raise self._mixed(column, lists, *_NAMES, *others)
            if "vector" in column.examples:
                return "values", f"column {name} holds lists of numbers"
            return "labels", f"column {name} holds lists"
        if separated := column.first("separated"):
            raise self._ambiguous(
                f"column {name}",
                _example(separated),
                "TARGET=labels:bar or labels:semicolon if these are several labels, or TARGET=class if it is one",
            )
        if decimal := column.first("decimal comma"):
            raise self._ambiguous(
                f"column {name}",
                _example(decimal),
                "TARGET=labels:comma if these are several labels, or TARGET=class if it is one (a number is written "
                "with a point, 0.5 for 0,5)",
            )
        if number := column.first("float"):
            if column.first(*_NAMES):
                raise self._mixed(column, number, *_NAMES)
            if not self._form.is_text and column.are_whole and not name_and_unit([name])[1][0]:
                raise self._ambiguous(
                    f"column {name}",
                    f"{_example(number)} and other whole numbers stored as floats",
                    "TARGET=class for class numbers, or TARGET=values for numbers to predict",
                )
            return "values", f"column {name} holds numbers with fractions"
        if words := column.first("words"):
            hint = f"(if cells such as {_shown(words[0])} are several labels, set TARGET=labels:space or labels:comma)"
            return "class", f"column {name} holds texts {hint}"
        if column.first("text", "boolean", "not finite"):
            return "class", f"column {name} holds texts"
        if name_and_unit([name])[1][0]:
            return "values", f"column {name} holds numbers with a unit"
        return "class", f"column {name} holds whole numbers (for numbers to predict set TARGET=values)"

    def _is_signed(self, column: _Column) -> bool:
        """Whether a single column is one label, which is there if a cell is 1, and not if it is -1."""
        setting = self._setting
        is_signed = column.marks == {"-1", "1"} or (setting.signs is True and column.marks <= {"-1", "1"})
        return is_signed and setting.kind == "labels" and setting.separator is None and not setting.drop_unlabelled

    def _several(self) -> tuple[TargetKind, str]:
        """(kind, how it was recognised) of the targets in several columns."""
        columns, count, kind = self._columns, len(self._columns), self._setting.kind
        if self._setting.separator is not None:
            raise ResoluteError(
                f"TARGET: got a separator for {count} columns of {self._path} ({_first(self._names)}), expected it for "
                "labels in one column; drop it, or name that column with COLUMNS=image,column"
            )
        if kind is not None:
            return kind, ""
        if self._bits.other is None:
            what = f"{count} columns of {'-1' if self._bits.signs else '0'} and 1"
            if self._bits.one_each and self._setting.uncertain != "ignore":
                return "class", f"{what}, a single 1 in each row (for several labels set TARGET=labels)"
            return "labels", what
        others = ("text", "words", "separated", "decimal comma", "list", "vector", "bad list")
        texts = [column for column in columns if column.first(*others)]
        if texts and not self._are_chosen:
            raise ResoluteError(
                f"{self._path}: unrecognised columns, got {', '.join(self._names)[:200]} beside the image's, expected "
                "names such as id,label; name the image's and the target's with COLUMNS=image,label, or several "
                "targets with COLUMNS=image,first..last"
            )
        if texts:
            raise self._error(
                texts[0].first(*others),
                f"in column {texts[0].name}",
                "a number, as in other columns",
                "correct it, or leave the column out of COLUMNS",
            )
        of_bits = [column for column in columns if column.marks <= {"0", "1", "-1", ""} and column.marks != {""}]
        if any(column.has_fractions for column in columns) and all(column.in_unit_range for column in columns):
            return "values", f"{count} columns of numbers from 0 to 1"
        if of_bits and not self._are_chosen:
            names = [column.name for column in of_bits]
            rest = [name for name in self._names if name not in names]
            raise self._ambiguous(
                "columns",
                f"{len(names)} of 0 and 1 ({_first(names)}) and {len(rest)} of other numbers ({_first(rest)})",
                f"COLUMNS, which names the image's and those of one kind, such as COLUMNS=image,{rest[0]}",
            )
        return "values", f"{count} columns of numbers"

    def _check_bits(self, kind: TargetKind) -> None:
        """Raise `ResoluteError` for cells of several columns that are no bits, or need a setting that is not there."""
        bits, setting, count = self._bits, self._setting, len(self._columns)
        if bits.other is not None:
            at, cell, place = bits.other
            raise _not_a_bit(self._path, self._names[at], cell, place)
        if kind == "class" and setting.uncertain == "ignore":
            raise ResoluteError(
                f"UNCERTAIN: got ignore with TARGET=class for {self._path}, expected 0 or 1, since one class of each "
                "photo has to be known; correct UNCERTAIN, or set TARGET=labels"
            )
        seen, ways = [], []
        if bits.partly_blank and setting.blank is None:
            seen.append(f"{_counted(bits.blank, 'blank cell')} ({self._first_place(bits.first_blank)})")
            ways.append(f"BLANK=0 (they count as 0) or BLANK=drop (leave out {_counted(bits.with_blank, 'photo')})")
        if bits.uncertain and not bits.signs and setting.uncertain is None:
            seen.append(f"{_counted(bits.uncertain, 'cell')} of -1 ({self._first_place(bits.first_uncertain)})")
            ways.append(
                "UNCERTAIN=0, UNCERTAIN=1 or UNCERTAIN=ignore (not counted in the loss and in metrics)"
                if kind == "labels"
                else "UNCERTAIN=0 or UNCERTAIN=1"
            )
        if seen:
            if not setting.kind and not bits.blank:
                ways.append("or TARGET=values if these are numbers to predict")
            raise self._ambiguous(f"{count} columns of 0 and 1", " and ".join(seen), ", and ".join(ways))

    def _first_place(self, first: tuple[int, Place]) -> str:
        at, place = first
        return f"first: {_place(place)}, column {self._names[at]}"

    @property
    def _names(self) -> list[str]:
        return [column.name for column in self._columns]

    def _error(self, example: tuple[Cell, Place] | None, where: str, expected: str, do: str) -> ResoluteError:
        cell, place = example or ("", "")
        return _error(self._path, place, _shown(cell), where, expected, do)

    def _ambiguous(self, where: str, seen: str, settings: str) -> ResoluteError:
        """The error for what could mean two things: what was `seen`, and the `settings` that say which is meant."""
        return ResoluteError(f"{self._path}: ambiguous {where}, got {seen}, expected one meaning; set {settings}")

    def _mixed(self, column: _Column, example: tuple[Cell, Place], *others: str) -> ResoluteError:
        """The error for a column with a cell such as `example` beside the first of `others`."""
        return self._ambiguous(
            f"column {column.name}",
            f"{_example(example)} and {_example(column.first(*others))}",
            "TARGET=class if these are names, or correct it",
        )


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """The meaning of the targets of the source `path`.

    `columns` are the names of the columns, `names` and `units` those of values; `numbered`: all labels are class
    numbers. `why` says by what the kind was recognised; `first` are the name, cells and place of the first images.
    `signs` is as in `SourceTarget`.
    """

    path: str
    kind: TargetKind
    columns: tuple[str, ...]
    names: tuple[str, ...]
    units: tuple[str, ...]
    numbered: bool
    why: str
    rows: int
    first: tuple[tuple[str, tuple[Cell, ...], Place], ...]
    form: _Form
    signs: bool = False
    whole_floats: bool = False  # class numbers are written with a point
    setting: TargetSetting = AUTO
    several_words: str = ""  # as in `SourceTarget`

    @property
    def are_plain_classes(self) -> bool:
        """Whether the target of an image is the text in its cell."""
        return self.kind == "class" and len(self.columns) == 1 and self.form.is_text and not self.whole_floats

    def source_target(self, label_names: Sequence[str] | None = None) -> SourceTarget:
        """For a `Source`, with what was recognised in words; `label_names` are those of class numbers."""
        return SourceTarget(
            kind=self.kind,
            names=self.names,
            units=self.units,
            classes=self.columns if self.kind != "values" and (len(self.columns) > 1 or self.signs) else (),
            columns=self.columns,
            separator=self.form.separator,
            signs=self.signs,
            ignored=self.setting.uncertain == "ignore",
            several_words=self.several_words,
            about=tuple(self._about(label_names)),
        )

    def _about(self, label_names: Sequence[str] | None) -> Iterator[str]:
        values = "a number" if len(self.names) == 1 else f"{len(self.names)} numbers"
        what = {"class": "a class", "labels": "any number of labels", "values": values}[self.kind]
        if self.kind == "class" and not self.form.is_text:  # there is only one way to read it
            return
        yield f"{self.path}: {what} for each of {self.rows} photos (TARGET={self.kind}): {self.why}"
        for name, cells, place in self.first:
            label = self.label(cells, place)
            if label_names is not None and label is not None and self.kind != "values":
                numbers = [label] if isinstance(label, str) else map(str, label)
                named = tuple(
                    label_names[int(n)] if n.isdecimal() and int(n) < len(label_names) else n for n in numbers
                )
                label = named[0] if isinstance(label, str) else named
            where = f"line {place}: " if isinstance(place, int) else ""
            text = describe_label(label, self.names, self.units)
            is_left_out = label is None and self.setting.blank == "drop"
            yield f"  {where}{name}: {'left out' if is_left_out else text}"

    def label(self, cells: tuple[Cell, ...], place: Place) -> Label | None:
        """The target of an image; None if its cells are blank, except for labels in text: no labels.

        Raises `ResoluteError` for cells that do not fit, naming line or image, and column.
        """
        if len(cells) > 1 or self.signs:
            return self._label_of_several(cells, place)
        cell = cells[0]
        if isinstance(cell, str) and self.kind == "class":
            is_number = self.whole_floats and _WHOLE_FLOAT.fullmatch(cell)
            return str(int(float(cell))) if is_number else cell.strip() or None
        if self.kind == "values" and _is_missing(cell):
            return None
        if cell is None or (cell == "" and not (self.kind == "labels" and self.form.is_text)):
            return None
        items = self.form.parse(cell).items
        if self.kind == "values":
            numbers = tuple(self._number(self.columns[0], item, place) for item in items)
            if len(numbers) != len(self.names):
                raise self._error(
                    place, f"{len(numbers)} numbers", self.columns[0], f"{len(self.names)} as for other images"
                )
            return numbers
        for item in items:
            if isinstance(item, float) and not item.is_integer():
                raise self._error(place, repr(item), self.columns[0], "a name or a class number")
        labels = [str(int(item)) if isinstance(item, int | float) else item.strip() for item in items]
        if self.kind == "labels":
            return tuple(dict.fromkeys(labels))
        if len(labels) != 1:
            raise self._error(
                place,
                f"{len(labels)} labels",
                self.columns[0],
                "one, as TARGET=class says",
                "correct it, or set TARGET=labels",
            )
        return labels[0]

    def _label_of_several(self, cells: tuple[Cell, ...], place: Place) -> Label | None:
        if self.kind == "values":
            missing = [name for name, cell in zip(self.columns, cells, strict=True) if _is_missing(cell)]
            if len(missing) == len(cells) or (missing and self.setting.drop_unlabelled):
                return None
            if missing:
                got = _shown(cells[self.columns.index(missing[0])])
                do = "correct it, or leave out such photos with UNLABELLED=drop"
                raise self._error(place, got, missing[0], "a number", do)
            return tuple([self._number(name, cell, place) for name, cell in zip(self.columns, cells, strict=True)])
        marks, setting = self.form.marks(cells), self.setting
        for mark, name, cell in zip(marks, self.columns, cells, strict=True):
            # why again: the file may have changed since all of it was read
            is_known = setting.uncertain is not None or self.signs if mark == "-1" else mark != "?"
            if not is_known:
                raise _not_a_bit(self.path, name, cell, place)
        if "" in marks:
            is_unlabelled = marks.count("") == len(marks)
            if setting.blank is None and not is_unlabelled:
                raise _not_a_bit(self.path, self.columns[marks.index("")], None, place)
            if setting.blank != "0":
                return None
        pairs = zip(self.columns, marks, strict=True)
        ones = [name for name, mark in pairs if mark == "1" or (mark == "-1" and setting.uncertain == "1")]
        if self.kind == "labels":
            if setting.uncertain != "ignore":
                return tuple(ones)
            uncertain = (Ignored(name) for name, mark in zip(self.columns, marks, strict=True) if mark == "-1")
            labels: list[str | Ignored] = [*ones, *uncertain]
            return tuple(labels)
        if len(ones) != 1:
            raise ResoluteError(
                f"{self.path}: {_place(place)}: got {len(ones)} columns with 1 ({_first(ones) or 'none'}), expected "
                "one; correct it, or set TARGET=labels for any number of them"
            )
        return ones[0]

    def _number(self, name: str, cell: Cell, place: Place) -> float:
        number = self.form.parse(cell).number
        if number is not None and abs(number) <= _MAX_FLOAT32:  # as it is stored
            return float(number)
        is_decimal = isinstance(cell, str) and _DECIMAL_COMMA.fullmatch(cell)
        raise self._error(
            place, _shown(cell), name, "a number with a decimal point" if is_decimal else "a finite number"
        )

    def _error(self, place: Place, got: str, column: str, expected: str, do: str = "correct it") -> ResoluteError:
        return _error(self.path, place, got, f"in column {column}", expected, do)


def _error(path: str, place: Place, got: str, where: str, expected: str, do: str) -> ResoluteError:
    return ResoluteError(f"{path}: {_place(place)}: got {got} {where}, expected {expected}; {do}")


def _not_a_bit(path: str, column: str, cell: Cell, place: Place) -> ResoluteError:
    return _error(
        path,
        place,
        _shown(cell),
        f"in column {column}",
        "0 or 1",
        "decide what it counts as and correct it, leave the column out with COLUMNS, or set TARGET=values if the "
        "columns hold numbers",
    )


def _place(place: Place) -> str:
    return f"line {place}" if isinstance(place, int) else place


def _shown(cell: Cell) -> str:
    return "nothing" if cell is None or cell == "" else repr(cell[:80] if isinstance(cell, str) else cell)[:100]


def _example(example: tuple[Cell, Place] | None) -> str:
    """A cell and its place."""
    cell, place = example or ("", "")
    return f"{_shown(cell)} ({_place(place)})"


def _first(names: Sequence[str], limit: int = 5) -> str:
    return ", ".join(names[:limit]) + (", …" if len(names) > limit else "")


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s'[: count != 1]}"


def _is_missing(cell: Cell) -> bool:
    """Whether there is no number to predict."""
    return cell is None or (isinstance(cell, str) and (not cell or is_word_for_none(cell)))
