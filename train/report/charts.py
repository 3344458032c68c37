"""How is a series of a run drawn? Inline SVG that stretches, with labels in HTML that don't."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Series", "chart", "short"]

Values = Sequence[float]
_WIDTH, _HEIGHT = 1000, 300  # of the drawing's own grid: what is seen is as wide as the page


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve. `kind`: line, dash, dots (line with its points), or area from `base` (None: 0) to `y`.

    `colour` is a class of the page's style; values that are not finite are left out. `told` instead of `y` is what
    the pointer reads, for a curve that is stacked on another.
    """

    name: str
    colour: str
    x: Values
    y: Values
    kind: str = "line"
    base: Values | None = None
    told: Values | None = None


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
) -> str:
    """A <figure>, "" without values. `marks`: (x, label) of stage starts. `start` of the x axis, None: first value.

    `top` cuts the y axis, `zero` starts it at 0; a `wide` one has a row of the page for itself.
    """
    series = [one for one in series if any(map(math.isfinite, one.y))]
    if not series:
        return ""
    xs = [x for one in series for x in one.x]
    ys = [y for one in series for y in one.y if math.isfinite(y)]
    left, right = min(xs) if start is None else start, max(xs)
    low, high = 0.0 if zero else min(ys), min(max(ys), top or math.inf)
    ticks = _ticks(low, high)
    low, high = min(low, ticks[0]), max(high, ticks[-1])

    def px(x: float) -> float:
        return round(_WIDTH * (x - left) / ((right - left) or 1), 1)

    def py(y: float) -> float:
        return round(_HEIGHT * (1 - (min(y, high) - low) / ((high - low) or 1)), 1)

    drawn = "".join(f'<path class="grid" d="M0 {py(tick)}H{_WIDTH}"/>' for tick in ticks)
    drawn += "".join(_path(one, px, py) for one in series)
    drawn += "".join(f'<path class="mark" d="M{px(x)} 0V{_HEIGHT}"/>' for x, _ in marks)
    ends = [*(x for x, _ in marks[1:]), right]
    labels = "".join(
        f'<span style="left:{px(x) / 10:.2f}%;width:{(px(end) - px(x)) / 10:.2f}%">{html.escape(label)}</span>'
        for (x, label), end in zip(marks, ends, strict=False)
    )
    y_axis = "".join(f'<span style="top:{py(tick) / 3:.2f}%">{short(tick)}</span>' for tick in ticks)
    x_axis = "".join(
        f'<span style="left:{px(tick) / 10:.2f}%">{short(tick)}</span>'
        for tick in _ticks(left, right) if left <= tick <= right
    )  # fmt: skip
    legend = "".join(
        f'<span class="key {one.colour} {one.kind}"><i></i>{html.escape(one.name)}</span>' for one in series
    )
    data = {"x": x_name, "unit": unit, "left": left, "right": right, "series": [
        {"name": one.name, "x": _rounded(one.x), "y": _rounded(one.tooltip or one.y)} for one in series
    ]}  # fmt: skip
    return (
        f'<figure class="chart{" wide" * wide}"><figcaption><b>{html.escape(title)}</b> '
        f'<span class="soft">{html.escape(unit)}</span><div class="legend">{legend}</div></figcaption>\n'
        f'<div class="axes"><div class="y">{y_axis}</div><div class="plot">'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{html.escape(title)}">{drawn}</svg><div class="marks">{labels}</div></div>'
        f'<div class="x">{x_axis} <i>{x_name}</i></div></div>\n<p class="read soft">{html.escape(note)}</p>'
        f'<script type="application/json">{json.dumps(data)}</script></figure>\n'
    )


def short(value: float) -> str:
    """At most 3 to 4 digits where there are fewer than 4 before the point: 0.25, 12.5, 1,200, 12,500, 1.25M."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6:
        return f"{value / 1e6:.3g}M"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _path(one: Series, px: Callable[[float], float], py: Callable[[float], float]) -> str:
    points = [(px(x), py(y), py(b)) for x, y, b in zip(one.x, one.y, one.base or [0.0] * len(one.x), strict=True)
              if math.isfinite(y)]  # fmt: skip
    line = "M" + "L".join(f"{x:g} {y:g}" for x, y, _ in points)
    if one.kind == "area":
        back = "L".join(f"{x:g} {b:g}" for x, _, b in reversed(points))
        return f'<path class="area {one.colour}" d="{line}L{back}Z"/>'
    dots = "".join(f"M{x:g} {y:g}h0" for x, y, _ in points) if one.kind == "dots" and len(points) <= 200 else ""
    return f'<path class="{one.kind} {one.colour}" d="{line}"/>' + (
        f'<path class="dot {one.colour}" d="{dots}"/>' if dots else ""
    )


def _ticks(low: float, high: float) -> list[float]:
    """3 to 6 round values that enclose [low, high]."""
    span = (high - low) or abs(high) or 1.0
    size = 10.0 ** math.floor(math.log10(span / 3))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if span / (size * factor) <= 4)
    first = math.floor(low / step)
    return [step * k for k in range(first, math.ceil(high / step - 1e-9) + 1)]


def _rounded(values: Values) -> list[float | None]:
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values]
