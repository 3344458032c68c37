"""FFCV 1.0.2 for `resolute.benchmarks.whole`: its file of all photos, and batches for `loop`.

    PY -m resolute.benchmarks.whole.ffcv SETTINGS.json      # writes the .beton files

Photos are kept as pixels, not as JPEGs, which FFCV's documentation names as its fastest mode where memory holds them;
their longer side is at most 400 px, as in FFCV's ImageNet example. One loader serves all sizes: the size that its
decoder writes is set before each epoch, as that example does. benchmarks/loaders/ffcv.py says how to make an
interpreter for it; this one needs timm and torchvision, too.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from resolute.console import guard_process

    guard_process()

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ffcv.fields import IntField, RGBImageField
from ffcv.fields.basics import IntDecoder
from ffcv.fields.rgb_image import CenterCropRGBImageDecoder, RandomResizedCropRGBImageDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.transforms import NormalizeImage, RandomHorizontalFlip, Squeeze, ToTensor, ToTorchImage
from ffcv.writer import DatasetWriter
from PIL import Image

from resolute.machine import available_cpus

from .photos import CROP, MEAN, STD, class_files

__all__ = ["Epochs", "main", "write"]

_LONGER_SIDE_PX = 400
_PIECE = 16  # photos that a process of the writer takes at once; FFCV's default is 100


class _Photos:
    def __init__(self, folder: Path) -> None:
        self.files = class_files(folder)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, sample: int) -> tuple[Any, int]:
        path, label = self.files[int(sample)]
        with Image.open(path) as image:
            return image.convert("RGB"), label


def write(photos: Path, out: Path, *, workers: int) -> None:
    """Write `out`/train.beton and `out`/val.beton from `photos`/train/CLASS and `photos`/val/CLASS."""
    out.mkdir(parents=True, exist_ok=True)
    for split in ("train", "val"):
        fields = {"image": RGBImageField(write_mode="raw", max_resolution=_LONGER_SIDE_PX), "label": IntField()}
        writer = DatasetWriter(str(out / f"{split}.beton"), fields, num_workers=workers)
        writer.from_indexed_dataset(_Photos(photos / split), chunksize=_PIECE)


class Epochs:
    """The batches of each epoch of one split, at any size."""

    def __init__(self, path: Path, *, scale: Sequence[float] | None, batch_size: int, seed: int, workers: int) -> None:
        """`scale`: of random crops; None: the centre, in the order of the file."""
        trained = scale is not None
        self._decoder = (
            RandomResizedCropRGBImageDecoder((224, 224), scale=tuple(scale))
            if scale is not None
            else CenterCropRGBImageDecoder((224, 224), ratio=CROP)
        )
        flip = [RandomHorizontalFlip()] if trained else []
        normalise = NormalizeImage(255 * np.array(MEAN), 255 * np.array(STD), np.float32)
        self._loader = Loader(
            str(path),
            batch_size=batch_size,
            num_workers=workers,
            os_cache=True,
            seed=seed,
            drop_last=False,
            order=OrderOption.RANDOM if trained else OrderOption.SEQUENTIAL,
            pipelines={
                "image": [self._decoder, *flip, normalise, ToTensor(), ToTorchImage()],
                "label": [IntDecoder(), ToTensor(), Squeeze()],
            },
        )
        self.samples = len(self._loader.indices)

    def __len__(self) -> int:
        return len(self._loader)

    def epoch(self, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        self._decoder.output_size = (size, size)
        yield from self._loader


def main(argv: Sequence[str] | None = None) -> int:
    (path,) = sys.argv[1:] if argv is None else argv
    settings = json.loads(Path(path).read_text(encoding="utf-8"))
    write(Path(settings["photos"]), Path(settings["betons"]), workers=available_cpus())
    return 0


if __name__ == "__main__":
    from resolute.console import run_main

    run_main(main)
