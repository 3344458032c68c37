"""The order in the shards is a seeded permutation, and the measure of its quality is right."""

from __future__ import annotations

import numpy as np
import pytest

from resolute.prep.plan.shuffle import mixing, shuffled


def test_the_order_is_a_permutation_that_depends_on_seed_and_split() -> None:
    order = shuffled(0, "train", 1000)
    assert sorted(order.tolist()) == list(range(1000))
    assert order.tolist() == shuffled(0, "train", 1000).tolist()
    assert order.tolist() != shuffled(1, "train", 1000).tolist()
    assert order.tolist() != shuffled(0, "val", 1000).tolist()


@pytest.mark.parametrize(("classes", "samples"), [(2, 4000), (10, 5000), (100, 5000), (1000, 20_000)])
def test_expected_mixing_equals_the_mean_of_random_orders(classes: int, samples: int) -> None:
    labels = np.random.default_rng(0).integers(0, classes, samples)
    random = [mixing(np.random.default_rng(i).permutation(labels)).measured for i in range(100)]
    assert mixing(labels).expected == pytest.approx(np.mean(random), rel=0.04)


def test_sorted_classes_have_a_bad_measure_and_shuffled_ones_a_good_one() -> None:
    labels = np.repeat(np.arange(10), 1000)
    assert mixing(labels).measured > 0.85
    assert mixing(labels[shuffled(0, "train", len(labels))]).measured < 0.12


def test_fewer_samples_than_a_window_count_as_perfectly_mixed() -> None:
    assert mixing(np.array([0, 1, 1])).measured == 0
    assert mixing(np.array([0, 1, 1])).expected == 0
