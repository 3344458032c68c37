"""A plain PyTorch training with progressive sizes, for `resolute.benchmarks.whole`: what a user would write by hand.

    python -m resolute.benchmarks.whole.loop SETTINGS.json      # prints one line of JSON per epoch

One DataLoader with persistent workers serves all sizes: its sampler yields (sample, size) pairs, so a change of size
starts no worker. Photos are read from class folders and decoded by simplejpeg, large JPEGs at a fraction of their size.
Crops, flips and resizes are torchvision's, of uint8 tensors; batches are uint8 until the training process normalises
them. With `"tool": "ffcv"`, batches are those of `ffcv`. Of timm, only the network is used; of Resolute, only
what starts and ends the process.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from resolute.console import guard_process

    guard_process()

import contextlib
import io
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import timm
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler
from torchvision.transforms import InterpolationMode, v2

from resolute.benchmarks.loaders.on_device import normalised_on_device

from .photos import CROP, class_files

__all__ = ["main"]

_PREFETCH = 4


class _Photos(Dataset[tuple[torch.Tensor, int]]):
    """Photos of class folders; an item is (sample, size in px), its value (3, size, size) uint8 and the label."""

    def __init__(self, folder: Path, *, scale: Sequence[float] | None) -> None:
        """`scale`: of random crops; None: resize the short side to size / `CROP` and crop the centre."""
        self._files, self._scale = class_files(folder), scale
        self._transforms: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, item: tuple[int, int]) -> tuple[torch.Tensor, int]:
        sample, size = item
        path, label = self._files[sample]
        # why twice the size: a crop of the smallest scale is then enlarged as it would be anyway
        shortest = round(size / CROP) if self._scale is None else 2 * size
        return self._transform(size)(_decoded(Path(path), shortest)), label

    def _transform(self, size: int) -> Any:
        if size not in self._transforms:
            bilinear: dict[str, Any] = {"interpolation": InterpolationMode.BILINEAR, "antialias": True}
            if self._scale is None:
                steps: list[Any] = [v2.Resize(round(size / CROP), **bilinear), v2.CenterCrop(size)]
            else:
                steps = [v2.RandomResizedCrop(size, tuple(self._scale), **bilinear), v2.RandomHorizontalFlip()]
            self._transforms[size] = v2.Compose(steps)
        return self._transforms[size]


def _decoded(path: Path, shortest: int) -> torch.Tensor:
    """A photo as (3, height, width) uint8 in channels_last order; a JPEG whose sides are at least `shortest` px."""
    data = path.read_bytes()
    if data[:2] == b"\xff\xd8":
        with contextlib.suppress(ValueError):  # of another colour space
            pixels = simplejpeg.decode_jpeg(data, "RGB", min_height=shortest, min_width=shortest)
            return torch.from_numpy(pixels).permute(2, 0, 1)
    with Image.open(io.BytesIO(data)) as image:
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


class _Sized(Sampler[list[tuple[int, int]]]):
    """Batches of (sample, size); `size` is set before each epoch."""

    def __init__(self, samples: int, batch_size: int, *, seed: int | None) -> None:
        """`seed`: of the order; None: as listed."""
        self._samples, self._batch_size, self.size = samples, batch_size, 0
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return -(-self._samples // self._batch_size)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        order = (
            range(self._samples)
            if self._generator is None
            else torch.randperm(self._samples, generator=self._generator).tolist()
        )
        for first in range(0, self._samples, self._batch_size):
            yield [(sample, self.size) for sample in order[first : first + self._batch_size]]


class _Epochs:
    """The batches of each epoch of one split, at any size, from one DataLoader, on `device`; on a GPU of `dtype`."""

    def __init__(
        self,
        folder: Path,
        *,
        device: torch.device,
        dtype: torch.dtype,
        scale: Sequence[float] | None,
        batch_size: int,
        seed: int,
        workers: int,
    ) -> None:
        photos = _Photos(folder, scale=scale)
        self.samples, self._device, self._dtype = len(photos), device, dtype
        self._order = _Sized(len(photos), batch_size, seed=None if scale is None else seed)
        self._loader = DataLoader(
            photos,
            batch_sampler=self._order,
            num_workers=workers,
            persistent_workers=True,
            prefetch_factor=_PREFETCH,
            pin_memory=device.type != "cpu",
        )

    def __len__(self) -> int:
        return len(self._order)

    def epoch(self, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        self._order.size = size
        yield from normalised_on_device(self._loader, device=self._device, dtype=self._dtype)


def _sources(settings: dict[str, Any]) -> tuple[Any, Any]:
    """The training and the validation batches: `_Epochs`, or FFCV's."""
    options = {"seed": settings["seed"], "workers": settings["workers"]}
    train: dict[str, Any] = {"scale": settings["scale"], "batch_size": settings["batch_size"], **options}
    val: dict[str, Any] = {"scale": None, "batch_size": settings["eval_batch_size"], **options}
    if settings["tool"] != "ffcv":
        photos = Path(settings["photos"])
        common: dict[str, Any] = {
            "device": torch.device(settings["device"]),
            "dtype": torch.bfloat16 if settings["bf16"] and settings["device"] != "cpu" else torch.float32,
        }
        return _Epochs(photos / "train", **common, **train), _Epochs(photos / "val", **common, **val)
    from .ffcv import Epochs

    betons = Path(settings["betons"])
    return Epochs(betons / "train.beton", **train), Epochs(betons / "val.beton", **val)


def train(settings: dict[str, Any]) -> Iterator[dict[str, float]]:
    """{"start"} before the first step, in s since 1970; then {"epoch", "res", "loss", "top1", "unix_s"} of each epoch.

    `settings`: as `whole` writes them. Each epoch is validated at `eval_res` px.
    """
    torch.manual_seed(settings["seed"])
    torch.set_num_threads(settings["threads"])
    torch.backends.cudnn.benchmark = True
    device = torch.device(settings["device"])
    batches, held_out = _sources(settings)
    model: Any = timm.create_model(settings["model"], num_classes=settings["classes"], **settings["model_kwargs"])
    model = model.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(
        _groups(model, settings["weight_decay"]), lr=settings["lr"], momentum=0.9, nesterov=True
    )
    loss_of = nn.CrossEntropyLoss(label_smoothing=settings["label_smoothing"])
    sizes = [res for res, epochs in settings["stages"] for _ in range(epochs)]
    total, warm_up, step = len(sizes) * len(batches), settings["warmup_epochs"] * len(batches), 0
    for epoch, res in enumerate(sizes):
        model.train()
        losses = torch.zeros((), device=device)  # read once an epoch, so that the GPU is not waited for
        for images, labels in batches.epoch(res):
            if not step:
                yield {"start": time.time()}
            lr = settings["lr"] * (
                0.1 + 0.9 * step / warm_up if step < warm_up else 0.5 * (1 + math.cos(math.pi * step / total))
            )
            for group in optimizer.param_groups:
                group["lr"] = lr
            with torch.autocast(device.type, torch.bfloat16, enabled=settings["bf16"]):
                loss = loss_of(model(images.contiguous(memory_format=torch.channels_last)), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses += loss.detach()
            step += 1
        model.eval()
        right = torch.zeros((), dtype=torch.int64, device=device)
        with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, enabled=settings["bf16"]):
            for images, labels in held_out.epoch(settings["eval_res"]):
                right += (model(images.contiguous(memory_format=torch.channels_last)).argmax(1) == labels).sum()
        yield {
            "epoch": epoch,
            "res": res,
            "loss": float(losses) / len(batches),
            "top1": int(right) / held_out.samples,
            "unix_s": time.time(),
        }


def _groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Weight decay for matrices and kernels alone, as timm and Resolute do."""
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def main(argv: Sequence[str] | None = None) -> int:
    (path,) = sys.argv[1:] if argv is None else argv
    for epoch in train(json.loads(Path(path).read_text(encoding="utf-8"))):
        print(json.dumps(epoch), flush=True)
    return 0


if __name__ == "__main__":
    from resolute.console import run_main

    run_main(main)
