"""Line and area charts as values for the template: inline SVG that scales with the page, with axis labels in HTML that
keep their size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Chart", "Series", "chart", "short"]

Values = Sequence[float]
_WIDTH, _HEIGHT = 1000, 300  # the SVG's coordinate system; the page scales it


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve. `kind`: line, dash, dots (a line with markers), or area from `base` (None: 0) to `y`.

    `colour` is a CSS class of the page; values that are not finite are omitted. `tooltip`: values shown at the pointer
    instead of `y`, for a curve stacked on another.
    """

    name: str
    colour: str
    x: Values
    y: Values
    kind: str = "line"
    base: Values | None = None
    tooltip: Values | None = None


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart for the macro `chart` of parts.html: positions in percent of the plot, paths in SVG coordinates."""

    title: str
    unit: str
    note: str
    wide: bool
    view_box: str = f"0 0 {_WIDTH} {_HEIGHT}"
    paths: Sequence[tuple[str, str]]  # (CSS class, SVG path data), in drawing order
    legend: Sequence[tuple[str, str]]  # (CSS class, name)
    marks: Sequence[tuple[str, str, str]]  # (left, width, label)
    x_ticks: Sequence[tuple[str, str]]  # (left, label)
    y_ticks: Sequence[tuple[str, str]]  # (top, label)
    data: dict[str, Any]  # for the page's script, which shows the values at the pointer


def chart(
    title: str,
    series: Sequence[Series],
    *,
    unit: str,
    marks: Sequence[tuple[float, str]] = (),
    top: float | None = None,
    zero: bool = True,
    x_name: str = "step",
    start: float | None = None,
    note: str = "",
    wide: bool = False,
) -> Chart | None:
    """The chart; None if there are no finite values.

    `marks`: (x, label) of stage starts. `start`: left end of the x axis (None: the first value). `top`: upper limit of
    the y axis. `zero`: start the y axis at 0. `note`: text below the chart. `wide`: use the page's full width.
    """
    series = [curve for curve in series if any(map(math.isfinite, curve.y))]
    if not series:
        return None
    xs = [x for curve in series for x in curve.x]
    ys = [y for curve in series for y in curve.y if math.isfinite(y)]
    left, right = min(xs) if start is None else start, max(xs)
    low, high = 0.0 if zero else min(ys), min(max(ys), top or math.inf)
    ticks = _ticks(low, high)
    low, high = min(low, ticks[0]), max(high, ticks[-1])

    def px(x: float) -> float:
        return round(_WIDTH * (x - left) / ((right - left) or 1), 1)

    def py(y: float) -> float:
        return round(_HEIGHT * (1 - (min(y, high) - low) / ((high - low) or 1)), 1)

    ends = [*(x for x, _ in marks[1:]), right]
    return Chart(
        title=title,
        unit=unit,
        note=note,
        wide=wide,
        paths=[
            *(("grid", f"M0 {py(tick)}H{_WIDTH}") for tick in ticks),
            *(path for curve in series for path in _paths(curve, px, py)),
            *(("mark", f"M{px(x)} 0V{_HEIGHT}") for x, _ in marks),
        ],
        legend=[(f"{curve.colour} {curve.kind}", curve.name) for curve in series],
        marks=[
            (f"{px(x) / 10:.2f}%", f"{(px(end) - px(x)) / 10:.2f}%", label)
            for (x, label), end in zip(marks, ends, strict=False)
        ],
        x_ticks=[(f"{px(tick) / 10:.2f}%", short(tick)) for tick in _ticks(left, right) if left <= tick <= right],
        y_ticks=[(f"{py(tick) / 3:.2f}%", short(tick)) for tick in ticks],
        data={"x": x_name, "unit": unit, "left": left, "right": right, "series": [
            {"name": curve.name, "x": _rounded(curve.x), "y": _rounded(curve.tooltip or curve.y)} for curve in series
        ]},
    )  # fmt: skip


def short(value: float) -> str:
    """Compact notation with about three significant digits: 0.25, 12.5, 1,200, 12,500, 1.25M."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6:
        return f"{value / 1e6:.3g}M"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _paths(
    curve: Series, px: Callable[[float], float], py: Callable[[float], float]
) -> list[tuple[str, str]]:
    base = curve.base or [0.0] * len(curve.x)
    points = [(px(x), py(y), py(b)) for x, y, b in zip(curve.x, curve.y, base, strict=True) if math.isfinite(y)]
    line = "M" + "L".join(f"{x:g} {y:g}" for x, y, _ in points)
    if curve.kind == "area":
        back = "L".join(f"{x:g} {b:g}" for x, _, b in reversed(points))
        return [(f"area {curve.colour}", f"{line}L{back}Z")]
    paths = [(f"{curve.kind} {curve.colour}", line)]
    if curve.kind == "dots" and len(points) <= 200:
        paths.append((f"dot {curve.colour}", "".join(f"M{x:g} {y:g}h0" for x, y, _ in points)))
    return paths


def _ticks(low: float, high: float) -> list[float]:
    """3 to 6 round values that enclose [low, high]."""
    span = (high - low) or abs(high) or 1.0
    size = 10.0 ** math.floor(math.log10(span / 3))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if span / (size * factor) <= 4)
    first = math.floor(low / step)
    return [step * k for k in range(first, math.ceil(high / step - 1e-9) + 1)]


def _rounded(values: Values) -> list[float | None]:
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values]
