"""How do the weights move? Optimizer, one OneCycle over the whole run, and the loss of mixed labels."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from pipeline.recipe import Optim, Schedule

__all__ = ["OneCycle", "build_optimizer", "mixed_cross_entropy"]


def build_optimizer(optim: Optim, network: nn.Module) -> torch.optim.Optimizer:
    """SGD (Nesterov) or AdamW; no weight decay on norms, biases and other vectors."""
    weights = [p for p in network.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in network.parameters() if p.requires_grad and p.ndim < 2]
    groups = [{"params": weights, "weight_decay": optim.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    if optim.name == "sgd":
        return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum, nesterov=optim.momentum > 0)
    return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas)


class OneCycle:
    """Learning rate and momentum as a pure function of the step: nothing to save, exact at any resume.

    Source: Smith and Topin, arXiv 1708.07120, in the cosine form of torch.optim.lr_scheduler.OneCycleLR.
    """

    def __init__(self, schedule: Schedule, optim: Optim, *, total_steps: int) -> None:
        self._peak, self._first = optim.lr, optim.lr / schedule.start_div
        self._last = self._first / schedule.final_div
        self._high = optim.momentum if optim.name == "sgd" else optim.betas[0]
        self._low = min(schedule.momentum_low, self._high)
        self._rise = max(1.0, schedule.warmup_frac * total_steps - 1)
        self._fall = max(1.0, total_steps - 1 - self._rise)

    def at(self, step: int) -> tuple[float, float]:
        """(learning rate before `lr_scale`, momentum) of optimizer step `step`, 0-based."""
        if step <= self._rise:
            done = step / self._rise
            return _cosine(self._first, self._peak, done), _cosine(self._high, self._low, done)
        done = min(1.0, (step - self._rise) / self._fall)
        return _cosine(self._peak, self._last, done), _cosine(self._low, self._high, done)

    def apply(self, optimizer: torch.optim.Optimizer, step: int, *, lr_scale: float) -> float:
        """Set every group for `step`; returns the learning rate."""
        lr, momentum = self.at(step)
        for group in optimizer.param_groups:
            group["lr"] = lr * lr_scale
            if "betas" in group:
                group["betas"] = (momentum, group["betas"][1])
            elif group["momentum"]:
                group["momentum"] = momentum
        return lr * lr_scale


def _cosine(start: float, end: float, done: float) -> float:
    return end + (start - end) / 2.0 * (1.0 + math.cos(math.pi * done))


def mixed_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, partner_labels: torch.Tensor, lam: torch.Tensor, *, smoothing: float
) -> torch.Tensor:
    """Cross-entropy (N,) float32 against lam * label + (1 - lam) * partner's label, smoothed.

    Linear in the target, so two hard-label terms equal one soft-label term. `logits` (N, C), labels (N,) int64,
    `lam` (N,) float32. Source: Zhang et al., arXiv 1710.09412; Szegedy et al., arXiv 1512.00567.
    """
    logits = logits.float()
    own = functional.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
    other = functional.cross_entropy(logits, partner_labels, reduction="none", label_smoothing=smoothing)
    return lam * own + (1.0 - lam) * other
