"""`python -m train lr`: plots learning rate and momentum over all steps of a recipe and prints a summary per stage."""

from __future__ import annotations

import argparse
from itertools import accumulate
from pathlib import Path

from pipeline.dataset.open_dataset import open_dataset
from pipeline.errors import ResoluteError
from pipeline.plan.stage import AUTO
from pipeline.storage.atomic_file import check_output, output_file
from train.recipe.schema import Recipe

from .schedule import Rates, epoch_samples, epoch_steps

__all__ = ["Curve", "draw", "main", "stage_lines"]

_MAX_POINTS = 20_000  # drawn, for any number of steps


class Curve:
    """Learning rate and momentum of every step of a recipe over `samples` training samples."""

    def __init__(self, recipe: Recipe, samples: int) -> None:
        if any(stage.batch_size == AUTO for stage in recipe.stages):
            raise ResoluteError(
                "stages.batch_size: got auto, expected a number, on which the steps depend; set one in the recipe"
            )
        steps = epoch_steps(recipe.stages, samples)
        self.recipe, self.total_steps = recipe, sum(steps)
        self.rates = Rates(
            recipe.schedule, recipe.optim, recipe.stages, total_steps=self.total_steps, epoch_steps=steps,
            epoch_samples=epoch_samples(recipe.stages, samples),
        )  # fmt: skip
        epochs = accumulate((stage.epochs for stage in recipe.stages), initial=0)
        borders = [0, *accumulate(steps)]
        self.firsts = [borders[epoch] for epoch in epochs]  # first step of each stage, and the total

    def at(self, stage: int, step: int) -> tuple[float, float]:
        """(learning rate, momentum) of optimizer step `step` of `stage`, as set in the optimizer."""
        lr, momentum = self.rates.at(step)
        return lr * self.rates.factor(stage), momentum


def stage_lines(curve: Curve) -> list[str]:
    """One line per stage: its steps and its first, highest and last learning rate."""
    lines = []
    for number, stage in enumerate(curve.recipe.stages):
        first, end = curve.firsts[number : number + 2]
        lrs = [curve.at(number, step)[0] for step in range(first, end)]
        layer = {"freeze": stage.freeze_to, "unfreeze": stage.unfreeze_to, "none": None}[curve.recipe.freeze.mode]
        lines.append(
            f"stage {number}: {stage.res} px, batch {stage.batch_size}, steps {first}..{end - 1}, "
            f"LR {lrs[0]:.4g} first, {max(lrs):.4g} peak, {lrs[-1]:.4g} last"
            + (f"; {curve.recipe.freeze.mode}_to {layer}" if layer else "")
        )
    return lines


def draw(curve: Curve, path: Path) -> None:
    """Write the plot to `path`. Raises `ResoluteError` if it cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for number, stage in enumerate(curve.recipe.stages):
        first, end = curve.firsts[number : number + 2]
        every = max(1, curve.total_steps // _MAX_POINTS)
        steps = sorted({*range(first, end, every), end - 1})
        for panel, values in zip(panels, zip(*(curve.at(number, step) for step in steps), strict=True), strict=True):
            panel.plot(steps, values, color="C0", lw=1.2)
            if number:
                panel.axvline(first, color="grey", lw=0.8, ls="--")
        middle = (first + end) / 2
        panels[0].annotate(f"{stage.res} px\nbatch {stage.batch_size}", (middle, 1.0), xytext=(0, 4), fontsize=8,
                           xycoords=("data", "axes fraction"), textcoords="offset points", ha="center")  # fmt: skip
    panels[0].set_ylabel("learning rate")
    panels[0].set_ylim(bottom=0)
    panels[1].set_ylabel("beta 1" if curve.recipe.optim.uses_betas else "momentum")
    panels[1].set_xlabel("optimizer step (dashed: stage change)")
    for panel in panels:
        panel.grid(alpha=0.3)
    with output_file(path) as file:
        figure.savefig(file, format=path.suffix[1:].lower(), dpi=110)


def main(args: argparse.Namespace) -> None:
    """Run the command."""
    check_output(args.out, setting="--out", suffixes=(".png", ".svg", ".pdf"))
    recipe = Recipe.load(args.recipe)
    curve = Curve(recipe, _samples(args, recipe))
    print(f"{recipe.name}: {recipe.schedule.kind}, {recipe.total_epochs} epochs, {curve.total_steps} steps")
    print("\n".join(stage_lines(curve)))
    draw(curve, args.out)
    print(args.out)


def _samples(args: argparse.Namespace, recipe: Recipe) -> int:
    if args.samples is None:
        shards = open_dataset(
            args.shards, resolutions=recipe.resolutions, fold=recipe.data.fold, val=args.val, classes=args.classes
        )
        return len(shards.splits["train"])
    if args.samples < 1:
        raise ResoluteError(f"--samples: got {args.samples}, expected at least 1; give the number of training images")
    return int(args.samples)
