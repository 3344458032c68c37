"""Replaces batch norms by synchronised, ghost or group norms with unchanged parameter names."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from timm.layers import BatchNormAct2d, GroupNormAct, convert_sync_batchnorm
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from resolute.errors import ResoluteError
from resolute.train.recipe.schema import Model

__all__ = ["GhostBatchNorm", "batch_norms", "set_norms", "statistics_kept"]


def batch_norms(network: nn.Module) -> list[_BatchNorm]:
    return [module for module in network.modules() if isinstance(module, _BatchNorm)]


def set_norms(network: nn.Module, model: Model, *, ranks: int, device: torch.device) -> nn.Module:
    """`network` with the recipe's norms. Raises `ResoluteError` if the setting has no effect on it."""
    if model.norm == "batch" and model.bn_momentum is None:
        return network
    if not batch_norms(network):
        raise ResoluteError(f"model.norm: {model.name} has no batch norms, got a setting for them; remove it")
    if model.norm == "sync" and ranks > 1:  # with one rank, batch norms give the same
        if device.type != "cuda":
            raise ResoluteError(
                f"model.norm: got sync with {ranks} processes on {device.type}, expected GPUs; use batch or ghost"
            )
        network = convert_sync_batchnorm(network)
    elif model.norm == "ghost":
        _replace(network, lambda norm: GhostBatchNorm(norm, model.ghost_batch))
    elif model.norm == "group":
        _replace(network, lambda norm: _group_norm(norm, model.norm_groups))
    for norm in batch_norms(network):
        norm.momentum = norm.momentum if model.bn_momentum is None else model.bn_momentum
    return network


class GhostBatchNorm(BatchNormAct2d):
    """Batch norm that normalises groups of at least `size` samples in training; each group updates the statistics.

    Source: Hoffer et al., arXiv 1705.08741, algorithm 1. timm's SplitBatchNorm2d differs: it has separate weights per
    group and requires batches that the groups divide.
    """

    def __init__(self, norm: nn.BatchNorm2d, size: int) -> None:
        super().__init__(norm.num_features, eps=norm.eps, apply_act=False)
        self.momentum = norm.momentum
        self.load_state_dict(norm.state_dict())
        self.size, self.drop, self.act = size, getattr(norm, "drop", self.drop), getattr(norm, "act", self.act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(x)
        return torch.cat([BatchNormAct2d.forward(self, part) for part in x.tensor_split(max(1, len(x) // self.size))])


def _group_norm(norm: nn.BatchNorm2d, groups: int) -> nn.Module:
    """Source: Wu and He, arXiv 1803.08494."""
    group_norm = GroupNormAct(norm.num_features, math.gcd(groups, norm.num_features), eps=norm.eps, apply_act=False)
    group_norm.load_state_dict({"weight": norm.weight, "bias": norm.bias})
    group_norm.drop, group_norm.act = getattr(norm, "drop", group_norm.drop), getattr(norm, "act", group_norm.act)
    return group_norm


def _replace(network: nn.Module, make: Callable[[Any], nn.Module]) -> None:
    for name, child in network.named_children():
        if isinstance(child, nn.BatchNorm2d):
            setattr(network, name, make(child))
        else:
            _replace(child, make)


@contextlib.contextmanager
def statistics_kept(norms: Sequence[_BatchNorm]) -> Iterator[None]:
    """Keep the running statistics fixed, around a backward pass that recomputes blocks (gradient checkpointing)."""
    before = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, momentum, count in before:
            norm.momentum, norm.num_batches_tracked = momentum, count
