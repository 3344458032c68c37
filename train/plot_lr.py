"""What will the learning rate do? Drawn over all steps of a recipe, and told a stage a line, before anything runs.

    python -m train.plot_lr --recipe train/recipes/demo.toml --samples 1281167
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from pipeline.cli import guard_process

    guard_process()

import argparse
from itertools import accumulate
from pathlib import Path

from pipeline.cli import Parser, command
from pipeline.dataset.open_dataset import open_either
from pipeline.errors import ResoluteError
from pipeline.plan.stage import AUTO
from pipeline.storage.atomic_file import check_output, output_file
from train.recipe.schema import Recipe

from .schedule import Rates, epoch_samples, epoch_steps

__all__ = ["Curve", "draw", "main", "stage_lines"]

_DRAWN = 20_000  # points at most, of any number of steps


class Curve:
    """Learning rate and momentum of every step of a recipe over `samples` training samples."""

    def __init__(self, recipe: Recipe, samples: int) -> None:
        if any(stage.batch_size == AUTO for stage in recipe.stages):
            raise ResoluteError(
                "stages.batch_size: got auto, expected a number: the steps depend on it; put one in the recipe"
            )
        steps = epoch_steps(recipe.stages, samples)
        self.recipe, self.total_steps = recipe, sum(steps)
        self.rates = Rates(
            recipe.schedule, recipe.optim, recipe.stages, total_steps=self.total_steps, epoch_steps=steps,
            epoch_samples=epoch_samples(recipe.stages, samples),
        )  # fmt: skip
        epochs = accumulate((stage.epochs for stage in recipe.stages), initial=0)
        borders = [0, *accumulate(steps)]
        self.firsts = [borders[epoch] for epoch in epochs]  # first step of each stage, and the end

    def at(self, stage: int, step: int) -> tuple[float, float]:
        """(learning rate, momentum) of a step of `stage`, as the optimizer gets them."""
        lr, momentum = self.rates.at(step)
        return lr * self.rates.factor(stage), momentum


def stage_lines(curve: Curve) -> list[str]:
    """A line a stage: its steps, and the learning rate at its first, highest and last."""
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
    """Write the picture. Raises `ResoluteError` if it cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for number, stage in enumerate(curve.recipe.stages):
        first, end = curve.firsts[number : number + 2]
        every = max(1, curve.total_steps // _DRAWN)
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
    panels[1].set_ylabel("momentum" if curve.recipe.optim.name == "sgd" else "beta 1")
    panels[1].set_xlabel("optimizer step (dashed: stage change)")
    for panel in panels:
        panel.grid(alpha=0.3)
    with output_file(path) as file:
        figure.savefig(file, format=path.suffix[1:].lower(), dpi=110)


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m train.plot_lr", description="Draw learning rate and momentum over all steps.")
    parser.add_argument("--recipe", type=Path, required=True, metavar="FILE")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--shards", metavar="SHARDS", help="a shard set, or tars that others made")
    source.add_argument("--samples", type=int, metavar="N", help="training samples, without shards")
    parser.add_argument("--val", help="of tars that others made: those that validate, or a part of the samples (0.05)")
    parser.add_argument("--classes", help="of tars that others made: a file with the name of a class on each line")
    parser.add_argument("--out", type=Path, default=Path("lr.png"), metavar="FILE", help="default: %(default)s")
    return command(parser, _run, arguments)


def _run(args: argparse.Namespace) -> None:
    check_output(args.out, setting="--out", suffixes=(".png", ".svg", ".pdf"))
    recipe = Recipe.load(args.recipe)
    curve = Curve(recipe, _samples(args, recipe))
    print(f"{recipe.name}: {recipe.schedule.kind}, {recipe.total_epochs} epochs, {curve.total_steps} steps")
    print("\n".join(stage_lines(curve)))
    draw(curve, args.out)
    print(args.out)


def _samples(args: argparse.Namespace, recipe: Recipe) -> int:
    if args.samples is None:
        shards = open_either(
            args.shards, resolutions=recipe.resolutions, fold=recipe.data.fold, val=args.val, classes=args.classes
        )
        return len(shards.splits["train"])
    if args.samples < 1:
        raise ResoluteError(f"--samples: got {args.samples}, expected at least 1; give the number of training images")
    return int(args.samples)


if __name__ == "__main__":
    from pipeline.cli import run_main

    run_main(main)
