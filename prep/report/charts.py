"""Statistics of sources and targets, counted in fixed memory, and their charts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resolute.pipeline.dataset.target import Target
from resolute.report.charts import Chart, Series, chart

__all__ = ["SourceCounts", "ValueCounts", "class_chart", "label_chart", "labels_per_sample", "source_charts"]

_ROWS = 1 << 20  # records in memory at a time
_BINS = 40  # of short sides, and of values
_CELLS = 1 << 24  # samples x classes, or x values, in memory at a time
_POINTS = 500  # drawn of the classes' curve, for any number of classes
_ASPECT_EDGES = np.geomspace(1 / 8, 8, 6 * 16 + 1)  # width / height, sixteen per octave


def _pieces(rows: NDArray[Any], count: int = _ROWS) -> Iterator[NDArray[Any]]:
    for first in range(0, len(rows), count):
        yield rows[first : first + count]


def labels_per_sample(samples: NDArray[Any], target: Target) -> NDArray[np.int64]:
    """(C + 1,): the samples with 0, 1, … C labels."""
    counts = np.zeros(len(target) + 1, np.int64)
    for piece in _pieces(samples, max(1, _CELLS // len(target))):
        counts += np.bincount(target.has_label(piece).sum(1, dtype=np.int64), minlength=len(target) + 1)
    return counts


class ValueCounts:
    """Least, greatest and mean of each of the values of `samples`, (D,) float64, and their histograms."""

    def __init__(self, samples: NDArray[Any], target: Target) -> None:
        self._samples, self._rows = samples, max(1, _CELLS // len(target))
        pieces = [piece["values"].astype(np.float64) for piece in _pieces(samples[:1])]
        self.low, self.high = pieces[0][0].copy(), pieces[0][0].copy()
        total = np.zeros(len(target))
        for piece in _pieces(samples, self._rows):
            values = piece["values"].astype(np.float64)
            self.low, self.high = np.minimum(self.low, values.min(0)), np.maximum(self.high, values.max(0))
            total += values.sum(0)
        self.mean = total / len(samples)

    def histogram(self, d: int, title: str, unit: str) -> Chart | None:
        """The chart of value `d`."""
        spread = self.high[d] - self.low[d] or 1.0
        edges = self.low[d] + spread * np.linspace(0, 1, _BINS + 1)
        images = np.zeros(_BINS, np.int64)
        for piece in _pieces(self._samples, self._rows):
            images += np.histogram(piece["values"][:, d].astype(np.float64), bins=edges)[0]
        return _histogram(title, images, edges, x_name=unit or "value", log="")


def label_chart(per_sample: NDArray[np.int64]) -> Chart | None:
    """Training samples by their number of labels."""
    last = int(np.flatnonzero(per_sample)[-1]) if per_sample.any() else 0
    edges = np.arange(last + 2) - 0.5
    title = "Training samples by number of labels"
    return _histogram(title, per_sample[: last + 1], edges, x_name="labels", log="")


class SourceCounts:
    """Histograms of the short side (px) and the aspect ratio of SOURCE records."""

    def __init__(self) -> None:
        self.short = np.zeros(1 << 16, np.int64)  # exact, by short side in px
        self.aspect = np.zeros(len(_ASPECT_EDGES) - 1, np.int64)

    def add(self, sources: NDArray[Any]) -> None:
        for piece in _pieces(sources):
            self.short += np.bincount(np.minimum(piece["width"], piece["height"]), minlength=1 << 16)
            ratio = np.clip(piece["width"] / piece["height"], _ASPECT_EDGES[0], _ASPECT_EDGES[-1])
            self.aspect += np.histogram(ratio, bins=_ASPECT_EDGES)[0]

    def smaller_than(self, short_side: int) -> int:
        """Number of sources whose short side is below `short_side` px: these are stored unscaled."""
        return int(self.short[:short_side].sum())

    def quantile(self, part: float) -> int:
        """The short side in px that a fraction `part` (0..1) of the sources does not exceed."""
        total = np.cumsum(self.short)
        return int(np.searchsorted(total, max(1, part * total[-1])))


def source_charts(counts: SourceCounts, short_sides: Sequence[int]) -> list[Chart | None]:
    """The short sides, with the stored ones (px) marked, and the aspect ratios."""
    return [_short_sides(counts.short, short_sides), _aspect_ratios(counts.aspect)]


def class_chart(train: NDArray[np.int64]) -> Chart | None:
    """Training samples per class in descending order, for more classes than can be listed by name."""
    ranks = np.unique(np.linspace(1, len(train), min(_POINTS, len(train))).round().astype(int))
    samples = np.sort(train)[::-1][ranks - 1]
    return chart(
        "Training samples per class",
        [Series(name="samples", colour="a", kind="area", x=ranks.tolist(), y=samples.tolist())],
        unit="",
        x_name="class, by descending count",
        wide=True,
    )


def _short_sides(short: NDArray[np.int64], stored: Sequence[int]) -> Chart | None:
    used = np.flatnonzero(short)
    ends = np.geomspace(max(1, used[0] / 1.1), min(len(short), 1.1 * used[-1] + 1), _BINS + 1).round().astype(int)
    ends = np.unique(ends)
    images = np.add.reduceat(np.append(short, 0), ends)[:-1]
    note = f"Dashed lines: the stored short sides, {', '.join(map(str, stored))} px."
    return _histogram("Short side", images, ends, x_name="px", note=note, marks=[(side, "") for side in stored])


def _aspect_ratios(aspect: NDArray[np.int64]) -> Chart | None:
    used = np.flatnonzero(aspect)
    low, high = max(0, used[0] - 2), min(len(aspect), used[-1] + 3)
    return _histogram("Aspect ratio", aspect[low:high], _ASPECT_EDGES[low : high + 1], x_name="width / height")


def _histogram(title: str, images: NDArray[np.int64], edges: NDArray[Any], **options: Any) -> Chart | None:
    bars = Series(
        name="images", colour="a", kind="columns", x=edges[:-1].tolist(), right=edges[1:].tolist(), y=images.tolist()
    )
    return chart(title, [bars], unit="", **{"log": "x", **options})
