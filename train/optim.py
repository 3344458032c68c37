"""How do the weights move? The optimizer, and the slow weights around it."""

from __future__ import annotations

from typing import Any

import timm.optim
import torch
from torch import nn

from pipeline.recipe import Optim

__all__ = ["Lookahead", "build_optimizer"]


def build_optimizer(optim: Optim, network: nn.Module) -> torch.optim.Optimizer:
    """SGD (Nesterov), AdamW or LAMB; no weight decay on norms, biases and other vectors."""
    weights = [p for p in network.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in network.parameters() if p.requires_grad and p.ndim < 2]
    groups = [{"params": weights, "weight_decay": optim.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    fused = optim.fused or None  # why: None leaves torch its own choice, False takes the slowest
    found: torch.optim.Optimizer
    if optim.name == "sgd":
        nesterov = optim.momentum > 0
        found = torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum, nesterov=nesterov, fused=fused)
    elif optim.name == "adamw":
        found = torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, fused=fused)
    else:  # why None: clipping is `optim.clip_norm`'s
        found = timm.optim.Lamb(groups, lr=optim.lr, betas=optim.betas, max_grad_norm=None)
    return Lookahead(found, alpha=optim.lookahead_alpha, k=optim.lookahead) if optim.lookahead else found


class Lookahead(timm.optim.Lookahead):
    """Every k steps the slow weights go a part of the way to the fast ones, which go on from there.

    timm's, but slow weights start as those before a weight's first step, as in the paper, not as those after k.
    Source: Zhang et al., arXiv 1907.08610, algorithm 1.
    """

    def __init__(self, base: torch.optim.Optimizer, *, alpha: float, k: int) -> None:
        super().__init__(base, alpha=alpha, k=k)
        self.state = base.state

    def step(self, closure: Any = None) -> Any:
        moved = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        starts = {p: p.detach().clone() for p in moved if "lookahead_slow_buff" not in self.state.get(p, ())}
        loss = self._base_optimizer.step(closure)
        for parameter, start in starts.items():  # why after: an optimizer takes any state it finds for its own
            self.state[parameter]["lookahead_slow_buff"] = start
        for group in self.param_groups:
            group["lookahead_step"] += 1
            if group["lookahead_step"] % group["lookahead_k"] == 0:
                self.update_slow(group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.state = self._base_optimizer.state
