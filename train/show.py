"""`python -m train show SHARDS --recipe FILE`: contact sheet of the model's input, one row per stage and split.

The images come from the same loader, plan and graph as in training, so the pixels are those of a run.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.open_dataset import open_dataset
from pipeline.dataset.shard_set import ShardSet
from pipeline.loader.loader import Batch, Loader
from pipeline.plan.plan import Pass
from pipeline.storage.atomic_file import check_output, output_file
from train.recipe.schema import Recipe

__all__ = ["Row", "draw", "main", "model_inputs"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """Model inputs with the normalisation undone: (N, res, res, 3) RGB uint8, and a caption for each."""

    title: str
    pixels: NDArray[np.uint8]
    lines: tuple[str, ...]


def model_inputs(shards: ShardSet, recipe: Recipe, *, count: int = 10) -> list[Row]:
    """The first `count` images of each stage's first training batch and first validation batch.

    They are the same pixels as in a CPU run with this recipe and seed. Raises `ResoluteError` as `Plan` and `Loader`.
    """
    plan = recipe.plan(shards)
    first: dict[tuple[str, int], Pass] = {}
    for pass_ in plan.passes:
        first.setdefault((pass_.split, pass_.stage), pass_)
    mean, std = np.array(recipe.data.mean), np.array(recipe.data.std)
    rows = []
    with Loader(plan, device="cpu", mean=recipe.data.mean, std=recipe.data.std) as loader:
        for pass_ in sorted(first.values(), key=lambda pass_: (pass_.stage, pass_.split)):
            loader.load_state_dict({"next_batch": pass_.first})
            batch = next(loader)
            chosen = batch.images[:count].permute(0, 2, 3, 1).numpy()
            what = "training" if pass_.split == "train" else "validation"
            rows.append(
                Row(
                    title=f"stage {pass_.stage}, {what}, {pass_.res} px, epoch {pass_.epoch}",
                    pixels=np.rint((chosen * std + mean) * 255).clip(0, 255).astype(np.uint8),
                    lines=tuple(_label(shards, batch, i) for i in range(len(chosen))),
                )
            )
    return rows


def _label(shards: ShardSet, batch: Batch, i: int) -> str:
    name = shards.classes[int(batch.labels[i])]
    lam = float(batch.lam[i])
    if lam == 1.0:
        return name
    return f"{lam:.2f} {name}\n{1 - lam:.2f} {shards.classes[int(batch.partner_labels[i])]}"


def draw(rows: list[Row], path: Path) -> None:
    """Write the rows to an image file. Raises `ResoluteError` if it cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = max(len(row.pixels) for row in rows)
    figure = Figure(figsize=(1.5 * columns, 2.0 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    parts = figure.subfigures(len(rows), 1, squeeze=False)[:, 0]
    for part, row in zip(parts, rows, strict=True):
        part.suptitle(row.title, x=0.005, ha="left", fontsize=9)
        for axes in (grid := part.subplots(1, columns, squeeze=False)[0]):
            axes.set_axis_off()
        for axes, pixels, line in zip(grid, row.pixels, row.lines, strict=False):
            axes.imshow(pixels, interpolation="nearest")
            axes.set_title(line.replace("$", r"\$"), fontsize=6, pad=2)
    with output_file(path) as file:
        figure.savefig(file, format=path.suffix[1:].lower(), dpi=120)


def main(args: argparse.Namespace) -> None:
    """Run the command."""
    check_output(args.out, setting="--out", suffixes=(".png", ".jpg", ".jpeg", ".svg", ".pdf"))
    recipe = Recipe.load(args.recipe)
    shards = open_dataset(
        args.shards, resolutions=recipe.resolutions, fold=recipe.data.fold, val=args.val, classes=args.classes
    )
    rows = model_inputs(shards, recipe, count=args.count)
    draw(rows, args.out)
    print(f"{args.out}: {len(rows)} rows of model inputs")
