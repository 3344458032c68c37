"""Builds the recipe's optimizer with timm's parameter groups, optionally wrapped in Lookahead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import timm.optim
import torch
from torch import nn

from train.recipe.schema import Optim

__all__ = ["Lookahead", "build_optimizer"]


def build_optimizer(optim: Optim, network: nn.Module) -> torch.optim.Optimizer:
    """SGD (Nesterov), AdamW or LAMB from timm's factory.

    Weight decay does not apply to vectors (norms, biases) or to the parameters listed by the model's
    `no_weight_decay()`, such as position embeddings, class tokens and relative position tables.
    """
    name: str = optim.name
    settings: dict[str, Any] = {"fused": optim.fused or None}  # None: torch's default; False is the slowest
    if name == "sgd":
        name = "sgd" if optim.momentum else "momentum"  # timm's "sgd" is Nesterov, which requires momentum
        settings["momentum"] = optim.momentum
    elif name == "adamw":
        settings["betas"] = optim.betas
    else:  # why None: `optim.clip_norm` does the clipping
        settings = {"betas": optim.betas, "max_grad_norm": None}
    optimizer: torch.optim.Optimizer = timm.optim.create_optimizer_v2(
        network, opt=name, lr=optim.lr, weight_decay=optim.weight_decay, param_group_fn=_groups(optim), **settings
    )
    return Lookahead(optimizer, alpha=optim.lookahead_alpha, k=optim.lookahead) if optim.lookahead else optimizer


def _groups(optim: Optim) -> Callable[[nn.Module], list[dict[str, Any]]]:
    """timm's parameter groups, the decayed one first, for compatibility with older checkpoints."""

    def groups(network: nn.Module) -> list[dict[str, Any]]:
        excluded: Any = getattr(network, "no_weight_decay", set)()
        return timm.optim.param_groups_weight_decay(network, optim.weight_decay, no_weight_decay_list=excluded)[::-1]

    return groups


class Lookahead(timm.optim.Lookahead):
    """Every k steps, the slow weights move towards the fast weights, which then continue from the slow ones.

    Unlike timm's, the slow weights start as the weights before the first step, as in the paper, not as those after k.
    Source: Zhang et al., arXiv 1907.08610, algorithm 1.
    """

    def __init__(self, base: torch.optim.Optimizer, *, alpha: float, k: int) -> None:
        super().__init__(base, alpha=alpha, k=k)
        self.state = base.state

    def step(self, closure: Any = None) -> Any:
        moved = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        starts = {p: p.detach().clone() for p in moved if "lookahead_slow_buff" not in self.state.get(p, ())}
        loss = self._base_optimizer.step(closure)
        for parameter, start in starts.items():  # why after the step: optimizers take existing state for their own
            self.state[parameter]["lookahead_slow_buff"] = start
        for group in self.param_groups:
            group["lookahead_step"] += 1
            if group["lookahead_step"] % group["lookahead_k"] == 0:
                self.update_slow(group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.state = self._base_optimizer.state
