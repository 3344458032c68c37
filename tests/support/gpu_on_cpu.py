"""The loader's GPU path on a machine without a GPU: the very graph for a GPU, with CPU kernels of the same operators.

Triton's kernels take part only in a process with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from nvidia.dali import fn
from nvidia.dali.data_node import DataNode

from resolute.pipeline.graph import gpu_augment, graph
from resolute.pipeline.loader.loader import Loader
from resolute.pipeline.plan.plan import Plan
from tests.support.fake_cuda import FakeCuda

__all__ = ["GpuLoader", "differences"]

CPU = torch.device("cpu")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class GpuLoader(Loader):
    """`Loader(plan, device="cuda")` whose data stays on the CPU: what would go to a GPU is left where it is.

    driver        the machine with GPUs, if not one with a single GPU
    graph_device  the device number that the loader gave to its graph
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, plan: Plan, *, device: str = "cuda", driver: FakeCuda | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        define, decode, kernels = graph._graph, fn.decoders.image, gpu_augment.GpuAugment

        def on_cpu(*, device_id: int, **keys: Any) -> Any:
            self.graph_device = device_id
            return define(device_id=None, **keys)

        with monkeypatch.context() as patch:
            (driver or FakeCuda()).install(patch)
            patch.setattr(DataNode, "gpu", lambda node: node)
            patch.setattr(fn.decoders, "image", lambda jpegs, **keys: decode(jpegs, **keys | {"device": "cpu"}))
            patch.setattr(graph, "_graph", on_cpu)
            patch.setattr(gpu_augment, "GpuAugment", lambda *args, **keys: kernels(*args, **keys | {"device": CPU}))
            super().__init__(plan, device=device, mean=MEAN, std=STD, **options)
        self.device = CPU


def differences(on_cpu: Loader, on_gpu: Loader, *, mean: float = 1.0, high: float = 4.0) -> list[str]:
    """Compare all batches of two loaders of one plan; one line "what: ..." per difference.

    Decoders and resizes round differently: the images of a batch may differ by `mean` levels (of 255) in the mean, and
    `high` for 99 % of the values; everything else has to be equal.
    """
    lines, none = [], None
    for index, (expected, got) in enumerate(itertools.zip_longest(on_cpu, on_gpu, fillvalue=none)):
        if expected is none or got is none:
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
        if error.mean() >= mean or error.flatten().quantile(0.99) >= high:
            lines.append(f"pixels: batch {index}, mean {error.mean():.2f}, {error.flatten().quantile(0.99):.1f}")
    return lines
