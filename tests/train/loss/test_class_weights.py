"""Class weights equal their formulas, act on the loss as a factor, and are refused where they have no effect."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.format import STORED
from resolute.pipeline.dataset.shard_set import ShardSet, Split
from resolute.pipeline.dataset.target import IGNORED, Target
from resolute.pipeline.plan.class_sampling import Sampling
from resolute.pipeline.plan.plan import Plan
from resolute.pipeline.plan.stage import Stage
from resolute.train.learner import Learner
from resolute.train.loss.class_weights import class_weights
from resolute.train.loss.losses import build_loss
from resolute.train.model.outputs import Outputs
from resolute.train.recipe.schema import Recipe
from resolute.train.recipe.sections import AsymmetricLoss, AutoLoss, BinaryLoss
from tests.support.networks import CPU, make_batch, save_weights, tiny_network
from tests.train.test_loop import TABLE

NAMES = ("cat", "dog", "sea lion", "none")
LABELS = [0] * 60 + [1] * 30 + [2] * 10  # the class "none" has no sample


def plan_of(
    shards: ShardSet,
    *,
    sampling: Sampling = "uniform",
    kind: Any = "class",
    targets: Any = None,
    ignored: bool = False,
) -> Plan:
    target = Target(kind=kind, names=NAMES, ignored=ignored)
    records: Any = target.encode(range(len(targets or LABELS)), targets or LABELS)
    stored: Any = {32: np.zeros(len(records), STORED)}
    splits = {"train": Split(name="train", samples=records, stored=stored, shards=())}
    shards = dataclasses.replace(shards, target=target, splits=splits)
    return Plan(shards, [Stage(res=32, epochs=1, batch_size=8)], sampling=sampling, eval_batch_size=None)


def weights_of(choice: Any, plan: Plan) -> list[float]:
    weights = class_weights(AutoLoss(class_weights=choice), plan)
    assert weights is not None
    assert weights.dtype == np.float32
    return [float(weight) for weight in weights]


def test_balanced_weights_equal_those_of_scikit_learn_after_what_the_sampling_balances(shard_set: ShardSet) -> None:
    weights = weights_of("balanced", plan_of(shard_set))
    # compute_class_weight("balanced", classes=[0, 1, 2], y=LABELS) of scikit-learn 1.7: n / (classes * counts)
    assert weights == pytest.approx([0.5555556, 1.1111112, 3.3333333, 1.0])
    plan = plan_of(shard_set, sampling="sqrt")
    np.testing.assert_allclose(weights_of("balanced", plan)[:3] * plan.class_counts(0)[:3], 100 / 3, rtol=1e-6)


def test_balanced_weights_of_several_labels_are_the_limited_ratio_of_absent_to_present(shard_set: ShardSet) -> None:
    rows: list[list[int]] = [[0]] * 300 + [[0, 1]] * 30 + [[2]] + [[]] * 20
    weights = weights_of("balanced", plan_of(shard_set, kind="labels", targets=rows))
    assert weights == pytest.approx([21 / 330, 321 / 30, 100.0, 1.0])


def test_balanced_weights_count_ignored_labels_neither_as_present_nor_as_absent(shard_set: ShardSet) -> None:
    rows: list[list[int]] = [[0]] * 30 + [[1, IGNORED]] * 10 + [[2, IGNORED + 1]] * 20 + [[]] * 40
    plan = plan_of(shard_set, kind="labels", targets=rows, ignored=True)
    assert weights_of("balanced", plan) == pytest.approx([60 / 30, 70 / 10, 80 / 20, 1.0])
    sampled = plan_of(shard_set, kind="labels", targets=rows, ignored=True, sampling="balanced")
    drawn = sampled.mean_ignored_counts()
    assert drawn[:2] == pytest.approx(sampled.mean_class_counts()[1:3])  # the same samples
    present = sampled.mean_class_counts()
    assert weights_of("balanced", sampled)[1] == pytest.approx((100 - drawn[1] - present[1]) / present[1])


def test_a_table_names_classes_and_leaves_the_others_at_one(shard_set: ShardSet) -> None:
    plan = plan_of(shard_set)
    assert weights_of({"dog": 2.5, "sea lion": 0.1}, plan) == pytest.approx([1.0, 2.5, 0.1, 1.0])
    assert class_weights(AutoLoss(), plan) is None
    fold = dataclasses.replace(plan.shards, digests={"fold": "0 of 5"})  # in a fold, a class may be held out
    assert weights_of({"none": 2.0}, Plan(fold, plan.stages, eval_batch_size=None)) == [1.0, 1.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("value", "sampling", "message"),
    [
        ({"sealion": 2.0}, "uniform", "got 'sealion', expected one of the 4 classes of "),
        ({"dog": 2.0, "none": 2.0}, "uniform", "without effect for 'none', which has no training sample in "),
        ("balanced", "balanced", 'without effect, data.sampling = "balanced" '),
    ],
)
def test_weights_for_nothing_and_mistakes_are_refused_in_one_line(
    shard_set: ShardSet, value: Any, sampling: Sampling, message: str
) -> None:
    stages = [{"res": 32, "epochs": 1, "batch_size": 8}]
    with pytest.raises(ResoluteError) as error:
        class_weights(
            Recipe.parse({"stages": stages, "loss": {"class_weights": value}}, name="x").loss,
            plan_of(shard_set, sampling=sampling),
        )
    assert f"loss.class_weights: {message}" in str(error.value)
    assert "\n" not in str(error.value)


def test_each_term_of_a_mixed_loss_has_the_weight_of_its_class() -> None:
    torch.manual_seed(0)
    logits, labels, partners = torch.randn(9, 4), torch.randint(0, 4, (9,)), torch.randint(0, 4, (9,))
    lam, weights = torch.rand(9), torch.tensor([0.5, 1.0, 3.0, 7.0])
    loss = build_loss(AutoLoss(label_smoothing=0.1, class_weights="balanced"), weights=weights)
    expected = torch.zeros(9)
    for classes, share in ((labels, lam), (partners, 1 - lam)):
        each = functional.cross_entropy(logits, classes, label_smoothing=0.1, reduction="none")
        expected += share * weights[classes] * each
    torch.testing.assert_close(loss(logits, labels, partners, lam), expected)
    loss = build_loss(BinaryLoss(kind="bce", class_weights="balanced"), weights=weights)
    own, other = (functional.one_hot(which, 4) for which in (labels, partners))
    target = lam[:, None] * own + (1 - lam[:, None]) * other
    p = logits.sigmoid()
    expected = -(weights * target * p.log() + (1 - target) * (1 - p).log()).mean(1)  # those of the present classes
    torch.testing.assert_close(loss(logits, labels, partners, lam), expected)
    with pytest.raises(ValueError, match="class_weights='balanced'"):
        build_loss(AutoLoss(class_weights="balanced"))  # weights of the recipe cannot be forgotten


@pytest.mark.parametrize("kind", ["bce", "asl"])
def test_losses_of_several_labels_weight_the_terms_of_present_classes(kind: Any) -> None:
    torch.manual_seed(1)
    logits, targets, weights = torch.randn(9, 4), torch.rand(9, 4).round(), torch.tensor([0.5, 1.0, 3.0, 7.0])
    head = Outputs(target=Target(kind="labels", names=NAMES), loss=kind)
    made: Any = {"bce": BinaryLoss, "asl": AsymmetricLoss}[kind]
    plain = build_loss(made(kind=kind, sum_classes=True), head)
    weighted = build_loss(made(kind=kind, sum_classes=True, class_weights="balanced"), head, weights=weights)
    for sample in range(9):
        rows = logits[sample].expand(4, 4)
        # the loss of each class alone: the others are far on the side of their target
        only = torch.where(torch.eye(4) > 0, rows, 60.0 * (2 * targets[sample] - 1))
        each = plain(only, targets[sample].expand(4, 4), None, None)
        factor = torch.where(targets[sample] > 0, weights, torch.ones(4))
        got = weighted(logits[sample : sample + 1], targets[sample : sample + 1], None, None)
        torch.testing.assert_close(got[0], (factor * each).sum())


def test_the_loss_of_a_step_is_the_weighted_mean_over_the_global_batch(tmp_path: Path) -> None:
    """Also in micro-batches: weights are not normalised in each of them. Distillation, by the formula of Hinton et al.,
    is not weighted.
    """
    weights, table = np.array([5, 1, 1, 1, 1, 1, 0.5], np.float32), {**TABLE, "loss": {"class_weights": {"a": 5.0}}}
    file = save_weights(tiny_network(), tmp_path / "teacher.safetensors")
    table["distill"] = {"teacher": "test_resnet", "weights": str(file), "alpha": 0.25, "temperature": 2.0}
    losses = []
    for steps in (1, 3):
        recipe = Recipe.parse({**table, "optim": {"grad_accum_steps": steps}}, name="x")
        learner = Learner(recipe, classes=7, total_steps=10, device=CPU, class_weights=weights)
        batch = make_batch(3)
        with torch.no_grad():
            log_p = learner.network.train()(batch.images).log_softmax(1)
        each = torch.zeros(8)
        for labels, share in ((batch.labels, batch.lam), (batch.partner_labels, 1 - batch.lam)):
            each -= share * torch.from_numpy(weights)[labels] * log_p.gather(1, labels[:, None])[:, 0]
        assert learner.teacher is not None
        q = (log_p / 2).log_softmax(1)
        p = (learner.teacher(batch.images) / 2).softmax(1)
        each = 0.75 * each + 0.25 * 4 * (p * (p.log() - q)).sum(1)
        losses.append(learner.forward_backward(batch))
        torch.testing.assert_close(losses[-1], each.mean())
    torch.testing.assert_close(losses[0], losses[1])
