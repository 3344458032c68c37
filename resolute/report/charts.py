"""Line and area charts, histograms and heat maps as values for the template: inline SVG that scales with the page, with
axis labels in HTML that keep their size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Chart", "Series", "chart", "short", "without_outliers"]

Values = Sequence[float]
_WIDTH, _HEIGHT = 1000, 300  # the SVG's coordinate system; the page scales it


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve. `kind`: line, dash, dots (a line with markers), points (markers alone, in the order of x), area from
    `base` (None: 0) to `y`, or columns of a histogram, from (`x`, `base`) to (`right`, `y`). `stepped`: each value is
    drawn until the next `x`, as of a setting that jumps.

    `colour`: CSS classes of the page, a to d or soft, and for areas and columns also a shade, l1 (pale) to l5.
    Values that are not finite are omitted. `tooltip`: values shown at the pointer instead of `y`, for a curve stacked
    on another.
    """

    name: str
    colour: str
    x: Values
    y: Values
    kind: str = "line"
    base: Values | None = None
    right: Values | None = None
    tooltip: Values | None = None
    stepped: bool = False


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
    log: str = "",
    x_name: str = "step",
    start: float | None = None,
    note: str = "",
    wide: bool = False,
    robust: bool = False,
) -> Chart | None:
    """The chart; None if there are no finite values.

    `marks`: (x, label) of stage starts. `start`: left end of the x axis (None: the first value). `top`: upper limit of
    the y axis. `zero`: start a linear y axis at 0. `log`: the logarithmic axes, of `xy`. `note`: text below the chart.
    `wide`: use the page's full width. `robust`: outliers do not flatten a linear y axis, see `without_outliers`. Values
    beyond the ends of the axis are drawn at its ends, and the note says how far they reach.
    """
    series = [curve for curve in series if any(map(math.isfinite, curve.y))]
    if not series:
        return None
    xs = [x for curve in series for x in (*curve.x, *(curve.right or ()))] + [x for x, _ in marks]
    ys = [y for curve in series for y in curve.y if math.isfinite(y)]
    left, right = min(xs) if start is None else start, max(xs)
    bottom, high = without_outliers(ys, zero=zero) if robust else (min(ys), max(ys))
    high = min(high, top or math.inf)
    if "y" in log:
        low = min([*ys, *(b for curve in series for b in curve.base or ())])
        ticks = _log_ticks(low, high)
    else:
        low = 0.0 if zero else bottom
        ticks = _ticks(low, high)
        low, high = min(low, ticks[0]), max(high, ticks[-1])
        note = " ".join(filter(None, [note, _beyond(ys, low, high)]))
    x_ticks = (_log_ticks if "x" in log else _ticks)(left, right)
    across, up = _scale(left, right, log="x" in log), _scale(low, high, log="y" in log)

    def px(x: float) -> float:
        return round(_WIDTH * across(x), 1)

    def py(y: float) -> float:
        return round(_HEIGHT * (1 - up(y)), 1)

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
        x_ticks=[(f"{px(tick) / 10:.2f}%", short(tick)) for tick in x_ticks if left <= tick <= right],
        y_ticks=[(f"{py(tick) / 3:.2f}%", short(tick)) for tick in ticks],
        data={
            "x": x_name,
            "unit": unit,
            "left": left,
            "right": right,
            "log": "x" in log,
            "series": [
                {"name": curve.name, "x": _rounded(_middles(curve)), "y": _rounded(curve.tooltip or curve.y)}
                for curve in series
            ],
        },
    )


_OUTLIERS = 0.02  # fraction of the values, and at least one, at each end that may be outliers
_FEWEST = 5  # values: of fewer, none is an outlier


def without_outliers(values: Values, *, zero: bool = False) -> tuple[float, float]:
    """The ends of an axis for `values`: their range without outliers.

    An end is cut if the range from the other end to it is more than twice as long as without 2 % of the values, and
    without one at least. It then lies a quarter beyond the values that are left. `zero`: the axis starts at 0.
    """
    ordered = sorted(values)
    count = max(1, int(_OUTLIERS * len(ordered)))
    low, high = (0.0 if zero else ordered[0]), ordered[-1]
    if len(ordered) < _FEWEST:
        return low, high
    inner_low, inner_high = (0.0 if zero else ordered[count]), ordered[-1 - count]
    span = inner_high - inner_low
    if span > 0 and high - inner_low > 2 * span:
        high = inner_high + span / 4
    if span > 0 and inner_high - low > 2 * span:
        low = inner_low - span / 4
    return low, high


def _beyond(values: Values, low: float, high: float) -> str:
    """How far values lie beyond the ends of an axis; empty if none does."""
    above = f"Values above the axis reach {short(max(values))}." if max(values) > high else ""
    below = f"Values below the axis reach {short(min(values))}." if min(values) < low else ""
    return " ".join(filter(None, [above, below]))


def short(value: float) -> str:
    """Compact notation with about three significant digits: 0.25, 12.5, 1,200, 12,500, 1.25M."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6:
        return f"{value / 1e6:.3g}M"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _paths(curve: Series, px: Callable[[float], float], py: Callable[[float], float]) -> list[tuple[str, str]]:
    base = curve.base or [0.0] * len(curve.x)
    if curve.right is not None:
        corners = zip(map(px, curve.x), map(px, curve.right), map(py, curve.y), map(py, base), strict=True)
        boxes = "".join(f"M{x:g} {y:g}H{r:g}V{b:g}H{x:g}Z" for x, r, y, b in corners)
        return [(f"area {curve.kind} {curve.colour}", boxes)]
    points = [(px(x), py(y), py(b)) for x, y, b in zip(curve.x, curve.y, base, strict=True) if math.isfinite(y)]
    if curve.kind == "points":
        return [(f"points {curve.colour}", "".join(f"M{x:g} {y:g}h0" for x, y, _ in points))]
    if curve.stepped:
        points = [
            corner
            for (x, y, b), before in zip(points, [points[0], *points], strict=False)
            for corner in ((x, before[1], b), (x, y, b))
        ]
    line = "M" + "L".join(f"{x:g} {y:g}" for x, y, _ in points)
    if curve.kind == "area":
        back = "L".join(f"{x:g} {b:g}" for x, _, b in reversed(points))
        return [(f"area {curve.colour}", f"{line}L{back}Z")]
    paths = [(f"{curve.kind} {curve.colour}", line)]
    if curve.kind == "dots" and len(points) <= 200:
        paths.append((f"dot {curve.colour}", "".join(f"M{x:g} {y:g}h0" for x, y, _ in points)))
    return paths


def _middles(curve: Series) -> Values:
    return curve.x if curve.right is None else [(x + r) / 2 for x, r in zip(curve.x, curve.right, strict=True)]


def _scale(low: float, high: float, *, log: bool) -> Callable[[float], float]:
    """Maps [low, high] to 0..1; values outside are clamped."""
    f: Callable[[float], float] = math.log if log else float
    first, span = f(low), (f(high) - f(low)) or 1.0
    return lambda value: (f(min(max(value, low), high)) - first) / span


def _log_ticks(low: float, high: float) -> list[float]:
    """Values of 1, 2 or 5 times a power of ten in [low, high]: powers only over many decades, even steps within one."""
    decades = [10.0**k for k in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    ticks = [digit * decade for decade in decades for digit in (1, 2, 5) if low <= digit * decade <= high]
    if len(ticks) < 3:
        return [tick for tick in _ticks(low, high) if low <= tick <= high]
    return ticks if len(ticks) <= 8 else [decade for decade in decades if low <= decade <= high]


def _ticks(low: float, high: float) -> list[float]:
    """3 to 6 round values that enclose [low, high]."""
    span = (high - low) or abs(high) or 1.0
    size = 10.0 ** math.floor(math.log10(span / 3))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if span / (size * factor) <= 4)
    first = math.floor(low / step)
    return [step * k for k in range(first, math.ceil(high / step - 1e-9) + 1)]


def _rounded(values: Values) -> list[float | None]:
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values]
