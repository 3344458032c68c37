"""Losses of mixed, smoothed and thresholded labels equal their forms with dense targets."""

from __future__ import annotations

import pytest
import torch
from timm.data.mixup import mixup_target
from timm.loss import BinaryCrossEntropy
from torch.nn import functional

from train.losses import build_loss, mixed_cross_entropy
from train.recipe.schema import Loss

N, CLASSES = 9, 5


def _batch() -> tuple[torch.Tensor, ...]:
    """Logits, labels, partners' labels and weights; half of the samples are their own partners."""
    torch.manual_seed(0)
    labels = torch.randint(0, CLASSES, (N,))
    partners = torch.where(torch.arange(N) % 2 == 0, labels, torch.randint(0, CLASSES, (N,)))
    return torch.randn(N, CLASSES, dtype=torch.bfloat16), labels, partners, torch.rand(N)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_mixed_loss_equals_cross_entropy_with_soft_targets(smoothing: float) -> None:
    logits, labels, partners, lam = _batch()
    own, other = (functional.one_hot(which, CLASSES) for which in (labels, partners))
    soft = lam[:, None] * own + (1 - lam[:, None]) * other
    soft = soft * (1 - smoothing) + smoothing / CLASSES
    expected = -(soft * functional.log_softmax(logits.float(), dim=1)).sum(1)
    torch.testing.assert_close(mixed_cross_entropy(logits, labels, partners, lam, smoothing=smoothing), expected)
    assert build_loss(Loss(label_smoothing=smoothing))(logits, labels, partners, lam).equal(
        mixed_cross_entropy(logits, labels, partners, lam, smoothing=smoothing)
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("threshold", [0.0, 0.2])
@pytest.mark.parametrize("sum_classes", [False, True])
def test_bce_equals_timms_on_timms_mixed_targets(smoothing: float, threshold: float, sum_classes: bool) -> None:
    logits, labels, _, _ = _batch()
    ours = build_loss(
        Loss(kind="bce", label_smoothing=smoothing, threshold=threshold, sum_classes=sum_classes)
    )
    theirs = BinaryCrossEntropy(smoothing, target_threshold=threshold or None, sum_classes=sum_classes)
    for lam in (1.0, 0.7, 0.85):  # timm mixes each sample with the one opposite in the batch
        target = mixup_target(labels, CLASSES, lam, smoothing)
        got = ours(logits, labels, labels.flip(0), torch.full((N,), lam))
        assert got.shape == (N,)
        torch.testing.assert_close(got.mean(), theirs(logits.float(), target))
