"""Which network is trained, and which average of its weights is kept?"""

from __future__ import annotations

import timm
import torch
from timm.utils import ModelEmaV3
from torch import nn

from pipeline.errors import ResoluteError
from pipeline.recipe import Ema, Model

__all__ = ["build_ema", "build_model"]


def build_model(model: Model, *, classes: int, channels_last: bool, device: torch.device) -> nn.Module:
    """A timm model with `classes` outputs on `device`. Raises `ResoluteError` for a name or option timm refuses."""
    try:
        network: nn.Module = timm.create_model(model.name, num_classes=classes, **model.options)
    except (RuntimeError, TypeError, ValueError) as error:
        known = timm.list_models(f"*{model.name[:6]}*")[:5]
        raise ResoluteError(
            f"model: timm cannot build {model.name!r} with {model.options}: {error}; "
            f"expected a timm model (near: {', '.join(known) or 'none'}); see timm.list_models()"
        ) from None
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    return network.to(device=device, memory_format=memory_format)  # type: ignore[call-overload]


def build_ema(ema: Ema, network: nn.Module) -> ModelEmaV3 | None:
    """timm's moving average of weights and statistics, or None where the recipe has it off."""
    return ModelEmaV3(network, decay=ema.decay, use_warmup=ema.warmup) if ema.decay else None
