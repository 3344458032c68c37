"""Classification losses per sample for mixed (mixup, cutmix) and smoothed labels."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.nn import functional

from train.recipe.schema import Loss

__all__ = ["build_loss", "mixed_binary_cross_entropy", "mixed_cross_entropy"]


def build_loss(loss: Loss) -> Callable[..., torch.Tensor]:
    """A function loss(logits, labels, partner_labels, lam) -> (N,) float32 per sample; shapes as below."""
    smoothing = loss.label_smoothing
    if loss.kind == "ce":
        return functools.partial(mixed_cross_entropy, smoothing=smoothing)
    return functools.partial(
        mixed_binary_cross_entropy, smoothing=smoothing, threshold=loss.threshold, sum_classes=loss.sum_classes
    )


def mixed_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, partner_labels: torch.Tensor, lam: torch.Tensor, *, smoothing: float
) -> torch.Tensor:
    """Cross-entropy (N,) float32 against the smoothed target lam * label + (1 - lam) * partner label.

    `logits` (N, C), `labels` and `partner_labels` (N,) int64, `lam` (N,) float32. The loss is linear in the target, so
    it is the weighted sum of two hard-label terms.
    Source: Zhang et al., arXiv 1710.09412; Szegedy et al., arXiv 1512.00567.
    """
    logits = logits.float()
    own = functional.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
    partner = functional.cross_entropy(logits, partner_labels, reduction="none", label_smoothing=smoothing)
    return lam * own + (1.0 - lam) * partner


def mixed_binary_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, partner_labels: torch.Tensor, lam: torch.Tensor, *,
    smoothing: float, threshold: float, sum_classes: bool,
) -> torch.Tensor:  # fmt: skip
    """Binary cross-entropy (N,) float32, mean or sum over the classes, against the mixed targets. Shapes as above.

    Source: Wightman et al., arXiv 2110.00476; targets, smoothing and threshold as timm.loss.BinaryCrossEntropy.
    """
    target = torch.full(logits.shape, smoothing / logits.shape[1], device=logits.device)
    for label, share in ((labels, lam), (partner_labels, 1.0 - lam)):
        target.scatter_add_(1, label[:, None], (1.0 - smoothing) * share[:, None])
    if threshold:
        target = (target > threshold).float()
    losses = functional.binary_cross_entropy_with_logits(logits.float(), target, reduction="none")
    return losses.sum(1) if sum_classes else losses.mean(1)
