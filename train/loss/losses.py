"""Losses per sample, for each kind of target, mixed (mixup, cutmix) and smoothed.

The losses of classes and labels are linear in the target, except with `threshold`: mixing targets is the same as mixing
losses. Ignored labels, which are -1, contribute 0; the mean over the classes is still over all C. So a step's loss is a
sum over its samples divided by a number that each rank and each part of a batch knows, and gradients do not depend on
how a batch is divided.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.nn import functional

from resolute.errors import ResoluteError
from resolute.train.model.outputs import CLASSES, Outputs
from resolute.train.recipe.schema import Loss, Recipe
from resolute.train.recipe.sections import (
    AbsoluteErrorLoss,
    AsymmetricLoss,
    AutoLoss,
    BinaryLoss,
    ClassLoss,
    CrossEntropyLoss,
    HuberLoss,
    SquaredErrorLoss,
    ValueLoss,
    smoothing_of,
)

__all__ = ["build_loss", "check_smoothing", "mixed_binary_cross_entropy", "mixed_cross_entropy"]

_EPS = 1e-8  # lower bound of the powers' bases in the asymmetric loss


def build_loss(
    loss: Loss, head: Outputs = CLASSES, *, weights: torch.Tensor | None = None, device: torch.device | None = None
) -> Callable[..., torch.Tensor]:
    """A function loss(outputs, targets, partner_labels, lam, smoothing=...) -> (N,) float32 per sample.

    `outputs` (N, C or D); the others as in `Batch`. `smoothing`: of the labels, by default those of `loss`; only
    "ce" and "bce" use it. `weights`: of the classes, (C,) float32 on the device, see
    `class_weights`; they are a factor on the cross-entropy of a label, or on the term of a present class. `device`: of
    all tensors, for a `head` of values.
    """
    weighted = isinstance(loss, ClassLoss) and loss.class_weights != "none"
    if (weights is not None) != weighted:
        raise ValueError(f"loss is {loss}, but weights are {weights}")
    loss = _without_auto(loss, head)
    if isinstance(loss, CrossEntropyLoss):
        return functools.partial(mixed_cross_entropy, smoothing=loss.label_smoothing, weights=weights)
    if isinstance(loss, ValueLoss):
        errors: Callable[..., torch.Tensor] = functional.mse_loss
        if isinstance(loss, AbsoluteErrorLoss):
            errors = functional.l1_loss
        if isinstance(loss, HuberLoss):
            errors = functools.partial(functional.huber_loss, delta=loss.delta)
        elements = functools.partial(errors, reduction="none")
        return _StandardizedLoss(elements, *head.scale(device or torch.device("cpu")))
    if isinstance(loss, AsymmetricLoss):
        asymmetric = functools.partial(
            asymmetric_loss, gamma_neg=loss.gamma_neg, gamma_pos=loss.gamma_pos, clip=loss.clip, weights=weights
        )
        mixed = (
            _mixed_asymmetric_loss
            if head.target.kind == "class"
            else functools.partial(_dense_loss, has_ignored=head.target.ignored)
        )
        return functools.partial(
            mixed, terms=lambda logits, targets, smoothing: asymmetric(logits, targets), sum_classes=loss.sum_classes
        )
    assert isinstance(loss, BinaryLoss)
    if head.target.kind == "class":
        return functools.partial(
            mixed_binary_cross_entropy,
            smoothing=loss.label_smoothing,
            threshold=loss.threshold,
            sum_classes=loss.sum_classes,
            weights=weights,
        )
    return functools.partial(
        _dense_loss,
        terms=functools.partial(_binary_cross_entropy, threshold=loss.threshold, weights=weights),
        sum_classes=loss.sum_classes,
        smoothing=loss.label_smoothing,
        has_ignored=head.target.ignored,
    )


def _without_auto(loss: Loss, head: Outputs) -> Loss:
    """The loss that "auto" stands for with the targets of `head`."""
    if not isinstance(loss, AutoLoss):
        return loss
    smoothing, weights = loss.label_smoothing, loss.class_weights
    if head.loss == "ce":
        return CrossEntropyLoss(kind="ce", label_smoothing=smoothing, class_weights=weights)
    if head.loss == "bce":
        return BinaryLoss(kind="bce", label_smoothing=smoothing, class_weights=weights)
    return SquaredErrorLoss(kind="mse", standardize=loss.standardize)


def check_smoothing(recipe: Recipe, head: Outputs) -> None:
    """Raise `ResoluteError` for classes with `loss.threshold` and label smoothing.

    Smoothing adds label_smoothing / C to each of C targets. With a threshold below that, all classes become present;
    with a higher one, smoothing has no effect. Targets of several labels are smoothed after the threshold.
    """
    loss = recipe.loss
    smoothing = max(smoothing_of(recipe.in_stage(number).loss) for number in range(len(recipe.stages)))
    if isinstance(loss, BinaryLoss) and head.target.kind == "class" and loss.threshold and smoothing:
        classes = len(head.target.names) or 1
        result = "all classes as present" if loss.threshold < smoothing / classes else "the same targets without it"
        raise ResoluteError(
            f"loss.label_smoothing: got {smoothing:g} with loss.threshold = {loss.threshold:g}, which gives {result}, "
            "expected one of the two; leave one out"
        )


def mixed_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    partner_labels: torch.Tensor,
    lam: torch.Tensor,
    *,
    smoothing: float,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Cross-entropy (N,) float32 against the smoothed target lam * label + (1 - lam) * partner label.

    `logits` (N, C), `labels` and `partner_labels` (N,) int64, `lam` (N,) float32. The loss is linear in the target, so
    it is the weighted sum of two hard-label terms. Each is multiplied by the weight of its label.
    Source: Zhang et al., arXiv 1710.09412; Szegedy et al., arXiv 1512.00567.
    """
    logits = logits.float()
    own = functional.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
    partner = functional.cross_entropy(logits, partner_labels, reduction="none", label_smoothing=smoothing)
    if weights is not None:
        own, partner = own * weights[labels], partner * weights[partner_labels]
    return lam * own + (1.0 - lam) * partner


def mixed_binary_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    partner_labels: torch.Tensor,
    lam: torch.Tensor,
    *,
    smoothing: float,
    threshold: float,
    sum_classes: bool,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Binary cross-entropy (N,) float32, mean or sum over the classes, against the mixed targets. Shapes as above.

    Source: Wightman et al., arXiv 2110.00476; targets, smoothing and threshold as timm.loss.BinaryCrossEntropy.
    """
    target = _mixed_one_hot(logits, labels, partner_labels, lam, smoothing=smoothing)
    if threshold:
        target = (target > threshold).float()
    losses = functional.binary_cross_entropy_with_logits(logits.float(), target, reduction="none", pos_weight=weights)
    return _over_classes(losses, sum_classes=sum_classes)


def asymmetric_loss(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    gamma_neg: float,
    gamma_pos: float,
    clip: float,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Asymmetric loss (N, C) float32 of each class; `targets` (N, C) float32 in 0 to 1.

    The term of a present class has the weight (1 - p)^gamma_pos, that of an absent one q^gamma_neg, where
    q = max(p - clip, 0). Equals timm.loss.AsymmetricLossMultiLabel for targets of 0 and 1. For those between, timm
    raises a mixture of p and q to a mixture of both powers; here the two terms are mixed, as the images are.
    Source: Ridnik et al., arXiv 2009.14119, equations 4 to 7.
    """
    logits = logits.float()
    p, not_p = torch.sigmoid(logits), torch.sigmoid(-logits)
    absent = (not_p + clip).clamp(max=1.0)  # 1 - q
    # why log-sigmoid: with timm's log of a clamped probability, the gradient of a very wrong output is 0
    log_absent = absent.log() if clip else functional.logsigmoid(-logits)
    # why clamped: the gradient of 0 to a power below 1 is infinite
    present_loss = -functional.logsigmoid(logits) * not_p.clamp(min=_EPS) ** gamma_pos
    absent_loss = -log_absent * (p - clip).clamp(min=_EPS) ** gamma_neg
    if weights is not None:
        present_loss = present_loss * weights
    return targets * present_loss + (1.0 - targets) * absent_loss


def _binary_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    smoothing: float,
    *,
    threshold: float,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Binary cross-entropy (N, C) float32 of several labels; smoothing moves 0 and 1 towards 0.5.

    Source of the smoothing: keras.losses.BinaryCrossentropy.
    """
    if threshold:
        targets = (targets > threshold).float()
    targets = targets * (1.0 - smoothing) + 0.5 * smoothing if smoothing else targets
    return functional.binary_cross_entropy_with_logits(logits.float(), targets, reduction="none", pos_weight=weights)


def _mixed_one_hot(
    logits: torch.Tensor,
    labels: torch.Tensor,
    partner_labels: torch.Tensor,
    lam: torch.Tensor,
    *,
    smoothing: float = 0.0,
) -> torch.Tensor:
    """lam * one-hot label + (1 - lam) * one-hot partner label, (N, C) float32; smoothing adds smoothing / C to all."""
    target = torch.full(logits.shape, smoothing / logits.shape[1], device=logits.device)
    for label, share in ((labels, lam), (partner_labels, 1.0 - lam)):
        target.scatter_add_(1, label[:, None], (1.0 - smoothing) * share[:, None])
    return target


def _mixed_asymmetric_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    partner_labels: torch.Tensor,
    lam: torch.Tensor,
    *,
    terms: Callable[..., torch.Tensor],
    sum_classes: bool,
    smoothing: float = 0.0,
) -> torch.Tensor:
    target = _mixed_one_hot(logits, labels, partner_labels, lam)
    return _over_classes(terms(logits, target, smoothing), sum_classes=sum_classes)


def _dense_loss(
    logits: torch.Tensor,
    targets: torch.Tensor,
    _partner_labels: torch.Tensor,
    _lam: torch.Tensor,
    *,
    terms: Callable[..., torch.Tensor],
    sum_classes: bool,
    has_ignored: bool,
    smoothing: float = 0.0,
) -> torch.Tensor:
    """Targets (N, C) that are already mixed, see `Batch.targets`; `has_ignored`: some may be -1."""
    if not has_ignored:
        return _over_classes(terms(logits, targets, smoothing), sum_classes=sum_classes)
    losses = terms(logits, targets.clamp(min=0.0), smoothing)
    return _over_classes(losses.masked_fill(targets < 0, 0.0), sum_classes=sum_classes)


def _over_classes(losses: torch.Tensor, *, sum_classes: bool) -> torch.Tensor:
    return losses.sum(1) if sum_classes else losses.mean(1)


class _StandardizedLoss:
    """Mean over the D values of the loss between outputs and (target - mean) / std."""

    def __init__(self, elements: Callable[..., torch.Tensor], mean: torch.Tensor, std: torch.Tensor) -> None:
        self._elements, self._mean, self._std = elements, mean, std

    def __call__(
        self,
        outputs: torch.Tensor,
        targets: torch.Tensor,
        _partner_labels: torch.Tensor,
        _lam: torch.Tensor,
        smoothing: float = 0.0,
    ) -> torch.Tensor:
        return self._elements(outputs.float(), (targets - self._mean) / self._std).mean(1)
