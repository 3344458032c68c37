"""Gradient processing between the backward pass and the optimizer step: centralisation, layer scaling, clipping."""

from __future__ import annotations

from collections.abc import Callable

import torch
from timm.utils import dispatch_clip_grad
from torch import nn

from train.recipe.schema import Optim

from .models import head_parameters

__all__ = ["build_shaping", "centralise", "scale_layers"]


def build_shaping(optim: Optim, network: nn.Module) -> Callable[[], None] | None:
    """A function that applies the recipe's processing to the unscaled gradients of `network` in place, or None."""
    bounds = {"norm": optim.clip_norm, "value": optim.clip_value, "agc": optim.clip_agc}
    clips = [(mode, bound) for mode, bound in bounds.items() if bound]
    weights = _body(network) if optim.clip_agc else list(network.parameters())

    def shape() -> None:
        if optim.gradient_centralization:
            centralise(network)
        if optim.layer_norm_grads:
            scale_layers(network)
        for mode, bound in clips:
            dispatch_clip_grad(weights, bound, mode)

    return shape if clips or optim.gradient_centralization or optim.layer_norm_grads else None


@torch.no_grad()
def centralise(network: nn.Module) -> None:
    """Subtract the mean of each output unit's gradient. Source: Yong et al., arXiv 2004.01461, equation 1."""
    for parameter in network.parameters():
        if parameter.grad is not None and parameter.ndim > 1:
            parameter.grad -= parameter.grad.mean(dim=tuple(range(1, parameter.ndim)), keepdim=True)


@torch.no_grad()
def scale_layers(network: nn.Module) -> None:
    """Divide each layer's gradient by its L2 norm. Source: Yu et al., arXiv 1707.04822, block-normalized gradient."""
    for module in network.modules():
        grads = [p.grad for p in module.parameters(recurse=False) if p.grad is not None]
        if grads:
            norm = nn.utils.get_total_norm(grads).clamp(min=1e-12)
            for grad in grads:
                grad /= norm


def _body(network: nn.Module) -> list[nn.Parameter]:
    """All weights except the classifier's. Source: Brock et al., arXiv 2102.06171, section 4.1."""
    head = head_parameters(network)
    return [p for name, p in network.named_parameters() if name not in head]
