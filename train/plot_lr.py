"""`resolute lr`: draws the schedule over all steps of a recipe and prints a summary per stage.

The charts share the x axis: learning rate, momentum, resolution, and the regularisation that changes.
"""

from __future__ import annotations

import bisect
from itertools import accumulate
from pathlib import Path

from resolute import cuda
from resolute.errors import ResoluteError
from resolute.files import output_file
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.plan.batching import each_epoch
from resolute.pipeline.plan.stage import AUTO
from resolute.report.charts import Chart
from resolute.report.page import figures_page
from resolute.train.optim.schedule import Rates, epoch_samples, epoch_steps
from resolute.train.options import LrOptions
from resolute.train.recipe.schema import Recipe
from resolute.train.recipe.starter import chosen_recipe
from resolute.train.run_folder import page_file

from .report.curves import regularization, schedule_charts

__all__ = ["Curve", "changes", "charts", "draw", "main", "regularization_text", "stage_lines"]

_MAX_POINTS = 2000  # drawn, for any number of steps; more would be below a pixel each


class Curve:
    """Learning rate and momentum of every step of a recipe over `samples` training samples."""

    def __init__(self, recipe: Recipe, samples: int) -> None:
        if any(stage.batch_size == AUTO for stage in recipe.stages):
            raise ResoluteError(
                "stages.batch_size: got auto, expected a number, on which the steps depend; set one in the recipe"
            )
        steps = epoch_steps(recipe.stages, samples)
        self._epochs = [
            (stage, runs) for stage, _, runs in each_epoch(recipe.stages, samples=samples, seed=recipe.seed)
        ]
        self.recipe, self.total_steps = recipe, sum(steps)
        self.rates = Rates(
            recipe.schedule,
            recipe.optim,
            recipe.stages,
            total_steps=self.total_steps,
            epoch_steps=steps,
            epoch_samples=epoch_samples(recipe.stages, samples),
        )
        epochs = accumulate((stage.epochs for stage in recipe.stages), initial=0)
        self._borders = borders = [0, *accumulate(steps)]
        self.firsts = [borders[epoch] for epoch in epochs]  # first step of each stage, and the total

    def at(self, stage: int, step: int) -> tuple[float, float]:
        """(learning rate, momentum) of optimizer step `step` of `stage`, as set in the optimizer."""
        lr, momentum = self.rates.at(step)
        return lr * self.rates.factor(stage, self.res(step)), momentum

    def res(self, step: int) -> int:
        """The training resolution of optimizer step `step`, px."""
        epoch = bisect.bisect_right(self._borders, step) - 1
        k = step - self._borders[epoch]
        run = next(run for run in reversed(self._epochs[epoch][1]) if run.first <= k)
        return run.at(k - run.first)[0].res


def changes(recipe: Recipe) -> list[str]:
    """The strengths of regularisation that differ between stages."""
    values = [regularization(recipe, number) for number in range(len(recipe.stages))]
    return [name for name in values[0] if len({each[name] for each in values}) > 1]


def stage_lines(curve: Curve) -> list[str]:
    """One line per stage: its steps and its first, highest and last learning rate."""
    lines = []
    for number, stage in enumerate(curve.recipe.stages):
        first, end = curve.firsts[number : number + 2]
        lrs = [curve.at(number, step)[0] for step in range(first, end)]
        lines.append(
            f"stage {number}: {stage.res_text}, batch {stage.batch_text}, steps {first}..{end - 1}, "
            f"LR {lrs[0]:.4g} first, {max(lrs):.4g} peak, {lrs[-1]:.4g} last"
            + (f"; train_from {stage.train_from}" if stage.train_from else "")
            + regularization_text(curve.recipe, number)
        )
    return lines


def regularization_text(recipe: Recipe, stage: int) -> str:
    """The strengths of a stage that differ from those of others: "; drop_rate 0.1"."""
    values = regularization(recipe, stage)
    return "".join(f"; {name} {values[name]:.4g}" for name in changes(recipe))


def charts(curve: Curve) -> list[Chart]:
    """The charts of the schedule, against the optimizer step."""
    recipe, every = curve.recipe, max(1, curve.total_steps // _MAX_POINTS)
    points, marks = [], []
    for number, stage in enumerate(recipe.stages):
        first, end = curve.firsts[number : number + 2]
        marks.append((float(first), f"{stage.res_text}, batch {stage.batch_text}"))
        points += [
            (number, float(step), *curve.at(number, step)) for step in sorted({*range(first, end, every), end - 1})
        ]
    stages, steps, lrs, momenta = zip(*points, strict=True)
    sizes = [curve.res(int(step)) for step in steps]
    strengths = [regularization(recipe, number) for number in range(len(recipe.stages))]
    return [
        *filter(
            None,
            schedule_charts(
                steps,
                lrs=lrs,
                momenta=momenta,
                sizes=list(map(float, sizes)),
                marks=marks,
                strengths=[strengths[stage] for stage in stages],
                momentum="beta 1" if recipe.optim.uses_betas else "momentum",
            ),
        )
    ]


def draw(curve: Curve, path: Path) -> None:
    """Write the page to `path`. Raises `ResoluteError` if it cannot be written."""
    with output_file(path) as file:
        file.write(
            figures_page(title=f"Schedule of {curve.recipe.name}", subtitle=_summary(curve), charts=charts(curve))
        )


def _summary(curve: Curve) -> str:
    return f"{curve.recipe.schedule.kind}, {curve.recipe.total_epochs} epochs, {curve.total_steps} steps"


def main(args: LrOptions) -> None:
    """Run the command."""
    text = chosen_recipe(args.recipe, args.set_, shards=args.shards or "", gpu=cuda.available())
    recipe = Recipe.from_text(text)
    with page_file(args.out, f"{recipe.name}-lr.html") as out:
        curve = Curve(recipe, _samples(args, recipe))
        print(f"{recipe.name}: {_summary(curve)}")
        print("\n".join(stage_lines(curve)))
        draw(curve, out)
        print(out)


def _samples(args: LrOptions, recipe: Recipe) -> int:
    if args.shards is not None:
        shards = ShardSet.open(
            args.shards, resolutions=recipe.resolutions, fold=recipe.data.fold, folds=recipe.data.folds
        )
        return len(shards.splits["train"])
    assert args.samples is not None
    return args.samples
