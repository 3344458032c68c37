"""Makes a table of several labels, or of numbers, from a folder of photos in class folders.

    python -m resolute.benchmarks.training.photo_tables PHOTOS OUT --kind labels [--val-list val.txt] [--count 3000]
    python -m resolute.benchmarks.training.photo_tables PHOTOS OUT --kind values [--val-list val.txt]

labels   Each sample is two photos side by side, drawn with a fixed seed from the same split, each cropped to its centre
         of 1:2 and resized to 128 x 256 px. Its labels are the classes of both, so it has one or two. The classes are
         the names of the folders. A photo can be in several samples.
values   Each sample is one photo, unchanged (a link). `brightness` is the mean luma 0.299 R + 0.587 G + 0.114 B of its
         pixels, 0 to 255, and `colourfulness` is sqrt(var(rg) + var(yb)) + 0.3 sqrt(mean(rg)^2 + mean(yb)^2) with
         rg = R - G and yb = (R + G) / 2 - B. Source: Hasler and Süsstrunk, "Measuring colourfulness in natural images",
         2003, equation 3 of the summary (M(3)).

OUT holds photos/, labels.csv (image and labels separated by |; or image, brightness, colourfulness) and val.txt, the
names of the validation samples, for `prep --src OUT/photos --labels OUT/labels.csv --val-list OUT/val.txt`. Photos of
--val-list are in val; without it a tenth of each class is.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from resolute.console import guard_process

    guard_process()

import argparse
import csv
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from resolute.console import Parser, command
from resolute.errors import ResoluteError

__all__ = ["brightness_colourfulness", "main"]

_SUFFIXES = (".jpg", ".jpeg", ".png")
_HALF = (128, 256)


def brightness_colourfulness(image: Image.Image) -> tuple[float, float]:
    """The two numbers of an RGB image, as defined above."""
    red, green, blue = (np.asarray(image.convert("RGB"), np.float64)[..., c] for c in range(3))
    rg, yb = red - green, (red + green) / 2 - blue
    spread = np.sqrt(rg.var() + yb.var())
    return float((0.299 * red + 0.587 * green + 0.114 * blue).mean()), float(
        spread + 0.3 * np.sqrt(rg.mean() ** 2 + yb.mean() ** 2)
    )


def _splits(root: Path, val_list: Path | None) -> dict[str, list[Path]]:
    photos = sorted(path for path in root.rglob("*") if path.suffix.lower() in _SUFFIXES)
    if not photos:
        kinds = ", ".join(_SUFFIXES)
        raise ResoluteError(f"{root}: no photos, expected class folders of {kinds} files; correct PHOTOS")
    if val_list is None:
        held_out = set(photos[::10])
    else:
        listed = set(val_list.read_text().split("\n"))
        held_out = {path for path in photos if path.name in listed or str(path.relative_to(root)) in listed}
    if not held_out or len(held_out) == len(photos):
        raise ResoluteError(f"{val_list}: got {len(held_out)} of {len(photos)} photos, expected some; correct it")
    return {"train": [p for p in photos if p not in held_out], "val": [p for p in photos if p in held_out]}


def _half(path: Path) -> Image.Image:
    image = Image.open(path).convert("RGB")
    width = min(image.width, image.height // 2)
    left, top = (image.width - width) // 2, (image.height - 2 * width) // 2
    return image.crop((left, top, left + width, top + 2 * width)).resize(_HALF, Image.Resampling.BICUBIC)


def _make_labels(splits: dict[str, list[Path]], photos: Path, count: int, seed: int) -> list[list[str]]:
    rows, total = [["image", "labels"]], sum(map(len, splits.values()))
    rng = random.Random(seed)
    for split, paths in splits.items():
        for number in range(max(1, round(count * len(paths) / total))):
            pair = rng.sample(paths, 2)
            both = Image.new("RGB", (2 * _HALF[0], _HALF[1]))
            for k, path in enumerate(pair):
                both.paste(_half(path), (k * _HALF[0], 0))
            name = f"{split}-{number:05d}.jpg"
            both.save(photos / name, quality=92)
            rows.append([name, "|".join(sorted({path.parent.name for path in pair}))])
    return rows


def _make_values(splits: dict[str, list[Path]], photos: Path) -> list[list[str]]:
    rows = [["image", "brightness", "colourfulness"]]
    for split, paths in splits.items():
        for number, path in enumerate(paths):
            name = f"{split}-{number:05d}{path.suffix.lower()}"
            (photos / name).symlink_to(path.resolve())
            with Image.open(path) as image:
                rows.append([name, *(f"{value:.4f}" for value in brightness_colourfulness(image))])
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    about = (__doc__ or "").partition("\n")[0]
    parser = Parser(prog="python -m resolute.benchmarks.training.photo_tables", description=about)
    parser.add_argument("photos", type=Path, metavar="PHOTOS", help="folder of class folders")
    parser.add_argument("out", type=Path, metavar="OUT", help="a new folder")
    parser.add_argument("--kind", choices=("labels", "values"), required=True)
    parser.add_argument("--val-list", type=Path, metavar="FILE", help="names of the validation photos, one per line")
    parser.add_argument("--count", type=int, default=3000, metavar="N", help="samples of kind labels (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    return command(parser, _run, arguments)


def _run(args: argparse.Namespace) -> None:
    if args.out.exists():
        raise ResoluteError(f"{args.out}: exists, expected a new folder; choose another OUT")
    splits, folder = _splits(args.photos, args.val_list), args.out / "photos"
    folder.mkdir(parents=True)
    is_labels = args.kind == "labels"
    rows = _make_labels(splits, folder, args.count, args.seed) if is_labels else _make_values(splits, folder)
    with (args.out / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    names = [row[0] for row in rows[1:] if row[0].startswith("val-")]
    (args.out / "val.txt").write_text("".join(f"{name}\n" for name in names))
    print(f"{args.out}: {len(rows) - 1} samples, {len(names)} of them in val.txt")


if __name__ == "__main__":
    from resolute.console import run_main

    run_main(main)
