"""`python -m train.predict RUN --src photos --out pred.csv`: what does a run, or all its folds, see in these images?"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from pipeline.cli import guard_process

    guard_process()

import argparse
import csv
import functools
import io
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import nn
from tqdm import tqdm

from pipeline.cli import command
from pipeline.crops import centre_crops
from pipeline.errors import ResoluteError
from pipeline.shards import key_name
from pipeline.storage.atomic_file import output_file

from .device import pick_device
from .saved import Saved, Weights, logits, open_saved, open_set, validation, validation_batches

__all__ = ["Predicted", "main", "predict_folder", "predict_shards", "prepared"]

_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif"}
_AHEAD = 2  # batches that are decoded while the model works


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """One batch's `names`, its `probabilities` (N, classes) float32 on the CPU, `labels` if there are any.

    An image in `errors` (name: why) could not be read; its row is zero.
    """

    names: list[str]
    probabilities: torch.Tensor
    labels: list[str] | None
    errors: dict[str, str]


class Ensemble:
    """The mean of the probabilities of several runs' weights, or of one's."""

    def __init__(
        self, members: list[Saved], *, weights: Weights | None, flip: bool, device: torch.device, res: int
    ) -> None:
        """For images of `res` px."""
        self.first, self.device = members[0], device
        for other in members[1:]:
            if other.seen != self.first.seen:
                raise ResoluteError(f"{other.path}: other classes, res, mean, std or margin than {self.first.path}, "
                                    "expected folds of one recipe and set; predict with one of them")  # fmt: skip
        self.flip = flip or self.first.recipe.eval.flip
        self._networks: list[nn.Module] = []
        for member in members:
            which = weights or member.best_weights
            if which not in member.weights:
                raise ResoluteError(f"--weights: got ema, but {member.path} has no average; leave it out")
            self._networks.append(member.network(which, device, resolutions=[res]))

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """(N, classes) float32 on the CPU of normalised images (N, 3, res, res) on the device.

        They sum up to 1, but where the loss was a binary one of each class: those are each class's own.
        """
        of = torch.sigmoid if self.first.recipe.loss.kind == "bce" else functools.partial(torch.softmax, dim=1)
        each = [of(logits(one, images, recipe=self.first.recipe, flip=self.flip)) for one in self._networks]
        return torch.stack(each).mean(0).cpu()


def prepared(path: Path, *, res: int, margin: float, crop_frac: float | None) -> NDArray[np.uint8]:
    """(res, res, 3) of an image file: upright RGB, shrunk as shards are made, cropped and resized as in validation.

    Raises whatever Pillow raises for damaged files.
    """
    with Image.open(path) as file:
        image = ImageOps.exif_transpose(file)
        if image.has_transparency_data:
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
        elif image.mode.startswith("I;16"):
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        image = image.convert("RGB")
    short = round(res * margin)
    scale = short / min(image.size)
    if scale < 1:
        image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    x, y, width, height = centre_crops(np.array([image.size]), crop_frac or res / short)[0].tolist()
    crop = image.crop((x, y, x + width, y + height))
    return np.asarray(crop.resize((res, res), Image.Resampling.BILINEAR))


def predict_folder(ensemble: Ensemble, paths: list[Path], root: Path, *, res: int, threads: int) -> Iterator[Predicted]:
    """Of image files, in their order; those that cannot be read are told in `errors`."""
    saved = ensemble.first
    data, size = saved.recipe.data, saved.recipe.eval.batch_size
    mean, std = (torch.tensor(values).view(3, 1, 1) * 255 for values in (data.mean, data.std))

    def one(path: Path) -> NDArray[np.uint8] | str:
        try:
            return prepared(path, res=res, margin=saved.margin, crop_frac=saved.recipe.eval.crop_frac)
        except Exception as error:  # why: Pillow's plugins raise anything on damaged files
            return " ".join(str(error).split()) or type(error).__name__

    def batch(part: list[Path], futures: list[Future[NDArray[np.uint8] | str]]) -> Predicted:
        names, found = [str(path.relative_to(root)) for path in part], [future.result() for future in futures]
        errors = {name: got for name, got in zip(names, found, strict=True) if isinstance(got, str)}
        pixels = [np.zeros((res, res, 3), np.uint8) if isinstance(got, str) else got for got in found]
        images = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).sub(mean).div(std)
        probabilities = ensemble(images.to(ensemble.device, memory_format=torch.channels_last))
        probabilities[[name in errors for name in names]] = 0
        return Predicted(names=names, probabilities=probabilities, labels=None, errors=errors)

    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[tuple[list[Path], list[Future[NDArray[np.uint8] | str]]]] = deque()
        for start in range(0, len(paths), size):
            part = paths[start : start + size]
            waiting.append((part, [pool.submit(one, path) for path in part]))
            if len(waiting) > _AHEAD:
                yield batch(*waiting.popleft())
        while waiting:
            yield batch(*waiting.popleft())


def predict_shards(
    ensemble: Ensemble, source: str, *, res: int, split: str, fold: int | None, threads: int
) -> Iterator[Predicted]:
    """Of all samples of a split, by their keys, with their labels, through the loader."""
    recipe = ensemble.first.recipe
    shards = open_set(source, fold=recipe.data.fold if fold is None else fold)
    plan = validation(shards, recipe, [res], split=split)
    with validation_batches(plan, ensemble.first, device=ensemble.device, threads=threads) as batches:
        for batch in batches:
            keys = shards.splits[split].samples[batch.spec.ids]["key"].tolist()
            yield Predicted(names=[key_name(key) for key in keys], probabilities=ensemble(batch.images),
                            labels=[shards.classes[label] for label in batch.labels.tolist()], errors={})  # fmt: skip


def members_of(run: Path) -> list[Saved]:
    """The run at `run`, or all its folds."""
    folds = sorted(run.glob("fold-*"), key=lambda path: (len(path.name), path.name))
    alone = not folds or any((run / name).exists() for name in ("best.pt", "last.pt"))
    return [open_saved(one) for one in ([run] if alone else folds)]


def images_in(source: Path) -> tuple[list[Path], Path]:
    """The image files at `source`, a folder or one file, sorted, and the folder that their names are told from."""
    found = [source] if source.is_file() else sorted(source.rglob("*"))
    paths = [path for path in found if path.suffix.lower() in _SUFFIXES and path.is_file()]
    if not paths:
        got = f"{len(found)} files of other kinds" if found else "nothing"
        raise ResoluteError(f"{source}: no images, got {got}, expected {', '.join(sorted(_SUFFIXES))} files, a folder "
                            "of them, or a shard set; correct SRC")  # fmt: skip
    return paths, source.parent if source.is_file() else source


def write(batches: Iterator[Predicted], out: Path, *, classes: list[str], topk: int, total: int) -> str:
    """Write the rows to `out`, whole or not at all; returns what came of it, in words."""
    done, bad, right, labelled = 0, 0, 0, 0
    with output_file(out) as file, tqdm(total=total or None, unit="image", leave=False, disable=None) as bar:
        text = io.TextIOWrapper(file, newline="", encoding="utf-8", errors="surrogateescape")
        rows = csv.writer(text)
        ranks = [f"{what}{k}" for k in range(1, topk + 1) for what in ("class", "prob")]
        rows.writerow(["image", "label", *ranks, "error"])
        for batch in batches:
            values, places = batch.probabilities.topk(topk, dim=1)
            for i, name in enumerate(batch.names):
                label = "" if batch.labels is None else batch.labels[i]
                pairs = zip(places[i].tolist(), values[i].tolist(), strict=True)
                best = [text for place, value in pairs for text in (classes[place], f"{value:.6f}")]
                why = batch.errors.get(name, "")
                rows.writerow([name, label, *([""] * len(best) if why else best), why])
                right += label == classes[places[i, 0]]
            labelled += len(batch.labels or [])
            done, bad = done + len(batch.names), bad + len(batch.errors)
            bar.update(len(batch.names))
        text.flush()
        text.detach()  # why: closing it would close the file before it is renamed
    told = f"; {bad} could not be read, see the column error" if bad else ""
    return f"{out}: {done} images" + (f", top-1 {100 * right / labelled:.3f} %" if labelled else "") + told


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m train.predict", description=__doc__)
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="a run's folder, one of its .pt files, or the folder of its folds (mean)")
    add("--src", required=True, help="a folder of images, one image, or a shard set (folder or URL)")
    add("--out", type=Path, default=Path("pred.csv"), help="default: %(default)s")
    add("--topk", type=int, default=5, help="classes a row, the likeliest first (default: %(default)s)")
    add("--res", type=int, help="px (default: what the run validated at last)")
    add("--weights", choices=("raw", "ema"), help="default: whichever had the best validation")
    add("--flip", action="store_true", help="test-time flip, if the recipe has it or not")
    add("--split", default="val", help="of a shard set (default: %(default)s)")
    add("--fold", type=int, help="of a set with folds: the part to predict (default: the run's own)")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1 (default: %(default)s)")
    add("--threads", type=int, default=os.cpu_count() or 2, help="CPU threads (default: %(default)s)")
    return command(parser, _run, arguments)


def _run(got: argparse.Namespace) -> None:
    members, device = members_of(got.run), pick_device(got.device)
    if device.type == "cpu":
        torch.set_num_threads(got.threads)
    classes, res = members[0].classes, got.res or members[0].res
    if got.topk < 1 or res < 1:
        raise ResoluteError(f"--topk, --res: got {got.topk} and {res}, expected at least 1; choose others")
    ensemble = Ensemble(members, weights=got.weights, flip=got.flip, device=device, res=res)
    if "://" in got.src or (Path(got.src) / "manifest.json").exists():
        total = 0
        batches = predict_shards(ensemble, got.src, res=res, split=got.split, fold=got.fold, threads=got.threads)
    else:
        paths, root = images_in(Path(got.src))
        total = len(paths)
        batches = predict_folder(ensemble, paths, root, res=res, threads=got.threads)
    print(f"{len(members)} {'runs' if len(members) > 1 else 'run'}, {len(classes)} classes, {res} px, {device}")
    print(write(batches, got.out, classes=classes, topk=min(got.topk, len(classes)), total=total))


if __name__ == "__main__":
    from pipeline.cli import run_main

    run_main(main)
