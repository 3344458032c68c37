"""The order of the samples, a seeded permutation that mixes the classes."""

from __future__ import annotations

import numpy as np
import pytest

from resolute.prep.shard_set.shuffle import shuffled


def test_the_order_is_a_permutation_that_depends_on_seed_split_and_generation() -> None:
    orders = [
        shuffled(0, "train", 1000),
        shuffled(1, "train", 1000),
        shuffled(0, "val", 1000),
        shuffled(0, "train", 1000, generation=1),
        shuffled(0, "train", 1000, generation=2),
    ]
    assert all(sorted(order.tolist()) == list(range(1000)) for order in orders)
    assert len({tuple(order) for order in orders}) == 5
    assert np.array_equal(orders[0], shuffled(0, "train", 1000, generation=0))


def test_samples_that_are_stored_side_by_side_are_of_all_classes() -> None:
    labels = np.repeat(np.arange(10), 1000)[shuffled(0, "train", 10_000)]
    counts = np.stack([np.bincount(window, minlength=10) for window in labels.reshape(-1, 250)])
    # of a random order: hypergeometric, with mean 25 and variance 25 * 0.9 * (1 - 250 / 10 000)
    assert counts.min() > 5
    assert counts.var() == pytest.approx(25 * 0.9 * 0.975, rel=0.15)
