"""Targets of WebDataset samples and Parquet rows: a class, several labels, or numbers. Recognised from all images of a
source, or set by `TARGET`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.target import TargetKind
from resolute.prep.sources.image_ref import Label, SourceTarget

from .target_cells import TargetSetting, describe_label, float32, name_and_unit, split_items

__all__ = ["RowLabel", "ScannedTarget", "label_kind"]

# A class (name or number), a number, or one of the tables {"labels": [names or numbers]}, {"values": [numbers]} and
# {"columns": [numbers]}, the cells of several columns.
RowLabel = str | int | float | dict[str, list[Any]]

_KINDS: dict[TargetKind, frozenset[str]] = {
    "class": frozenset({"name", "class number", "labels", "single 1"}),
    "labels": frozenset({"name", "class number", "labels", "single 1", "zeros and ones"}),
    "values": frozenset({"class number", "number", "labels", "values", "single 1", "zeros and ones", "numbers"}),
}
_EXAMPLES = 3


def label_kind(label: RowLabel) -> str:
    if isinstance(label, str):
        return "name"
    if isinstance(label, dict):
        if "columns" not in label:
            return "labels" if "labels" in label else "values"
        cells = label["columns"]
        if any(cell not in (0, 1) for cell in cells):
            return "numbers"
        return "single 1" if sum(cells) == 1 else "zeros and ones"
    return "class number" if isinstance(label, int) else "number"


class ScannedTarget:
    """The meaning of the labels of the images below `root`.

    `examples` maps each `label_kind` that occurs to an image with such a label; `columns` are the names of the columns
    of the targets. Raises `ResoluteError` for labels that do not go together, or do not fit `setting`.
    """

    def __init__(
        self, root: str, examples: Mapping[str, str], columns: Sequence[str], setting: TargetSetting
    ) -> None:
        self._root, self._examples, self._columns, self._setting = root, examples, columns, setting
        self._width = 0  # of values, once one was seen
        self.kind = self._kind()

    def _kind(self) -> TargetKind:
        kinds = set(self._examples)
        if self._setting.kind is not None:
            wrong = sorted(kinds - _KINDS[self._setting.kind])
            if wrong:
                raise ResoluteError(
                    f"{self._root}: got {wrong[0]} as the target of {self._examples[wrong[0]]}, expected "
                    f"{self._setting.kind} as TARGET says; correct it, or drop TARGET"
                )
            return self._setting.kind
        if kinds <= {"name", "class number"} or kinds == {"single 1"}:
            return "class"
        if kinds == {"labels"} or kinds <= {"single 1", "zeros and ones"}:
            return "labels"
        if kinds <= {"class number", "number"} or kinds == {"values"}:
            return "values"
        if kinds <= {"single 1", "zeros and ones", "numbers"}:
            return "values"
        first, second = sorted(kinds)[:2]
        raise ResoluteError(
            f"{self._root}: mixed targets, got {first} for {self._examples[first]} and {second} for "
            f"{self._examples[second]}, expected one kind for all; correct them, or set TARGET"
        )

    def describe(self, rows: Iterable[tuple[str, RowLabel]], label_names: Sequence[str] | None) -> SourceTarget:
        """The target of the source, with its first images as examples. Reads the first of `rows`, (image, label)."""
        first = [(name, self.label(name, label)[0]) for name, label in islice(rows, _EXAMPLES)]
        several = len(self._columns) > 1
        if self.kind == "class":
            return SourceTarget(classes=tuple(self._columns) if several else (), columns=tuple(self._columns))
        names: tuple[str, ...] = ()
        units: tuple[str, ...] = ()
        if self.kind == "values":
            names, units = name_and_unit(self._columns or ["target"])
            if not several and self._width > 1:
                names, units = tuple(f"{names[0]} {i}" for i in range(self._width)), units * self._width
        values = "a number" if len(names) == 1 else f"{len(names)} numbers"
        what = "any number of labels" if self.kind == "labels" else values
        why = "as set by TARGET" if self._setting.kind else f"by {', '.join(sorted(self._examples))}"
        about = [f"{self._root}: {what} for each photo (TARGET={self.kind}), {why}"]
        for image, label in first:
            shown = label
            if label_names is not None and self.kind == "labels":
                shown = tuple(label_names[int(n)] if 0 <= int(n) < len(label_names) else str(n) for n in label)
            about.append(f"  {image}: {describe_label(shown, names, units)}")
        return SourceTarget(
            kind=self.kind, names=names, units=units, about=tuple(about),
            classes=tuple(self._columns) if several and self.kind == "labels" else (), columns=tuple(self._columns),
        )  # fmt: skip

    def label(self, name: str, label: RowLabel) -> tuple[Label, bool]:
        """(the target of the image `name`, whether its labels are class numbers)."""
        if self.kind == "class" and not isinstance(label, dict):
            return str(label), isinstance(label, int)
        if self.kind == "values":
            return self._values(name, label), False
        labels: Sequence[Any] = [label]
        if isinstance(label, dict):
            columns = label.get("columns", [])
            labels = label.get("labels", [self._columns[i] for i, cell in enumerate(columns) if cell])
        elif isinstance(label, str) and self._setting.separator is not None:
            labels = split_items(label, self._setting.separator)
        is_number = all(isinstance(each, int) for each in labels)
        if self.kind == "labels":
            return tuple(map(str, labels)), is_number
        if len(labels) != 1:
            raise ResoluteError(
                f"{self._root}: got {len(labels)} labels for {name}, expected one as TARGET=class says; correct it, or "
                "set TARGET=labels"
            )
        return str(labels[0]), is_number

    def _values(self, name: str, label: RowLabel) -> tuple[float, ...]:
        values = next(iter(label.values())) if isinstance(label, dict) else [label]
        self._width = self._width or len(values)
        if len(values) != self._width:
            raise ResoluteError(
                f"{self._root}: got {len(values)} numbers for {name}, expected {self._width} as for other images; "
                "correct it"
            )
        for value in values:
            if isinstance(value, str) or not float32(value):
                raise ResoluteError(f"{self._root}: got {value!r} for {name}, expected a finite number; correct it")
        if not values:
            raise ResoluteError(f"{self._root}: got no number for {name}, expected at least one; correct it")
        return tuple(map(float, values))
