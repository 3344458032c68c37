"""The number of samples of each class and of their uses by the run: a chart and a table of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from resolute.report.charts import Chart, Series, chart
from resolute.train.logs.run_log import RunLogReader

__all__ = ["HEADS", "ClassCounts", "class_counts", "class_rows", "with_bars"]

HEADS = ("class", "in the set#", "seen per epoch#", "each sample per epoch#")
_ENDS = 10  # most and least frequent classes in the table
_POINTS = 600  # of the chart; more would be below a pixel each
_WIDE = 10.0  # largest / smallest value: above it, the axis is logarithmic


@dataclass(frozen=True, kw_only=True)
class ClassCounts:
    """Training samples of each class (C,), and how many of them an epoch uses, on average over the epochs so far."""

    names: Sequence[str]
    samples: NDArray[np.int64]
    seen: NDArray[np.float64]

    def chart(self) -> Chart | None:
        """Samples in the set and seen per epoch, by the rank of the class."""
        order = _by_size(self.samples)
        order = order[self.samples[order] > 0]
        order = order[np.linspace(0, len(order) - 1, min(len(order), _POINTS)).round().astype(int)]
        if len(order) < 2:
            return None
        ranks = np.flatnonzero(np.isin(_by_size(self.samples), order)) + 1.0
        seen = np.where(self.seen > 0, self.seen, np.nan)[order]
        wide = max(self.samples[order].max(), np.nanmax(seen, initial=1)) > _WIDE * self.samples[order].min()
        return chart(
            "Samples of each class",
            [
                Series(name="in the set", colour="a", kind="dots", x=ranks.tolist(), y=self.samples[order].tolist()),
                Series(name="seen per epoch", colour="b", kind="dots", x=ranks.tolist(), y=seen.tolist()),
            ],
            unit="training samples",
            x_name="rank of the class",
            log="y" if wide else "",
        )


def class_counts(run: RunLogReader) -> ClassCounts | None:
    """The counts of a run's log; None if its targets are values, or before its first epoch has ended."""
    start, epochs = run.start, run.epochs
    if not start.get("class_samples") or not epochs:
        return None
    return ClassCounts(
        names=start["class_names"],
        samples=np.array(start["class_samples"], np.int64),
        seen=np.mean([epoch["class_counts"] for epoch in epochs], axis=0),
    )


def class_rows(
    names: Sequence[str], samples: NDArray[np.int64], seen: NDArray[np.float64], *, ends: int = _ENDS
) -> list[tuple[str, str, str, str]]:
    """Rows under `HEADS`: all classes, or the `ends` with the most and with the fewest samples, by falling size."""
    order = _by_size(samples)
    left_out = len(order) - 2 * ends
    rows = [
        (names[k], f"{samples[k]:,}", f"{seen[k]:,.1f}", f"{seen[k] / samples[k]:.2f}" if samples[k] else "-")
        for k in (order if left_out <= 1 else [*order[:ends], *order[-ends:]])
    ]
    if left_out > 1:
        rows.insert(ends, (f"({left_out:,} more classes)", "", "", ""))
    return rows


def with_bars(
    heads: Sequence[str], rows: Sequence[tuple[str, ...]]
) -> tuple[Sequence[str], list[tuple[str | Mapping[str, float], ...]]]:
    """`heads` and `rows`, as from `class_rows`, with a bar for the samples in the set, for the macro `table`."""
    counts = [int(row[1].replace(",", "") or 0) for row in rows]
    most = max(counts, default=0) or 1
    bars: list[str | Mapping[str, float]] = [
        {"bar": count / most} if row[1] else "" for row, count in zip(rows, counts, strict=True)
    ]
    return (*heads[:2], "", *heads[2:]), [(*row[:2], bar, *row[2:]) for row, bar in zip(rows, bars, strict=True)]


def _by_size(samples: NDArray[np.int64]) -> NDArray[np.intp]:
    return np.argsort(-samples, kind="stable")
