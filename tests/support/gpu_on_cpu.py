"""The loader's GPU path on a machine without a GPU: the very graph for a GPU, with CPU kernels of the same operators.

`ApplySlotOnCpu` and `FinishOnCpu` stand in for Triton's kernels, which `interpreted_kernels.py` tests by themselves.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from nvidia.dali import fn
from nvidia.dali.data_node import DataNode

from resolute.pipeline.graph import batch_pipeline, gpu_augment
from resolute.pipeline.graph.kernels import augment as pixels
from resolute.pipeline.loader.loader import Loader
from resolute.pipeline.plan.augment_params import CUTMIX, MIXUP, NOISE_PX
from resolute.pipeline.plan.autoaugment import VALUES
from resolute.pipeline.plan.plan import Plan
from resolute.pipeline.plan.rows import KINDS, row_dtype
from tests.support.fake_cuda import FakeCuda

__all__ = ["GpuLoader", "differences"]

CPU = torch.device("cpu")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class FinishOnCpu:
    """Does what the docstring of the kernel `finish` says, with torch's operations."""

    def __getitem__(self, grid: Any) -> Any:
        return self._launch

    def _launch(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        stored_as: torch.Tensor,
        noise: torch.Tensor,
        fill: torch.Tensor,
        scales: torch.Tensor,
        words: int,
        side: int,
        blocks: int,
        *,
        ERASES: bool,
        MIXES: bool,
        **options: Any,
    ) -> None:
        assert tuple(stored_as.shape) == (len(source), words) or not (ERASES or MIXES)
        images = source.clone()
        rows: Any = stored_as.numpy().view(row_dtype((words - KINDS) // (1 + VALUES)))[:, 0] if ERASES or MIXES else []
        for image, row in zip(images, rows if ERASES else [], strict=False):
            (x, y, w, h), (top, left) = row["erase"].tolist(), row["origin"].tolist()
            lines, columns = (top + torch.arange(h)) % NOISE_PX, (left + torch.arange(w)) % NOISE_PX
            patch = fill.to(torch.uint8).expand(h, w, 3) if top < 0 else noise[lines][:, columns]
            image[y : y + h, x : x + w] = patch
        mixed = images.clone()
        for i, row in enumerate(rows if MIXES else []):
            partner, (x, y, w, h) = int(row["partner"]), row["box"].tolist()
            if row["mode"] == MIXUP:
                lam = torch.tensor(row["lam"])
                mixed[i] = (images[i] * lam + images[partner] * (1 - lam) + 0.5).to(torch.uint8)
            elif row["mode"] == CUTMIX:
                mixed[i, y : y + h, x : x + w] = images[partner, y : y + h, x : x + w]
        target.copy_(mixed if target.dtype == torch.uint8 else mixed * scales[:3] + scales[3:])


class ApplySlotOnCpu:
    """Does what the kernel `apply_slot` does: the operation of a slot, with the CPU's compiled function."""

    def __getitem__(self, grid: Any) -> Any:
        return self._launch

    def _launch(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        stored_as: torch.Tensor,
        slot: int,
        slots: int,
        words: int,
        *others: int,
        **options: Any,
    ) -> None:
        assert tuple(stored_as.shape) == (len(source), words)
        rows: Any = stored_as.numpy().view(row_dtype(slots))[:, 0]
        images = source.numpy().copy()
        for image, row in zip(images, rows, strict=True):
            pixels.apply_ops(image, row["kinds"][slot : slot + 1].copy(), row["values"][slot : slot + 1].copy())
        target.copy_(torch.from_numpy(images))


class GpuLoader(Loader):
    """`Loader(plan, device="cuda")` whose data stays on the CPU: what would go to a GPU is left where it is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, plan: Plan, *, device: str = "cuda", **options: Any) -> None:
        monkeypatch.setattr(gpu_augment, "finish", FinishOnCpu())
        monkeypatch.setattr(gpu_augment, "apply_slot", ApplySlotOnCpu())
        define, decode, kernels = batch_pipeline._graph, fn.decoders.image, gpu_augment.GpuAugment

        def on_cpu(*, device_id: int, **keys: Any) -> Any:
            return define(device_id=None, **keys)

        with monkeypatch.context() as patch:
            FakeCuda().install(patch)
            patch.setattr(DataNode, "gpu", lambda node: node)
            patch.setattr(fn.decoders, "image", lambda jpegs, **keys: decode(jpegs, **keys | {"device": "cpu"}))
            patch.setattr(batch_pipeline, "_graph", on_cpu)
            patch.setattr(gpu_augment, "GpuAugment", lambda *args, **keys: kernels(*args, **keys | {"device": CPU}))
            super().__init__(plan, device=device, mean=MEAN, std=STD, **options)
        self.device = CPU


def differences(on_cpu: Loader, on_gpu: Loader) -> list[str]:
    """Compare all batches of two loaders of one plan; one line "what: ..." per difference.

    Decoders and resizes round differently: the images of a batch may differ by 1 level (of 255) in the mean, and
    by 4 for 99 % of the values; everything else has to be equal.
    """
    lines: list[str] = []
    for index, (expected, got) in enumerate(itertools.zip_longest(on_cpu, on_gpu)):
        if expected is None or got is None:
            return [*lines, f"number of batches: {index} of one of them"]
        for name in ("index", "split", "epoch", "stage", "res"):
            if getattr(got.spec, name) != getattr(expected.spec, name):
                lines.append(f"order: {name} of batch {index}")
        for name in ("labels", "partner_labels", "lam"):
            if not torch.equal(getattr(got, name), getattr(expected, name)):
                lines.append(f"{name}: batch {index}")
        if not got.images.is_contiguous(memory_format=torch.channels_last):
            lines.append(f"layout: batch {index}")
        if got.images.shape != expected.images.shape:
            lines.append(f"shape: batch {index}, got {tuple(got.images.shape)}")
            continue
        error = (got.images.float() - expected.images).abs() * 0.226 * 255
        if error.mean() >= 1 or error.flatten().quantile(0.99) >= 4:
            lines.append(f"pixels: batch {index}, mean {error.mean():.2f}, {error.flatten().quantile(0.99):.1f}")
    return lines
