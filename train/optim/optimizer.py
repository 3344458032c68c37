"""The recipe's optimizer, from timm's factory, and what happens to the gradients before its step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import timm.optim
import torch
from timm.utils import dispatch_clip_grad
from torch import nn

from resolute.errors import ResoluteError
from resolute.train.model.build import head_parameters
from resolute.train.recipe.schema import Optim

from .muon import replace_emulated_bf16

__all__ = ["Lookahead", "build_gradient_steps", "build_optimizer"]


def build_optimizer(optim: Optim, network: nn.Module) -> torch.optim.Optimizer:
    """The optimizer `optim.name` of timm's registry with timm's parameter groups, wrapped in Lookahead if on.

    Weight decay does not apply to vectors (norms, biases) or to the parameters listed by the model's
    `no_weight_decay()`, such as position embeddings, class tokens and relative position tables. With
    `optim.layer_decay` or `head_lr_scale`, groups have an `lr_scale`, which `Rates.apply` reads. Raises `ResoluteError`
    for an optimizer that cannot be built or whose momentum cannot be scheduled, and for a model without layers for
    `layer_decay` or without head for `head_lr_scale`.
    """
    # why "momentum": timm's "sgd" is Nesterov's, which requires momentum
    name = "momentum" if optim.name == "sgd" and not optim.momentum else optim.name
    replace_emulated_bf16()
    info = timm.optim.get_optimizer_info(name)
    if info.second_order or (info.has_betas and info.num_betas != 2):
        raise _unusable(optim, "second-order, or more than two betas")
    settings: dict[str, Any] = {"betas": optim.betas} if info.has_betas else {}
    try:
        accepted = inspect.signature(timm.optim.get_optimizer_class(name, bind_defaults=False)).parameters
        if "fused" in accepted:
            on_gpu = any(parameter.is_cuda for parameter in network.parameters())
            settings["fused"] = optim.fused or on_gpu or None  # None: torch's default; False is the slowest
        if "max_grad_norm" in accepted:
            settings["max_grad_norm"] = None  # why: `optim.clip_norm`, whose default is the optimizer's, does it
        optimizer: torch.optim.Optimizer = timm.optim.create_optimizer_v2(
            network,
            opt=name,
            lr=optim.lr,
            weight_decay=optim.weight_decay,
            momentum=optim.momentum,
            layer_decay=optim.layer_decay,
            **settings,
        )
    except (ImportError, AssertionError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise _unusable(optim, (str(error) or type(error).__name__).splitlines()[0][:160]) from None
    if not all("momentum" in group or "betas" in group for group in optimizer.param_groups):
        raise _unusable(optim, "no momentum or betas")
    if optim.head_lr_scale != 1.0:
        _scale_head(optimizer, network, optim.head_lr_scale)
    return Lookahead(optimizer, alpha=optim.lookahead_alpha, k=optim.lookahead) if optim.lookahead else optimizer


def _scale_head(optimizer: torch.optim.Optimizer, network: nn.Module, scale: float) -> None:
    """Give the parameters of the head groups of their own, whose `lr_scale` is `scale` times as large."""
    names = set(head_parameters(network))
    if not names:
        raise ResoluteError(f"optim.head_lr_scale: without effect, got {scale:g} for a model without head; remove it")
    head = {id(parameter) for name, parameter in network.named_parameters() if name in names}
    parts: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        others = [parameter for parameter in group["params"] if id(parameter) not in head]
        own = [parameter for parameter in group["params"] if id(parameter) in head]
        parts += [{**group, "params": others}] if others else []
        parts += [{**group, "params": own, "lr_scale": scale * group.get("lr_scale", 1.0)}] if own else []
    optimizer.param_groups[:] = parts


def _unusable(optim: Optim, reason: str) -> ResoluteError:
    layers = " and a model with layers for optim.layer_decay" if optim.layer_decay else ""
    return ResoluteError(
        f"optim.name: got {optim.name} ({reason}), expected an installed optimizer with momentum or two betas{layers}; "
        "choose another"
    )


class Lookahead(timm.optim.Lookahead):
    """Every k steps, the slow weights move towards the fast weights, which then continue from the slow ones.

    timm's: the slow weights start as the fast ones at the first `sync_lookahead` or after k steps.
    Source: Zhang et al., arXiv 1907.08610, algorithm 1.
    """

    @property
    def state(self) -> Any:
        """The base optimizer's, which holds the slow weights, too; timm has an empty one."""
        return self._base_optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        pass


def build_gradient_steps(optim: Optim, network: nn.Module) -> Callable[[], None] | None:
    """A function that changes the unscaled gradients of `network` in place before the optimizer's step, or None.

    In this order: centralisation, normalisation per layer, clipping.
    """
    bounds = {"norm": optim.clip_norm, "value": optim.clip_value, "agc": optim.clip_agc}
    clips = [(mode, bound) for mode, bound in bounds.items() if bound]
    # why without the head: Brock et al., arXiv 2102.06171, section 4.1
    head = set(head_parameters(network)) if optim.clip_agc else set()
    weights = [parameter for name, parameter in network.named_parameters() if name not in head]
    layers = [own for module in network.modules() if (own := [*module.parameters(recurse=False)])]

    def steps() -> None:
        if optim.gradient_centralization:
            _centralise(network)
        if optim.gradient_normalization:
            _normalise(layers)
        for mode, bound in clips:
            dispatch_clip_grad(weights, bound, mode)

    return steps if clips or optim.gradient_centralization or optim.gradient_normalization else None


@torch.no_grad()
def _centralise(network: nn.Module) -> None:
    """Subtract the mean of each output unit's gradient. Source: Yong et al., arXiv 2004.01461, equation 1."""
    for parameter in network.parameters():
        if parameter.grad is not None and parameter.ndim > 1:
            parameter.grad -= parameter.grad.mean(dim=tuple(range(1, parameter.ndim)), keepdim=True)


@torch.no_grad()
def _normalise(layers: Sequence[Sequence[nn.Parameter]]) -> None:
    """Divide the gradient of each layer, the parameters of one module, by its L2 norm; one of zeros stays.

    Source: Yu et al., arXiv 1707.04822, algorithm 1.
    """
    for layer in layers:
        gradients = [parameter.grad for parameter in layer if parameter.grad is not None]
        if gradients:
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
            torch._foreach_div_(gradients, norm.clamp(min=torch.finfo(norm.dtype).tiny))
