"""The meaning of a table's target columns: a class, several classes, or numbers. Recognised from all rows, or set by
`TARGET`.

One column is a class unless its cells are numbers with fractions, or lists whose items repeat from cell to cell.
Several columns are one class each if all cells are 0 or 1, else numbers.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.target import TargetKind
from resolute.prep.sources.image_ref import Label

__all__ = ["AUTO", "Cells", "Meaning", "TargetSetting", "describe_label", "float32", "is_number", "name_and_unit",
           "parse_target", "split_items"]  # fmt: skip

LISTS = "[]"  # the separator of cells that are lists in brackets: JSON, Python or numpy
_SEPARATORS = {"|": "|", ";": ";", ",": ",", " ": "space", LISTS: "list"}  # in order of preference
_WORDS = {"bar": "|", "pipe": "|", "semicolon": ";", "comma": ",", "space": " ", "list": LISTS, "json": LISTS}
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")
_NUMPY_TEXTS = re.compile(r"""['"]\s+['"]""")
_QUOTED = re.compile(r"""'([^']*)'|"([^"]*)\"""")
_UNIT = re.compile(r"(.*\S)\s*(?:\[([^\[\]]+)\]|\(([^()]+)\))")
_ONES, _ZEROS = frozenset({"1", "1.0", "true"}), frozenset({"0", "0.0", "false"})
_NOT_FINITE = frozenset({"nan", "inf", "+inf", "-inf", "infinity", "+infinity", "-infinity"})
_MAX_DISTINCT = 1 << 17  # cells of a column that are remembered
_NO_LABEL = frozenset({"-1", "-1.0"})  # as a class. Source: `datasets`' ClassLabel, and scikit-learn's semi-supervised
_SHOWN_VALUES = 12  # of a target in words


class TargetSetting(NamedTuple):
    """`TARGET` as parsed: a kind, None to recognise it, and how one cell separates several items, None likewise.

    `drop_unlabelled`: leave out images without a target, instead of refusing them.
    """

    kind: TargetKind | None = None
    separator: str | None = None
    drop_unlabelled: bool = False

    def is_dropped(self, label: Label | None, file: str, name: str, line: int = 0) -> bool:
        """Whether the image `name` is left out, because it has no target: nothing, or -1 as a class.

        Raises `ResoluteError`, naming the file and line (0: none) of the target, if such images are to be refused.
        """
        labels = (label,) if isinstance(label, str) else label or ()
        is_unlabelled = label is None or not _NO_LABEL.isdisjoint(labels)
        if is_unlabelled and not self.drop_unlabelled:
            where = f"{file}: line {line}" if line else file
            raise ResoluteError(
                f"{where}: {name} is unlabelled, got {'nothing' if label is None else -1}, expected its target; label "
                "it, or leave out all unlabelled photos with UNLABELLED=drop (--unlabelled drop)"
            )
        return is_unlabelled


AUTO = TargetSetting()


def parse_target(text: str | None) -> TargetSetting:
    """Parse "class", "labels", "values", or one of the latter with a separator, "labels:|", "labels:space".

    Raises `ResoluteError` for anything else.
    """
    if text is None:
        return AUTO
    kind, colon, separator = text.partition(":")
    separator = separator if separator in _SEPARATORS else _WORDS.get(separator.strip().lower(), "")
    if kind == "class" and not colon:
        return TargetSetting("class")
    if kind in ("labels", "values") and (separator or not colon):
        return TargetSetting("labels" if kind == "labels" else "values", separator or None)
    raise ResoluteError(
        f"TARGET: got {text!r}, expected class, labels or values, with how a cell separates several if that is not "
        "recognised: labels:space, labels:comma, labels:semicolon, labels:bar or labels:list; correct TARGET"
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
    if len(set(bare)) < len(bare):  # why: `size [px]` beside `size [cm]`
        return tuple(names), ("",) * len(bare)
    return bare, tuple((match[2] or match[3]).strip() if match else "" for match in matches)


def float32(value: float) -> bool:
    """Whether `value` is finite as float32, as which it is stored."""
    return abs(value) <= float(np.finfo(np.float32).max)


class _Column:
    """The meaning of the cells of a column; `first` maps up to `_MAX_DISTINCT` different texts to their first line."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.first: dict[str, int] = {}
        self.kinds: Counter[str] = Counter()  # of different texts
        self.examples: dict[str, tuple[str, int]] = {}
        self.in_unit_range = True

    def add(self, text: str, line: int) -> None:
        if text in self.first:
            return
        if len(self.first) < _MAX_DISTINCT:
            self.first[text] = line
        kind = self._kind(text)
        self.kinds[kind] += 1
        self.examples.setdefault(kind, (text, line))

    def _kind(self, text: str) -> str:
        if not text:
            return "blank"
        if _NUMBER.fullmatch(text):
            value = float(text)
            self.in_unit_range &= 0 <= value <= 1
            if value in (0, 1) and text in _ONES | _ZEROS:
                return "bit"
            if value == -1:
                return "minus one"
            return "whole" if float32(value) and value.is_integer() else "fraction"
        lower = text.lower()
        return "bit word" if lower in _ONES | _ZEROS else "not finite" if lower in _NOT_FINITE else "text"

    def only(self, *kinds: str) -> bool:
        return self.kinds.keys() <= set(kinds)

    @property
    def is_bits(self) -> bool:
        return self.only("bit", "bit word")

    @property
    def texts(self) -> list[str]:
        """The different cells that are not blank."""
        return [text for text in self.first if text]


class Cells:
    """Collects what the target columns of a table hold, row by row; `meaning` is then what they mean."""

    def __init__(self, path: str, columns: Sequence[str], *, are_chosen: bool) -> None:
        """`are_chosen`: the columns were named by `COLUMNS`, rather than being all but the image's."""
        self._path, self._are_chosen = path, are_chosen
        self._columns = [_Column(name) for name in columns]
        self._rows, self._one_each = 0, len(columns) > 1

    def add(self, cells: Sequence[str], line: int) -> None:
        self._rows += 1
        for column, cell in zip(self._columns, cells, strict=True):
            column.add(cell, line)
        if self._one_each:
            ones = sum(cell in _ONES or cell.lower() in _ONES for cell in cells)
            self._one_each = ones == 1

    def meaning(self, setting: TargetSetting) -> Meaning:
        """Raises `ResoluteError` if the columns cannot be targets, are ambiguous, or do not fit `setting`."""
        if len(self._columns) == 1:
            return self._one(self._columns[0], setting)
        return self._several(setting)

    def _make(self, kind: TargetKind, why: str, *, separator: str | None = None, width: int = 1) -> Meaning:
        names = tuple(column.name for column in self._columns)
        base = Meaning(path=self._path, kind=kind, columns=names, separator=separator, rows=self._rows, why=why)
        if kind != "values":
            return base
        if len(names) == 1 and (separator or width > 1):
            bare, units = name_and_unit(names)
            return replace(base, names=tuple(f"{bare[0]} {i}" for i in range(width)), units=units * width)
        bare, units = name_and_unit(names)
        return replace(base, names=bare, units=units)

    # ---- one column

    def _one(self, column: _Column, setting: TargetSetting) -> Meaning:
        kinds, texts, name = column.kinds, column.texts, column.name
        if setting.kind == "class" or (setting.kind is None and not texts):
            return self._make("class", "")
        if setting.kind == "labels":
            separator = setting.separator or _separator(texts) or _any_separator(texts)
            return self._make("labels", "", separator=separator)
        if setting.kind == "values":
            separator = setting.separator or _any_separator(texts)
            if separator == "," and not setting.separator and all(map(_DECIMAL_COMMA.fullmatch, texts)):
                separator = None  # why: the error says so
            return self._make("values", "", separator=separator, width=_width(texts, separator))
        if kinds["fraction"] and not kinds["text"] and not kinds["bit word"]:
            return self._make("values", f"column {name} holds numbers with fractions")
        if (separator := _separator(texts)) is not None:
            sign = _SEPARATORS[separator]
            how = {"list": "in brackets", "space": "separated by spaces"}.get(sign, f"separated by {sign!r}")
            items = [item for text in texts for item in split_items(text, separator)]
            if 2 * sum(map(_has_fraction, items)) >= len(items) and not _are_numbers(items):
                wrong = next(item for item in items if not _are_numbers([item]))
                line = next(column.first[text] for text in texts if wrong in split_items(text, separator))
                raise ResoluteError(
                    f"{self._path}: line {line}: got {wrong[:80]!r} in a list of column {name}, expected numbers as in "
                    "other lists; correct it, or set TARGET=labels if these are labels"
                )
            if _is_vector(texts, separator):
                why = f"column {name} holds several numbers per row, {how}"
                return self._make("values", why, separator=separator, width=_width(texts, separator))
            why = f"column {name} holds lists of labels {how}, of {len(set(items))} different ones"
            return self._make("labels", why, separator=separator)
        if all(_DECIMAL_COMMA.fullmatch(text) for text in texts):
            text, line = texts[0], column.first[texts[0]]
            raise ResoluteError(
                f"{self._path}: line {line}: got {text!r} in column {name}, expected a number with a decimal point, or "
                "labels; write 0.5 for 0,5, or set TARGET=labels if these are two labels"
            )
        if 2 * kinds["fraction"] >= len(texts) and kinds["fraction"]:
            (number, at), (text, line) = column.examples["fraction"], column.examples.get(
                "text", column.examples.get("bit word", ("", 0)))  # fmt: skip
            raise ResoluteError(
                f"{self._path}: line {line}: column {name} is mixed, got {text[:80]!r} beside numbers such as {number} "
                f"in line {at}, expected numbers in all rows; correct it, or set TARGET=class if these are names"
            )
        if not kinds["text"] and not kinds["bit word"]:
            if name_and_unit([name])[1][0]:
                return self._make("values", f"column {name} holds numbers with a unit")
            return self._make("class", f"column {name} holds whole numbers (for numbers to predict set TARGET=values)")
        why = f"column {name} holds {len(texts)} different texts"
        if (separator := _any_separator(texts)) is not None:
            why += f" (to split them at {_SEPARATORS[separator]!r} into labels set TARGET=labels)"
        return self._make("class", why)

    # ---- several columns

    def _several(self, setting: TargetSetting) -> Meaning:
        columns, count = self._columns, len(self._columns)
        if setting.separator is not None:
            raise ResoluteError(
                f"TARGET: got a separator for {count} columns of {self._path} ({_first(self._names)}), expected it for "
                "lists in one column; drop it, or name that column with COLUMNS=image,column"
            )
        if setting.kind == "class":
            return self._make("class", "")
        if setting.kind == "labels":
            return self._make("labels", "")
        texts = [column for column in columns if column.kinds["text"]]
        if setting.kind == "values":
            return self._make("values", "")
        if texts and not self._are_chosen:
            raise self._unrecognised()
        if all(column.is_bits for column in columns):
            if self._one_each:
                why = f"{count} columns of 0 and 1, a single 1 in each row (for several labels set TARGET=labels)"
                return self._make("class", why)
            return self._make("labels", f"{count} columns of 0 and 1")
        if all(column.only("bit", "bit word", "blank", "minus one") for column in columns):
            return self._make("labels", f"{count} columns of 0 and 1")  # why: the error names the first such cell
        if texts:
            text, line = texts[0].examples["text"]
            raise ResoluteError(
                f"{self._path}: line {line}: got {text[:80]!r} in column {texts[0].name}, expected a number, as in "
                "other columns; correct it, or leave the column out of COLUMNS"
            )
        if any(column.kinds["fraction"] for column in columns) and all(column.in_unit_range for column in columns):
            return self._make("values", f"{count} columns of numbers from 0 to 1")
        bits = [column.name for column in columns if column.is_bits]
        if bits and not self._are_chosen:
            others = [column.name for column in columns if not column.is_bits]
            raise ResoluteError(
                f"{self._path}: ambiguous columns, got {len(bits)} of 0 and 1 ({_first(bits)}) and {len(others)} of "
                f"other numbers ({_first(others)}), expected targets of one kind; name the image's and the targets' "
                f"with COLUMNS, such as COLUMNS=image,{others[0]}"
            )
        return self._make("values", f"{count} columns of numbers")

    @property
    def _names(self) -> list[str]:
        return [column.name for column in self._columns]

    def _unrecognised(self) -> ResoluteError:
        return ResoluteError(
            f"{self._path}: unrecognised columns, got {', '.join(self._names)[:200]} beside the image's, expected "
            "names such as id,label; name the image's and the target's with COLUMNS=image,label, or several targets "
            "with COLUMNS=image,first..last"
        )


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """The meaning of the target `columns` of the table `path`; `names` and `units` are those of values.

    `separator` is between the items of a cell, None if a cell is one item; `why` says in words by what the kind was
    recognised, "" if it was set.
    """

    path: str
    kind: TargetKind
    columns: tuple[str, ...]
    separator: str | None
    rows: int
    why: str
    names: tuple[str, ...] = ()
    units: tuple[str, ...] = ()

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes that have a column each."""
        return self.columns if self.kind != "values" and len(self.columns) > 1 else ()

    def label(self, cells: Sequence[str], line: int) -> Label | None:
        """The target in a row; None if its cells are blank, except in a column of lists: no labels.

        Raises `ResoluteError` for other content, naming line and column.
        """
        if self.kind == "class":
            return (cells[0] or None) if len(cells) == 1 else self._one_hot(cells, line)
        if self.kind == "labels":
            if len(cells) > 1:
                pairs = zip(self.columns, cells, strict=True)
                return tuple([name for name, cell in pairs if self._bit(name, cell, line)])
            return tuple(dict.fromkeys(self._list(cells[0], line)))
        if not any(cells):
            return None
        items = cells if len(cells) > 1 else self._list(cells[0], line)
        if len(items) != len(self.names):
            raise ResoluteError(
                f"{self.path}: line {line}: got {len(items)} numbers in column {self.columns[0]}, expected "
                f"{len(self.names)} as in other rows; correct it"
            )
        names = self.columns if len(cells) > 1 else self.columns * len(items)
        return tuple(self._number(name, item, line) for name, item in zip(names, items, strict=True))

    def _list(self, cell: str, line: int) -> tuple[str, ...]:
        if not cell:
            return ()
        if self.separator is None:
            return (cell,)
        if self.separator == LISTS and not _is_list(cell):
            raise ResoluteError(
                f"{self.path}: line {line}: got {cell[:80]!r} in column {self.columns[0]}, expected a list such as "
                '["a", "b"], as in other rows; correct it'
            )
        return split_items(cell, self.separator)

    def _one_hot(self, cells: Sequence[str], line: int) -> str:
        ones = [name for name, cell in zip(self.columns, cells, strict=True) if self._bit(name, cell, line)]
        if len(ones) == 1:
            return ones[0]
        raise ResoluteError(
            f"{self.path}: line {line}: got {len(ones)} columns with 1 ({_first(ones) or 'none'}), expected one; "
            "correct it, or set TARGET=labels for any number of them"
        )

    def _bit(self, name: str, cell: str, line: int) -> bool:
        lower = cell.lower()
        if lower in _ONES or lower in _ZEROS:
            return lower in _ONES
        got = repr(cell[:80]) if cell else "nothing"
        raise ResoluteError(
            f"{self.path}: line {line}: got {got} in column {name}, expected 0 or 1; decide what it counts as and "
            "correct it, leave the column out with COLUMNS, or set TARGET=values if the columns hold numbers"
        )

    def _number(self, name: str, text: str, line: int) -> float:
        if _NUMBER.fullmatch(text) and float32(value := float(text)):
            return value
        hint = "a number with a decimal point" if _DECIMAL_COMMA.fullmatch(text) else "a finite number"
        got = repr(text[:80]) if text else "nothing"
        raise ResoluteError(f"{self.path}: line {line}: got {got} in column {name}, expected {hint}; correct it")


def _first(names: Sequence[str], limit: int = 5) -> str:
    return ", ".join(names[:limit]) + (", …" if len(names) > limit else "")


def _are_numbers(items: Iterable[str]) -> bool:
    return all(_NUMBER.fullmatch(item) or item.lower() in _NOT_FINITE for item in items)


def _is_list(cell: str) -> bool:
    return cell.startswith("[") and cell.endswith("]")


def split_items(cell: str, separator: str | None) -> tuple[str, ...]:
    """The items of a cell, without blank ones."""
    if separator is None:
        return (cell,)
    if separator == " ":
        return tuple(cell.split())
    parts = _list_items(cell) if separator == LISTS else cell.split(separator)
    return tuple(part for part in map(str.strip, parts) if part)


def _list_items(cell: str) -> list[str]:
    """The items of a list in brackets, written by JSON, Python, or numpy (without commas)."""
    if _NUMPY_TEXTS.search(cell):  # why first: to Python, 'a' 'b' is 'ab'
        return [single or double for single, double in _QUOTED.findall(cell)]
    for parse in (json.loads, ast.literal_eval):
        try:
            parsed = parse(cell)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(parsed, list) and all(isinstance(item, str | int | float) for item in parsed):
            return [item if isinstance(item, str) else repr(item) for item in parsed]
    inner = cell.strip("[]")
    return inner.split(",") if "," in inner else inner.split()


def _any_separator(texts: Sequence[str]) -> str | None:
    """The first separator that any cell holds; None if there is none."""
    if texts and all(map(_is_list, texts)):
        return LISTS
    signs = [sign for sign in _SEPARATORS if sign != LISTS]
    return next((sign for sign in signs if any(len(split_items(text, sign)) > 1 for text in texts)), None)


def _width(texts: Sequence[str], separator: str | None) -> int:
    return len(split_items(texts[0], separator)) if texts else 1


def _is_vector(texts: Sequence[str], separator: str) -> bool:
    """Whether all cells are lists of numbers, at least one of which is written with a fraction or an exponent."""
    items = [item for text in texts for item in split_items(text, separator)]
    return _are_numbers(items) and any(map(_has_fraction, items))


def _has_fraction(item: str) -> bool:
    """Whether a number is written with a fraction or an exponent."""
    return _NUMBER.fullmatch(item) is not None and not item.lstrip("+-").isdigit()


def _separator(texts: Sequence[str]) -> str | None:
    """The separator of the items in cells of lists, None if they are hardly lists.

    They are if they are in brackets, or if items recur in different cells, and different cells outnumber different
    items, as the combinations of a few labels do and the words of class names do not.
    """
    if texts and all(map(_is_list, texts)):
        return LISTS
    for separator in _SEPARATORS:
        lists = [split_items(text, separator) for text in texts]
        several = [items for items in lists if len(items) > 1]
        if separator == LISTS or not several:
            continue
        if _is_vector(texts, separator):
            return separator
        if any(len(set(items)) < len(items) for items in several):
            continue
        counts = Counter(item for items in lists for item in items)
        lengths = len({len(items) for items in lists})
        if all(map(is_number, counts)):
            if lengths > 1:
                return separator
            continue
        if all(counts[item] == 1 for items in several for item in items):
            continue
        if separator == " ":
            alone = {items[0] for items in lists if len(items) == 1}
            is_likely = len(lists) > len(counts) and lengths > 1 and (
                alone >= counts.keys() or len(lists) >= 2 * len(counts)
            )  # fmt: skip
        else:
            is_likely = len(lists) >= len(counts) or (separator in "|;" and counts.total() >= 2 * len(counts))
        if is_likely:
            return separator
    return None
