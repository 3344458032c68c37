"""The schedule over steps, which the pages of `resolute report` and `resolute lr` share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from resolute.report.charts import Chart, Series, chart
from resolute.train.recipe.schema import Recipe
from resolute.train.recipe.sections import smoothing_of

__all__ = ["regularization", "schedule_charts"]

Values = Sequence[float]
# Strengths of regularisation, by the chart that they are drawn in.
_CHARTS = {
    "drop rates, label smoothing, erasing": ("drop_rate", "drop_path_rate", "label_smoothing", "random_erasing_prob"),
    "mixup and cutmix": ("mixup_alpha", "cutmix_alpha"),
    "RandAugment": ("magnitude",),
    "weight decay": ("weight_decay",),
}


def regularization(recipe: Recipe, stage: int) -> dict[str, float]:
    """The strengths of regularisation in a stage, by the name of their keys."""
    own = recipe.in_stage(stage)
    names = [
        (own.model, ("drop_rate", "drop_path_rate")),
        (own.optim, ("weight_decay",)),
        (own.augment, ("magnitude", "mixup_alpha", "cutmix_alpha", "random_erasing_prob")),
    ]
    values = {name: float(getattr(section, name)) for section, keys in names for name in keys}
    return {**values, "label_smoothing": smoothing_of(own.loss)}


def schedule_charts(
    steps: Values,
    *,
    lrs: Values,
    momenta: Values,
    sizes: Values,
    strengths: Sequence[Mapping[str, float]],
    marks: Sequence[tuple[float, str]],
    momentum: str = "momentum",
) -> list[Chart | None]:
    """Learning rate, momentum, resolution (px) and regularisation over the same optimizer steps, one below the other.

    `strengths`: as from `regularization`, at each step; empty if they are not known. Those that change have
    charts, the others are in a note.
    """
    names = list(strengths[0]) if strengths else []
    changing = [name for name in names if len({each[name] for each in strengths}) > 1]
    # why without magnitude: it has no effect without a policy
    constant = [
        f"{name} {strengths[0][name]:g}"
        for name in names
        if name not in (*changing, "magnitude") and strengths[0][name]
    ]
    note = f"Regularisation without changes: {', '.join(constant)}." if constant else ""

    def draw(title: str, series: Sequence[Series], unit: str = "", **options: Any) -> Chart | None:
        return chart(title, series, unit=unit, marks=marks, wide=True, **options)

    charts = [
        draw("Learning rate", [Series(name="LR", colour="a", x=steps, y=lrs)]),
        draw(momentum.capitalize(), [Series(name=momentum, colour="c", x=steps, y=momenta)], zero=False),
        draw(
            "Resolution", [Series(name="px", colour="b", x=steps, y=sizes, stepped=True)], "px", zero=False, note=note
        ),
    ]
    for title, group in _CHARTS.items():
        charts.append(
            draw(
                f"Regularisation: {title}",
                [
                    Series(name=name, colour=colour, x=steps, y=[each[name] for each in strengths])
                    for name, colour in zip(group, "abcd", strict=False)
                    if name in changing
                ],
            )
        )
    return charts
