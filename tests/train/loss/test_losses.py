"""Losses of mixed, smoothed and thresholded targets of all kinds equal their definitions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from timm.data.mixup import mixup_target
from timm.loss import AsymmetricLossMultiLabel, BinaryCrossEntropy
from torch.nn import functional

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.target import Target
from resolute.train.loss.losses import build_loss, check_smoothing
from resolute.train.model.outputs import Outputs
from resolute.train.recipe.schema import Loss, Recipe
from resolute.train.recipe.sections import AbsoluteErrorLoss, AsymmetricLoss, AutoLoss, BinaryLoss, HuberLoss

N, CLASSES = 9, 5


def _batch() -> tuple[torch.Tensor, ...]:
    """Logits, labels, labels of the partners and weights; half of the samples have the label of their partner."""
    torch.manual_seed(0)
    labels = torch.randint(0, CLASSES, (N,))
    partners = torch.where(torch.arange(N) % 2 == 0, labels, torch.randint(0, CLASSES, (N,)))
    return torch.randn(N, CLASSES, dtype=torch.bfloat16), labels, partners, torch.rand(N)


@pytest.mark.parametrize(("threshold", "result"), [(0.01, "all classes as present"), (0.2, "the same targets")])
@pytest.mark.parametrize("of_stage", [False, True])
def test_smoothed_classes_with_a_threshold_are_refused(of_stage: bool, threshold: float, result: str) -> None:
    smoothing = {"label_smoothing": 0.1}
    loss = {"kind": "bce", "threshold": threshold, **({} if of_stage else smoothing)}
    stages = [{"res": 32, "epochs": 1, "batch_size": 8, **({"loss": smoothing} if of_stage else {})}]
    recipe = Recipe.parse({"loss": loss, "stages": stages}, name="x")
    with pytest.raises(ResoluteError, match=f"label_smoothing: got 0.1 with loss.threshold = {threshold}, .*{result}"):
        check_smoothing(recipe, Outputs(target=Target(kind="class", names=("a", "b", "c", "d", "e")), loss="bce"))
    check_smoothing(recipe, Outputs(target=Target(kind="labels", names=("a", "b")), loss="bce"))
    for one in ({"threshold": 0.2}, {"label_smoothing": 0.1}):
        table = {"loss": {"kind": "bce", **one}, "stages": [{"res": 32, "epochs": 1, "batch_size": 8}]}
        check_smoothing(
            Recipe.parse(table, name="x"), Outputs(target=Target(kind="class", names=("a", "b")), loss="bce")
        )


def test_mixed_loss_equals_cross_entropy_with_soft_targets() -> None:
    logits, labels, partners, lam = _batch()
    smoothing = 0.1
    own, other = (functional.one_hot(which, CLASSES) for which in (labels, partners))
    soft = lam[:, None] * own + (1 - lam[:, None]) * other
    soft = soft * (1 - smoothing) + smoothing / CLASSES
    expected = -(soft * functional.log_softmax(logits.float(), dim=1)).sum(1)
    torch.testing.assert_close(build_loss(AutoLoss(label_smoothing=smoothing))(logits, labels, partners, lam), expected)


@pytest.mark.parametrize(
    ("smoothing", "threshold", "sum_classes"),
    [
        (0.0, 0.0, False),
        (0.1, 0.0, True),
        (0.0, 0.2, True),
        (0.1, 0.2, False),
    ],
)
def test_bce_equals_timms_with_mixed_targets(smoothing: float, threshold: float, sum_classes: bool) -> None:
    logits, labels, _, _ = _batch()
    ours = build_loss(BinaryLoss(kind="bce", label_smoothing=smoothing, threshold=threshold, sum_classes=sum_classes))
    theirs = BinaryCrossEntropy(smoothing, target_threshold=threshold or None, sum_classes=sum_classes)
    for lam in (1.0, 0.7, 0.85):  # timm mixes each sample with the one opposite in the batch
        target = mixup_target(labels, CLASSES, lam, smoothing)
        got = ours(logits, labels, labels.flip(0), torch.full((N,), lam))
        assert got.shape == (N,)
        torch.testing.assert_close(got.mean(), theirs(logits.float(), target))


LABELS = Outputs(target=Target(kind="labels", names=("a",) * CLASSES), loss="bce")
VALUES = Outputs(
    target=Target(kind="values", names=("a",) * CLASSES), loss="mse", mean=(5.0,) * CLASSES, std=(2.0,) * CLASSES
)
NONE = torch.empty(0, dtype=torch.int64)
IGNORING = Outputs(target=Target(kind="labels", names=("a",) * CLASSES, ignored=True), loss="bce")


def _dense() -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs, and targets of 0 and 1."""
    outputs = _batch()[0]
    return outputs, (torch.rand(N, CLASSES, generator=torch.Generator().manual_seed(3)) < 0.3).float()


@pytest.mark.parametrize(("gamma_neg", "gamma_pos", "clip"), [(4.0, 1.0, 0.05), (2.0, 0.0, 0.0)])
def test_the_asymmetric_loss_of_hard_labels_equals_timms(gamma_neg: float, gamma_pos: float, clip: float) -> None:
    outputs, targets = _dense()
    loss = AsymmetricLoss(kind="asl", gamma_neg=gamma_neg, gamma_pos=gamma_pos, clip=clip, sum_classes=True)
    theirs = AsymmetricLossMultiLabel(gamma_neg=gamma_neg, gamma_pos=gamma_pos, clip=clip)
    got = build_loss(loss, LABELS)(outputs, targets, NONE, torch.ones(N))
    torch.testing.assert_close(got.mean(), theirs(outputs.float(), targets))
    labels = torch.arange(N) % CLASSES
    got = build_loss(loss)(outputs, labels, labels, torch.ones(N))  # one class per sample
    torch.testing.assert_close(got.mean(), theirs(outputs.float(), functional.one_hot(labels, CLASSES).float()))


def test_the_asymmetric_loss_is_linear_in_the_mixed_target() -> None:
    outputs, targets = _dense()
    of, partners = build_loss(AsymmetricLoss(kind="asl"), LABELS), targets.flip(0)
    mixed = of(outputs, 0.7 * targets + 0.3 * partners, NONE, torch.ones(N))
    expected = 0.7 * of(outputs, targets, NONE, torch.ones(N)) + 0.3 * of(outputs, partners, NONE, torch.ones(N))
    torch.testing.assert_close(mixed, expected)


def test_the_loss_of_labels_is_binary_cross_entropy_with_smoothing_towards_one_half() -> None:
    outputs, targets = _dense()
    for loss, expected in ((AutoLoss(), targets), (BinaryLoss(kind="bce", label_smoothing=0.2), 0.8 * targets + 0.1)):
        got = build_loss(loss, LABELS)(outputs, targets, NONE, torch.ones(N))
        p = outputs.double().sigmoid()
        by_hand = -(expected * p.log() + (1 - expected) * (1 - p).log()).mean(1)
        torch.testing.assert_close(got.double(), by_hand, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("loss", "of_error"),
    [
        (AutoLoss(), lambda e: e**2),
        (AbsoluteErrorLoss(kind="l1"), abs),
        (HuberLoss(kind="huber", delta=0.5), lambda e: 0.5 * e**2 if abs(e) < 0.5 else 0.5 * (abs(e) - 0.25)),
    ],
)
def test_losses_of_values_are_means_over_standardised_errors(loss: Loss, of_error: Callable[[float], float]) -> None:
    outputs, targets = _dense()
    targets = 7 * targets + 4
    got = build_loss(loss, VALUES)(outputs, targets, NONE, torch.ones(N))
    errors = outputs.double() - (targets.double() - 5) / 2
    expected = [sum(of_error(error) for error in row) / CLASSES for row in errors.tolist()]
    assert got.tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("size", "gamma", "clip"), [(0.0, 0.0, 0.05), (30.0, 4.0, 0.0), (300.0, 0.5, 0.05)])
def test_gradients_of_the_asymmetric_loss_are_finite_and_push_wrong_outputs(
    size: float, gamma: float, clip: float
) -> None:
    outputs = torch.tensor([[-size, size]], requires_grad=True)
    loss = build_loss(AsymmetricLoss(kind="asl", gamma_neg=gamma, gamma_pos=gamma, clip=clip), LABELS)
    loss(outputs, torch.tensor([[1.0, 0.0]]), NONE, torch.ones(1)).sum().backward()
    gradient = outputs.grad
    assert gradient is not None
    assert torch.isfinite(gradient).all()
    assert gradient[0, 0] < 0
    assert gradient[0, 1] > 0 or clip


@pytest.mark.parametrize(
    "loss",
    [
        AutoLoss(),
        BinaryLoss(kind="bce", label_smoothing=0.2),
        BinaryLoss(kind="bce", threshold=0.3, sum_classes=True),
        AsymmetricLoss(kind="asl"),
        AsymmetricLoss(kind="asl", gamma_neg=2.0, gamma_pos=0.5, clip=0.0, sum_classes=True),
    ],
)
def test_an_ignored_label_adds_nothing_to_the_loss_and_its_gradient(loss: Loss) -> None:
    outputs, targets = _dense()
    targets = 0.6 * targets + 0.4 * targets.flip(0)
    ignored = torch.rand(N, CLASSES, generator=torch.Generator().manual_seed(5)) < 0.4
    ignored[0] = True  # a sample without any label that counts
    logits = outputs.float().requires_grad_()
    got = build_loss(loss, IGNORING)(logits, targets.masked_fill(ignored, -1.0), NONE, torch.ones(N))
    got.sum().backward()
    assert logits.grad is not None
    assert (logits.grad[ignored] == 0).all()
    each = [build_loss(loss, LABELS)(logits[:, [c]], targets[:, [c]], NONE, torch.ones(N)) for c in range(CLASSES)]
    counted = torch.stack(each, dim=1).masked_fill(ignored, 0.0)
    expected = counted.sum(1) if getattr(loss, "sum_classes", False) else counted.sum(1) / CLASSES
    torch.testing.assert_close(got, expected)
    whole = build_loss(loss, LABELS)(outputs, targets, NONE, torch.ones(N))
    torch.testing.assert_close(build_loss(loss, IGNORING)(outputs, targets, NONE, torch.ones(N)), whole, rtol=0, atol=0)


def test_a_batch_with_ignored_labels_may_be_divided_among_ranks_and_parts() -> None:
    outputs, targets = _dense()
    targets[:4, 1:] = -1.0
    loss = build_loss(AutoLoss(), IGNORING)
    whole = loss(outputs, targets, NONE, torch.ones(N)).sum()
    parts = [
        loss(out, own, NONE, torch.ones(N)).sum() for out, own in zip(outputs.split(2), targets.split(2), strict=True)
    ]
    torch.testing.assert_close(torch.stack(parts).sum(), whole)
