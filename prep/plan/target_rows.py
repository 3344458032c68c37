"""The targets of a catalog on disk, one row per image, if they are not classes: lists of class numbers, or values.

Rows are in the order in which the source yields its images; the `label` of an ENTRY is the number of its row.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from resolute.files import write_errors
from resolute.pipeline.dataset.target import sample_dtype
from resolute.prep.sources.image_ref import Label

__all__ = ["LabelRows", "TargetRows", "TargetWriter", "ValueRows"]


class TargetRows(Protocol):
    """The targets of a catalog: `rows[numbers]`, (n,) integers, are a column of `Target.sample_dtype`."""

    def __getitem__(self, rows: NDArray[Any]) -> NDArray[Any]: ...


class ValueRows:
    """Rows of values: (N, D) <f4, memory-mapped."""

    def __init__(self, values: NDArray[Any]) -> None:
        self._values = values

    def __getitem__(self, rows: NDArray[Any]) -> NDArray[Any]:
        return self._values[rows]


class LabelRows:
    """Rows of class numbers, memory-mapped: row i is `numbers[labels[ends[i - 1] : ends[i]]]`, each below `classes`."""

    def __init__(self, labels: NDArray[Any], ends: NDArray[Any], numbers: NDArray[np.uint32], classes: int) -> None:
        self._labels, self._ends, self._numbers, self._classes = labels, ends, numbers, classes

    def pairs(self, rows: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(positions in `rows`, class numbers): a pair for each label of each row, in order of the rows."""
        rows = np.asarray(rows, np.int64)
        stops = self._ends[rows].astype(np.int64)
        starts = np.where(rows > 0, self._ends[np.maximum(rows, 1) - 1], 0).astype(np.int64)
        lengths = stops - starts
        positions = np.repeat(np.arange(len(rows)), lengths)
        within = np.arange(len(positions)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return positions, self._numbers[self._labels[np.repeat(starts, lengths) + within]].astype(np.int64)

    def __getitem__(self, rows: NDArray[Any]) -> NDArray[Any]:
        bits = np.zeros((len(rows), *sample_dtype("labels", self._classes)["labels"].shape), np.uint8)
        positions, numbers = self.pairs(rows)
        np.bitwise_or.at(bits, (positions, numbers >> 3), (1 << (numbers & 7)).astype(np.uint8))
        return bits


class TargetWriter:
    """Appends the rows of targets to files in `folder`; a context manager, whose rows may be used after its end.

    Labels are numbered in order of first appearance in `labels`, the caller's table.
    """

    def __init__(self, folder: Path, labels: dict[str, int]) -> None:
        self._paths = folder / "catalog.targets", folder / "catalog.target_ends"
        self._labels, self._end, self._count = labels, 0, 0
        self._width = 0  # of values; 0: labels

    def __enter__(self) -> TargetWriter:
        with write_errors(self._paths[0]), ExitStack() as stack:
            self._files = [stack.enter_context(path.open("wb")) for path in self._paths]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stack.close()

    def add(self, label: Label) -> int:
        """Append a row of labels or values; returns its number."""
        if label and isinstance(label[0], float):
            self._width, row = len(label), np.asarray(label, "<f4")
        else:
            row = np.unique([self._labels.setdefault(str(each), len(self._labels)) for each in label]).astype("<u4")
        self._end += len(row)
        with write_errors(self._paths[0]):
            self._files[0].write(row.tobytes())
            self._files[1].write(self._end.to_bytes(8, "little"))
        self._count += 1
        return self._count - 1

    def flush(self) -> None:
        for file, path in zip(self._files, self._paths, strict=True):
            with write_errors(path):
                file.flush()

    def is_same(self, row: int, other: int) -> bool:
        """Whether two rows are equal; after `flush`."""
        ends = np.memmap(self._paths[1], "<u8", "r")
        data = np.memmap(self._paths[0], "<u4", "r") if self._end else np.empty(0, "<u4")
        first, second = (data[int(ends[i - 1]) if i else 0 : int(ends[i])] for i in (row, other))
        return bool(np.array_equal(first, second))

    def values(self) -> ValueRows:
        return ValueRows(np.memmap(self._paths[0], "<f4", "r", shape=(self._count, self._width)).view(np.ndarray))

    def label_rows(self, numbers: NDArray[np.uint32], classes: int) -> LabelRows:
        """The rows with class numbers: `numbers[i]` that of the label with number i in `labels`, below `classes`."""
        labels = np.memmap(self._paths[0], "<u4", "r").view(np.ndarray) if self._end else np.empty(0, "<u4")
        return LabelRows(labels, np.memmap(self._paths[1], "<u8", "r").view(np.ndarray), numbers, classes)
