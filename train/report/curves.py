"""Curves that several pages share: metrics over epochs, and the schedule over steps. Imports neither torch nor DALI."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from resolute.report.charts import Chart, Series, chart
from resolute.train.logs.score import METRICS, Metric, main_metric

__all__ = ["metric_series", "metrics_of", "schedule_charts", "time_unit"]

Values = Sequence[float]
# Keys of `regularization` by the chart that they are drawn in.
_REGULARIZATION = {
    "drop rates, label smoothing, erasing": ("drop_rate", "drop_path_rate", "label_smoothing", "random_erasing_prob"),
    "mixup and cutmix": ("mixup_alpha", "cutmix_alpha"),
    "RandAugment": ("magnitude",),
    "weight decay": ("weight_decay",),
}


def metrics_of(epochs: Sequence[Mapping[str, Any]]) -> tuple[Metric, ...]:
    """The metrics of the kind of target of a run's epochs; the first decides."""
    return next(metrics for metrics in METRICS.values() if metrics[0] == main_metric(epochs[0]))


def metric_series(
    epochs: Sequence[Mapping[str, Any]], x: Values, curves: Sequence[tuple[str, str, str]], scale: float
) -> list[Series]:
    """A curve for each (key of the epochs' records, name, colour) of `curves`, times `scale`."""
    def values(key: str) -> list[float]:
        return [math.nan if epoch.get(key) is None else scale * epoch[key] for epoch in epochs]

    return [Series(name=name, colour=colour, kind="dots", x=x, y=values(key)) for key, name, colour in curves]


def time_unit(seconds: float) -> tuple[str, float]:
    """(name, its seconds) of the unit for an axis that ends at `seconds`."""
    return ("s", 1) if seconds < 120 else ("min", 60) if seconds < 7200 else ("h", 3600)


def schedule_charts(
    steps: Values, *, lrs: Values, momenta: Values, sizes: Values, strengths: Sequence[Mapping[str, float]],
    marks: Sequence[tuple[float, str]], momentum: str = "momentum",
) -> list[Chart | None]:  # fmt: skip
    """Learning rate, momentum, resolution (px) and regularisation over the same optimizer steps, one below the other.

    `strengths`: the values of `regularization` at each step; empty if they are not known. Those that change have
    charts, the others are in a note.
    """
    names = list(strengths[0]) if strengths else []
    changing = [name for name in names if len({each[name] for each in strengths}) > 1]
    # why without magnitude: it has no effect without a policy
    constant = [f"{name} {strengths[0][name]:g}" for name in names
                if name not in (*changing, "magnitude") and strengths[0][name]]  # fmt: skip
    note = f"Regularisation without changes: {', '.join(constant)}." if constant else ""

    def draw(title: str, series: Sequence[Series], unit: str = "", **options: Any) -> Chart | None:
        return chart(title, series, unit=unit, marks=marks, wide=True, **options)

    charts = [
        draw("Learning rate", [Series(name="LR", colour="a", x=steps, y=lrs)]),
        draw(momentum.capitalize(), [Series(name=momentum, colour="c", x=steps, y=momenta)], zero=False),
        draw("Resolution", [Series(name="px", colour="b", x=steps, y=sizes)], "px", zero=False, note=note),
    ]
    for title, group in _REGULARIZATION.items():
        charts.append(draw(f"Regularisation: {title}", [
            Series(name=name, colour=colour, x=steps, y=[each[name] for each in strengths])
            for name, colour in zip(group, "abcd", strict=False) if name in changing
        ]))  # fmt: skip
    return charts
