"""A plain PyTorch training with progressive sizes, for `resolute.benchmarks.whole`: what a user would write by hand.

    python -m resolute.benchmarks.whole_loop SETTINGS.json      # prints one line of JSON per epoch

One DataLoader with persistent workers serves all sizes: its sampler yields (sample, size) pairs, so a change of size
starts no worker. Photos are read from class folders and decoded with Pillow, whose `draft` mode decodes large JPEGs at
a fraction of their size. With `"tool": "plain-stored"`, they were resized once for each size, and torchvision decodes
them, as tensors. Crops, flips and normalisation are torchvision's; on a GPU, which gets uint8, it normalises. With
`"tool": "ffcv"`, batches are those of `whole_ffcv`. Of timm, only the network is used; of Resolute, only what starts
and ends the process.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from resolute.console import guard_process

    guard_process()

import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler
from torchvision import transforms
from torchvision.io import ImageReadMode, read_image
from torchvision.transforms import InterpolationMode, v2

from .class_folders import CROP, MEAN, STD, class_files
from .loaders.on_device import normalised_on_device

__all__ = ["main"]

_PREFETCH = 4


class _Photos(Dataset[tuple[torch.Tensor, int]]):
    """Photos of class folders; an item is (sample, size in px)."""

    def __init__(
        self, folder: Path, split: str, *, sizes: Sequence[int], scale: Sequence[float] | None, as_bytes: bool
    ) -> None:
        """Photos of `folder`/SPLIT; with `sizes` in px, of `folder`/PX/SPLIT, where they have been resized.

        scale: of random crops; None: resize the short side to size / `CROP` and crop the centre. as_bytes: uint8.
        """
        self._files = {size: class_files(folder / str(size) / split) for size in sizes}
        self._unsized = [] if sizes else class_files(folder / split)
        self._scale, self._as_bytes = scale, as_bytes
        self._transforms: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(next(iter(self._files.values()), self._unsized))

    def __getitem__(self, item: tuple[int, int]) -> tuple[torch.Tensor, int]:
        sample, size = item
        if self._files:
            path, label = self._files[size][sample]
            return self._transform(size)(read_image(path, ImageReadMode.RGB)), label
        path, label = self._unsized[sample]
        with Image.open(path) as image:
            # draft keeps at least this size; a crop of the smallest scale is then enlarged as it would be anyway
            shortest = round(size / CROP) if self._scale is None else 2 * size
            image.draft("RGB", (shortest, shortest))
            return self._transform(size)(image.convert("RGB")), label

    def _transform(self, size: int) -> Any:
        if size not in self._transforms:
            shape: list[Any] = (
                [transforms.Resize(round(size / CROP), InterpolationMode.BILINEAR), transforms.CenterCrop(size)]
                if self._scale is None
                else [
                    transforms.RandomResizedCrop(size, self._scale, interpolation=InterpolationMode.BILINEAR),
                    transforms.RandomHorizontalFlip(),
                ]
            )
            if self._files:
                finish: list[Any] = [] if self._as_bytes else [v2.ToDtype(torch.float32, scale=True)]
            else:
                finish = [transforms.PILToTensor() if self._as_bytes else transforms.ToTensor()]
            if not self._as_bytes:
                finish.append(transforms.Normalize(MEAN, STD))
            self._transforms[size] = transforms.Compose([*shape, *finish])
        return self._transforms[size]


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
        split: str,
        *,
        sizes: Sequence[int],
        device: torch.device,
        dtype: torch.dtype,
        scale: Sequence[float] | None,
        batch_size: int,
        seed: int,
        workers: int,
    ) -> None:
        photos = _Photos(folder, split, sizes=sizes, scale=scale, as_bytes=device.type != "cpu")
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
        if self._device.type == "cpu":
            yield from self._loader
        else:
            yield from normalised_on_device(self._loader, device=self._device, dtype=self._dtype)


def _sources(settings: dict[str, Any]) -> tuple[Any, Any]:
    """The training and the validation batches: `_Epochs`, or FFCV's."""
    options = {"seed": settings["seed"], "workers": settings["workers"]}
    train: dict[str, Any] = {"scale": settings["scale"], "batch_size": settings["batch_size"], **options}
    val: dict[str, Any] = {"scale": None, "batch_size": settings["eval_batch_size"], **options}
    if settings["tool"] != "ffcv":
        photos, stored = Path(settings["photos"]), settings["tool"] == "plain-stored"
        common: dict[str, Any] = {
            "sizes": sorted({res for res, _ in settings["stages"]}) if stored else [],
            "device": torch.device(settings["device"]),
            "dtype": torch.bfloat16 if settings["bf16"] else torch.float32,
        }
        return _Epochs(photos, "train", **common, **train), _Epochs(photos, "val", **common, **val)
    from .whole_ffcv import Epochs

    betons = Path(settings["betons"])
    return Epochs(betons / "train.beton", **train), Epochs(betons / "val.beton", **val)


def train(settings: dict[str, Any]) -> Iterator[dict[str, float]]:
    """{"epoch", "res", "loss", "top1", "unix_s"} of each epoch. `settings`: as `whole` writes them."""
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
            for images, labels in held_out.epoch(res):
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
