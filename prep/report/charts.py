"""Statistics of sources and classes, counted in fixed memory and drawn as PNG."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["SourceCounts", "class_chart", "class_counts", "source_chart"]

_ROWS = 1 << 20  # records in memory at a time
_INK, _BAR, _MARK = "#808a96", "#3b7dd8", "#d9733a"  # legible on white and on black
_SIDE_EDGES = np.geomspace(1, 1 << 16, 16 * 12 + 1)  # px, twelve per octave
_ASPECT_EDGES = np.geomspace(1 / 8, 8, 6 * 16 + 1)  # width / height, sixteen per octave


def _pieces(rows: NDArray[Any]) -> Iterator[NDArray[Any]]:
    for first in range(0, len(rows), _ROWS):
        yield rows[first : first + _ROWS]


def class_counts(samples: NDArray[Any], classes: int) -> NDArray[np.int64]:
    """(classes,) int64: number of SAMPLE records with each label."""
    counts = np.zeros(classes, np.int64)
    for piece in _pieces(samples):
        counts += np.bincount(piece["label"], minlength=classes)
    return counts


class SourceCounts:
    """Histograms of width, height, short side (px) and aspect ratio of SOURCE records."""

    def __init__(self) -> None:
        self.short = np.zeros(1 << 16, np.int64)  # exact, by short side in px
        self.sides = np.zeros((len(_SIDE_EDGES) - 1,) * 2, np.int64)  # width, height
        self.aspect = np.zeros(len(_ASPECT_EDGES) - 1, np.int64)

    def add(self, sources: NDArray[Any]) -> None:
        for piece in _pieces(sources):
            width, height = piece["width"].astype(np.float64), piece["height"].astype(np.float64)
            self.short += np.bincount(np.minimum(piece["width"], piece["height"]), minlength=1 << 16)
            self.sides += np.histogram2d(width, height, bins=(_SIDE_EDGES, _SIDE_EDGES))[0].astype(np.int64)
            ratio = np.clip(width / height, _ASPECT_EDGES[0], _ASPECT_EDGES[-1])
            self.aspect += np.histogram(ratio, bins=_ASPECT_EDGES)[0]

    def smaller_than(self, short_side: int) -> int:
        """Number of sources whose short side is below `short_side` px: these are stored unscaled."""
        return int(self.short[:short_side].sum())

    def quantile(self, part: float) -> int:
        """The short side in px that a fraction `part` (0..1) of the sources does not exceed."""
        total = np.cumsum(self.short)
        return int(np.searchsorted(total, max(1, part * total[-1])))


def source_chart(counts: SourceCounts, short_sides: Sequence[int]) -> bytes:
    """PNG of width against height, the short sides with the stored ones (px) marked, and the aspect ratios."""
    from matplotlib.colors import LogNorm

    figure = _figure(11.4, 3.3)
    sides, short, aspect = figure.subplots(1, 3)
    used = np.flatnonzero(counts.sides.any(axis=0) | counts.sides.any(axis=1))
    low, high = max(0, used[0] - 2), min(len(_SIDE_EDGES) - 1, used[-1] + 3)
    shown = counts.sides[low:high, low:high].T.astype(float)
    shown[shown == 0] = np.nan
    edges = _SIDE_EDGES[low : high + 1]
    mesh = sides.pcolormesh(edges, edges, shown, norm=LogNorm(1, max(10, np.nanmax(shown))), cmap=_colours())
    _colorbar(figure, mesh)
    _style_axes(sides, "width x height", "width in px", "height in px", logarithmic="xy")
    step = max(1, (high - low) // 40)
    ends = np.unique(np.round(_SIDE_EDGES[low : high + 1 : step]).astype(int))
    ends = ends if len(ends) > 1 else np.array([ends[0], ends[0] + 1])
    short.stairs(np.add.reduceat(np.append(counts.short, 0), ends)[:-1], ends, fill=True, color=_BAR)
    for side in short_sides:
        short.axvline(side, color=_MARK, linewidth=1.2)
    _style_axes(short, "short side (lines: stored sizes)", "px", "images", logarithmic="x")
    aspect.stairs(counts.aspect, _ASPECT_EDGES, fill=True, color=_BAR)
    _style_axes(aspect, "aspect ratio", "width / height", "images", logarithmic="x")
    return _png(figure)


def class_chart(train: NDArray[np.int64]) -> bytes:
    """PNG of training samples per class in descending order, for more classes than can be listed by name."""
    figure = _figure(11.4, 2.8)
    axes = figure.subplots()
    axes.stairs(np.sort(train)[::-1], np.arange(len(train) + 1), fill=True, color=_BAR)
    axes.set_xlim(0, len(train))
    _style_axes(axes, "training samples per class", "classes, by descending count", "samples")
    return _png(figure)


def _figure(width: float, height: float) -> Figure:
    # why not pyplot: no display, no global state. Imported here because it takes a second
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _colours() -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("resolute", ["#9dbfe8", _BAR, "#7a4fb5", _MARK])


def _colorbar(figure: Figure, mesh: Any) -> None:
    bar = figure.colorbar(mesh, pad=0.02)
    bar.ax.tick_params(colors=_INK, labelsize=8, which="both")
    bar.outline.set_visible(False)


def _style_axes(axes: Axes, title: str, across: str, up: str, *, logarithmic: str = "") -> None:
    """Set titles, and colours that are legible on any background; `logarithmic` lists the log axes, of `xy`."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_title(title, color=_INK, fontsize=10, loc="left")
    axes.set_xlabel(across, color=_INK, fontsize=9)
    axes.set_ylabel(up, color=_INK, fontsize=9)
    axes.tick_params(colors=_INK, labelsize=8, which="both")
    for name, spine in axes.spines.items():
        spine.set_visible(name in ("left", "bottom"))
        spine.set_color(_INK)
    for name in logarithmic:
        axis = axes.xaxis if name == "x" else axes.yaxis
        (axes.set_xscale if name == "x" else axes.set_yscale)("log", base=2)
        axis.set_major_locator(LogLocator(base=2))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160, transparent=True, metadata={"Software": None})
    return buffer.getvalue()
