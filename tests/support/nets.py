"""Tiny networks of timm's, and images for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from train.models import build_model
from train.recipe.schema import Model

CPU = torch.device("cpu")


def net(name: str = "test_resnet", *, classes: int = 7, device: torch.device = CPU, **keys: Any) -> nn.Module:
    torch.manual_seed(0)
    return build_model(Model(name=name, **keys), classes=classes, channels_last=True, device=device)


def some_images(n: int = 8) -> torch.Tensor:
    return torch.randn(n, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def saved(network: nn.Module, path: Path) -> Path:
    save_file({name: value.contiguous() for name, value in network.state_dict().items()}, path)
    return path


def names_of(network: nn.Module) -> list[str]:
    return list(network.state_dict())
