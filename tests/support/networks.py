"""Tiny timm networks, and images and batches for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from resolute.pipeline.loader.batch import Batch
from resolute.train.model.build import build_model
from resolute.train.recipe.schema import Model
from tests.support.batch_spec import batch_spec

CPU = torch.device("cpu")


def tiny_network(
    name: str = "test_resnet", *, classes: int = 7, names: Sequence[str] = (), device: torch.device = CPU, **keys: Any
) -> nn.Module:
    torch.manual_seed(0)
    return build_model(Model(name=name, **keys), classes=classes, names=names, channels_last=True, device=device)


def random_images(n: int = 8) -> torch.Tensor:
    return torch.randn(n, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def make_batch(
    index: int = 0, n: int = 8, split: Any = "train", *, last: bool = False, stage: int = 0, classes: int = 7
) -> Batch:
    """Batch `index` of a run whose stages have one epoch each: n random images of 32 px, mixed with weight 0.7."""
    generator = torch.Generator().manual_seed(index)
    labels = torch.randint(0, classes, (n,), generator=generator)
    spec = batch_spec(
        n,
        res=32,
        index=index,
        step=index,
        split=split,
        stage=stage,
        epoch=stage,
        last=last,
        partner=np.arange(n),
    )
    images = torch.randn(n, 3, 32, 32, generator=generator).to(memory_format=torch.channels_last)
    return Batch(
        images=images,
        targets=labels,
        partner_labels=labels.flip(0),
        lam=torch.full((n,), 0.7),
        keys=np.arange(n),
        spec=spec,
    )


def save_weights(network: nn.Module, path: Path) -> Path:
    save_file({name: value.contiguous() for name, value in network.state_dict().items()}, path)
    return path


def names_of(network: nn.Module) -> list[str]:
    return list(network.state_dict())
