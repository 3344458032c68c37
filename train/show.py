"""`resolute show SHARDS --recipe FILE`: contact sheet of the model's input, per stage, split and resolution.

Beside each input is its original, as it is stored, with the crop outlined. If regularisation changes over the run, the
charts of `resolute lr` come first, and each row has its values.

The inputs come from the same loader, plan and graph as in training, so the pixels are those of a run.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from resolute import cuda
from resolute.console import counted
from resolute.files import output_file
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.loader.batch import Batch
from resolute.pipeline.loader.loader import Loader
from resolute.pipeline.loader.reader import Reader
from resolute.report.charts import Chart
from resolute.report.page import figures_page
from resolute.train.options import ShowOptions
from resolute.train.recipe.schema import Recipe
from resolute.train.recipe.starter import chosen_recipe
from resolute.train.run_folder import page_file

from .plot_lr import Curve, changes, charts, regularization_text
from .warmup import announce_compilation

__all__ = ["Row", "draw", "main", "model_inputs"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """Model inputs with the normalisation undone: (N, res, res, 3) RGB uint8, and a caption and the original of each.

    `originals`: JPEG files as stored. `crops`: (N, 4) x, y, width, height in px of these, before a flip or shift.
    """

    title: str
    pixels: NDArray[np.uint8]
    lines: tuple[str, ...]
    originals: tuple[bytes, ...]
    crops: NDArray[np.int32]


def model_inputs(
    shards: ShardSet, recipe: Recipe, *, count: int = 10, say: Callable[[str], object] = lambda line: None
) -> list[Row]:
    """The first `count` images of each stage's first training batch of each resolution and first validation batch.

    They are the same pixels as in a CPU run with this recipe and seed. `say` is given a line on what takes long, before
    it begins. Raises `ResoluteError` as `Plan` and `Loader`.
    """
    plan = recipe.plan(shards)
    first: dict[tuple[int, str, int], int] = {}  # batch by stage, split and resolution
    for phase in plan.phases:
        for k in phase.distinct_batches:
            first.setdefault((phase.stage, phase.split, phase.batch_at(k)[0]), phase.first + k)
    images = sum(len(plan.batch(index)) for index in first.values())
    say(f"loading {counted(len(first), 'whole batch', plural='whole batches')}, {counted(images, 'image')}")
    mean, std = np.array(recipe.data.mean), np.array(recipe.data.std)
    rows = []
    with (
        Loader(plan, device="cpu", mean=recipe.data.mean, std=recipe.data.std, world_size=1) as loader,
        closing(Reader(shards, threads=2, padded=False)) as reader,
    ):
        for (stage, split, res), index in sorted(first.items()):
            loader.load_state_dict({"next_batch": index})
            batch = next(loader)
            chosen = batch.images[:count].permute(0, 2, 3, 1).numpy()
            what = "training" if split == "train" else "validation"
            read = reader.submit(split, batch.spec.stored_res, batch.spec.ids[:count]).result()
            strengths = regularization_text(recipe, stage) if split == "train" else ""
            rows.append(
                Row(
                    title=f"stage {stage}, {what}, {res} px, epoch {batch.spec.epoch}{strengths}",
                    pixels=np.rint((chosen * std + mean) * 255).clip(0, 255).astype(np.uint8),
                    lines=tuple(_label(shards, batch, i) for i in range(len(chosen))),
                    originals=tuple(image[:n].tobytes() for image, n in zip(read.images, read.nbytes, strict=True)),
                    crops=batch.spec.crops[:count],
                )
            )
    return rows


def _label(shards: ShardSet, batch: Batch, i: int) -> str:
    """The caption, in lines: names of classes with their weights if they are mixed, or values with their units."""
    names, units = shards.target.names, shards.target.units
    if shards.target.kind == "values":
        named = itertools.zip_longest(names, batch.targets[i].tolist(), units, fillvalue="")
        return "\n".join(f"{name} {value:.5g} {unit}".rstrip() for name, value, unit in named)
    lam = float(batch.lam[i])
    if shards.target.kind == "labels":
        weights = batch.targets[i].tolist()
        shown = [(name, weight) for name, weight in zip(names, weights, strict=True) if weight]
        lines = [
            f"{name} ignored" if weight < 0 else name if weight == 1.0 else f"{weight:.2f} {name}"
            for name, weight in shown
        ]
        return "\n".join(lines) or "(none)"
    name = names[int(batch.labels[i])]
    if lam == 1.0:
        return name
    return f"{lam:.2f} {name}\n{1 - lam:.2f} {names[int(batch.partner_labels[i])]}"


def draw(rows: list[Row], path: Path, *, title: str, charts: Sequence[Chart] = ()) -> None:
    """Write a page of the charts and the rows. Raises `ResoluteError` if it cannot be written."""
    sheets = []
    for row in rows:
        side = row.pixels.shape[1]
        sheets.append(
            (
                row.title,
                [
                    {
                        "data": _webp(pixels),
                        "title": line.replace("\n", ", "),
                        "lines": line.split("\n"),
                        "width": side,
                        "height": side,
                        "original": _outlined(original, crop.tolist(), side),
                    }
                    for pixels, line, original, crop in zip(
                        row.pixels, row.lines, row.originals, row.crops, strict=True
                    )
                ],
            )
        )
    with output_file(path) as file:
        subtitle = "first images of each stage and split, each beside its original with the crop outlined"
        file.write(figures_page(title=title, subtitle=subtitle, charts=charts, sheets=sheets))


def _webp(pixels: NDArray[np.uint8]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "WEBP", lossless=True)
    return buffer.getvalue()


def _outlined(jpeg: bytes, crop: Sequence[int], height: int) -> dict[str, Any]:
    """A stored image, `height` px high, with the crop (x, y, width, height in its px) outlined, for the macro `sheet`.

    Images are at most twice as wide as high.
    """
    image = Image.open(io.BytesIO(jpeg)).convert("RGB")
    scale = min(height / image.height, 2 * height / image.width)
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    small = image.resize(size, Image.Resampling.BICUBIC)
    x, y, width, high = (value * scale for value in crop)
    right, bottom = min(size[0] - 1.0, x + width), min(size[1] - 1.0, y + high)
    box = [min(x, right), min(y, bottom), right, bottom]  # why min: a panorama may be drawn less than a crop's px high
    canvas = ImageDraw.Draw(small)
    canvas.rectangle(box, outline=(0, 0, 0), width=3)  # why two: visible on any background
    canvas.rectangle(box, outline=(255, 255, 255), width=1)
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=85)
    return {"data": buffer.getvalue(), "width": size[0], "height": size[1]}


def main(args: ShowOptions) -> None:
    """Run the command."""
    recipe = Recipe.from_text(chosen_recipe(args.recipe, args.set_, shards=args.shards, gpu=cuda.available()))
    data = recipe.data
    with page_file(args.out, f"{recipe.name}-show.html") as out:
        shards = ShardSet.open(args.shards, resolutions=recipe.resolutions, fold=data.fold, folds=data.folds)
        announce_compilation(torch.device("cpu"))
        rows = model_inputs(shards, recipe, count=args.count, say=partial(print, flush=True))
        schedule = charts(Curve(recipe, len(shards.splits["train"]))) if changes(recipe) else ()
        draw(rows, out, title=f"Model input of {recipe.name}", charts=schedule)
        print(f"{out}: {counted(len(rows), 'row')} of model inputs")
