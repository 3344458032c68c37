"""Sampling by class: exact quotas, no favourite within a class, the same on any number of ranks and in any order."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.format import STORED
from resolute.pipeline.dataset.shard_set import ShardSet, Split
from resolute.pipeline.dataset.target import Target
from resolute.pipeline.plan.class_sampling import Sampling
from resolute.pipeline.plan.order import Order
from resolute.pipeline.plan.plan import Plan
from resolute.pipeline.plan.stage import Augment, Stage

SIZES = (400, 180, 90, 41, 0, 20, 9, 4, 1)  # samples of each class
RICH = Augment(
    mixup_alpha=0.4,
    cutmix_alpha=1.0,
    mixup_mode="elem",
    policy="randaugment",
    random_erasing_prob=0.5,
    jitter=(0.4, 0.4, 0.4, 0.1),
    blur_prob=0.5,
    vflip_prob=0.5,
    grey_prob=0.5,
)
MODES: tuple[Literal["balanced", "sqrt"], ...] = ("balanced", "sqrt")
ORDERS: tuple[Order, ...] = ("shuffled", "windowed")


def with_targets(shards: ShardSet, target: Target, targets: Sequence[Any]) -> ShardSet:
    """`shards` with a training split in memory: these targets, and images of random sizes that do not exist."""
    n = len(targets)
    stored = np.zeros(n, STORED)
    stored["width"], stored["height"] = np.random.default_rng(2).integers(40, 90, (2, n))
    arrays: Any = {"samples": target.encode(range(n), targets), "stored": {32: stored, 48: stored}}
    splits = {**shards.splits, "train": Split(name="train", shards=("train-000000",), **arrays)}
    return dataclasses.replace(shards, target=target, splits=splits)


def labels_of(shards: ShardSet) -> NDArray[np.int64]:
    return np.array(shards.splits["train"].samples["label"], np.int64)


@pytest.fixture(scope="module")
def unbalanced(shard_set: ShardSet) -> ShardSet:
    target = Target(kind="class", names=tuple(f"c{i}" for i in range(len(SIZES))))
    labels = np.random.default_rng(1).permutation(np.repeat(np.arange(len(SIZES)), SIZES))
    return with_targets(shard_set, target, labels.tolist())


def plan_of(shards: ShardSet, sampling: Sampling, *stages: Stage, seed: int = 3, **words: Any) -> Plan:
    stages = stages or (Stage(res=32, epochs=7, batch_size=32),)
    return Plan(shards, stages, sampling=sampling, seed=seed, eval_batch_size=None, **words)


def epoch_ids(plan: Plan, epoch: int) -> list[int]:
    phase = plan.phases[epoch]
    return [i for k in range(phase.batches) for i in plan.ids(phase.first + k).tolist()]


@pytest.mark.parametrize("sampling", MODES)
def test_quotas_are_exact_up_to_rounding(sampling: Sampling, unbalanced: ShardSet) -> None:
    """All classes equally often, or in proportion to the square root of their size; never for a class without any."""
    sizes = np.array(SIZES)
    weights = np.where(sizes > 0, sizes ** {"balanced": 0.0, "sqrt": 0.5}[sampling], 0.0)
    exact = sizes.sum() * weights / weights.sum()
    counts = plan_of(unbalanced, sampling).class_counts(0)
    assert counts.sum() == sizes.sum()
    assert (np.abs(counts - exact) < 1).all()
    assert counts[4] == 0


@pytest.mark.parametrize(("sampling", "order"), [("balanced", "shuffled"), ("sqrt", "windowed")])
def test_long_and_short_epochs_have_their_share_of_each_quota_and_use_samples_of_a_class_equally_often(
    unbalanced: ShardSet, sampling: Sampling, order: Order
) -> None:
    stages = [
        Stage(res=32, epochs=9, batch_size=16, fraction=0.13),
        Stage(res=48, epochs=4, batch_size=32),
        Stage(res=48, epochs=5, batch_size=32, fraction=0.7),
    ]
    plan, labels = plan_of(unbalanced, sampling, *stages, order=order), labels_of(unbalanced)
    quota = plan.mean_class_counts()
    total, drawn = np.zeros(len(labels), int), 0
    for phase in plan.phases:
        ids = epoch_ids(plan, phase.epoch)
        counts = np.bincount(labels[ids], minlength=len(SIZES))
        np.testing.assert_array_equal(counts, plan.class_counts(phase.epoch))
        assert np.abs(counts - quota * phase.samples / len(labels)).max() < 2.5
        drawn += len(ids)
        total += np.bincount(ids, minlength=len(labels))
        seen = np.bincount(labels, total, minlength=len(SIZES))
        assert np.abs(seen - quota * drawn / len(labels)).max() < 2
        for label in set(labels.tolist()):
            assert np.ptp(np.bincount(ids, minlength=len(labels))[labels == label]) <= 1
            assert np.ptp(total[labels == label]) <= 1
    assert total.min() >= 1  # also of the largest class, of which an epoch uses only a part


def test_draws_and_augmentation_equal_the_golden_value(unbalanced: ShardSet) -> None:
    """Changing this value changes the batches of every run in progress."""
    digest = hashlib.sha256()
    stages = [
        Stage(res=32, epochs=3, batch_size=40, fraction=0.4, augment=RICH),
        Stage(res=48, epochs=2, batch_size=64),
    ]
    for sampling in MODES:
        for order in ORDERS:
            plan = plan_of(unbalanced, sampling, *stages, order=order)
            for index in range(plan.total_batches):
                spec = plan.batch(index)
                digest.update(spec.ids.tobytes() + spec.flips.tobytes() + spec.modes.tobytes())
    assert digest.hexdigest()[:16] == "903bbb63e59a43d0"


def test_uniform_sampling_is_no_part_of_the_identity_and_the_seed_changes_draws(unbalanced: ShardSet) -> None:
    uniform, balanced = plan_of(unbalanced, "uniform"), plan_of(unbalanced, "balanced")
    assert "sampling" not in uniform.config
    assert uniform.fingerprint == plan_of(unbalanced, "uniform").fingerprint != balanced.fingerprint
    assert balanced.config == {**uniform.config, "sampling": "balanced"}
    assert Counter(epoch_ids(balanced, 0)) != Counter(epoch_ids(plan_of(unbalanced, "balanced", seed=4), 0))


def test_a_sample_of_several_classes_has_the_largest_of_their_weights(shard_set: ShardSet) -> None:
    """Compared with a slow oracle: sample by sample, from the definition."""
    rng = np.random.default_rng(4)
    target = Target(kind="labels", names=tuple(f"c{i}" for i in range(9)))
    rows = [np.flatnonzero(rng.random(9) < np.linspace(0.5, 0.01, 9)).tolist() for _ in range(2000)]
    shards = with_targets(shard_set, target, rows)
    number = Counter(label for row in rows for label in row)
    empty = sum(not row for row in rows)
    for sampling, power in (("balanced", 1.0), ("sqrt", 0.5)):
        weights = [max((number[label] ** -power for label in row), default=empty**-power) for row in rows]
        expected = len(rows) * np.array(weights) / sum(weights)
        plan = plan_of(shards, sampling, Stage(res=32, epochs=40, batch_size=100))  # type: ignore[arg-type]
        drawn = sum(np.bincount(epoch_ids(plan, epoch), minlength=len(rows)) for epoch in range(40)) / 40
        # each group's quota is rounded to a number, and a sample's draws too
        group = np.array([min(row, key=lambda label: (number[label], label)) if row else 9 for row in rows])
        assert (np.abs(drawn - expected) <= 1.0 / np.bincount(group)[group] + 1 / 40).all()
        has_class = np.array([[label in row for label in range(9)] for row in rows])
        for epoch in (0, 1, 39):
            seen = has_class[epoch_ids(plan, epoch)].sum(0)
            np.testing.assert_array_equal(seen, plan.class_counts(epoch))
        np.testing.assert_allclose(plan.mean_class_counts(), has_class.T @ drawn, rtol=0.01, atol=1)


def test_sampling_that_is_impossible_is_refused_in_one_line(shard_set: ShardSet) -> None:
    values = with_targets(shard_set, Target(kind="values", names=("age",)), [[1.0]] * 40)
    with pytest.raises(ResoluteError, match=r"data.sampling: got sqrt, but the targets of .* are values, .*; leave"):
        plan_of(values, "sqrt")
    assert plan_of(values, "uniform").class_counts(0).tolist() == []
