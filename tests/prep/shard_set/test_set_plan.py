"""The layout of several generations and the order of the samples, a seeded permutation that mixes the classes."""

from __future__ import annotations

import numpy as np
import pytest

from resolute.prep.shard_set.set_plan import ShardLayout
from resolute.prep.shard_set.shuffle import shuffled

LAYOUT = ShardLayout(
    generations=({"train": 25, "val": 3}, {"train": 0, "val": 11}, {"train": 10, "val": 0}), shard_samples=10
)


def test_every_key_lies_in_one_shard_and_one_generation() -> None:
    for split, total in LAYOUT.images.items():
        keys = [(key, number) for number in LAYOUT.shards[split] for key in LAYOUT.keys(split, number)]
        assert [key for key, _ in keys] == list(range(total))
        for key, number in keys:
            assert LAYOUT.shard_of(split, key) == number
            assert LAYOUT.generations_of_keys(split, [key])[0] == LAYOUT.generation(split, number)
    assert list(LAYOUT) == [("train", n) for n in range(4)] + [("val", n) for n in range(3)]
    assert LAYOUT.keys("train", 2) == range(20, 25)
    assert LAYOUT.keys("train", 3) == range(25, 35)
    assert [LAYOUT.generation("val", n) for n in range(3)] == [0, 1, 1]


def test_only_generations_from_the_first_one_on_are_to_be_made() -> None:
    newest = ShardLayout(generations=LAYOUT.generations, shard_samples=10, first=2)
    assert list(newest) == [("train", 3)]
    assert (len(newest), newest.images) == (1, {"train": 10, "val": 0})
    assert newest.keys("val", 1) == LAYOUT.keys("val", 1)


def test_the_order_is_a_permutation_that_depends_on_seed_split_and_generation() -> None:
    orders = [
        shuffled(0, "train", 1000), shuffled(1, "train", 1000), shuffled(0, "val", 1000),
        shuffled(0, "train", 1000, generation=1), shuffled(0, "train", 1000, generation=2),
    ]  # fmt: skip
    assert all(sorted(order.tolist()) == list(range(1000)) for order in orders)
    assert len({tuple(order) for order in orders}) == 5
    assert np.array_equal(orders[0], shuffled(0, "train", 1000, generation=0))


def test_samples_that_are_stored_side_by_side_are_of_all_classes() -> None:
    labels = np.repeat(np.arange(10), 1000)[shuffled(0, "train", 10_000)]
    counts = np.stack([np.bincount(window, minlength=10) for window in labels.reshape(-1, 250)])
    # of a random order: hypergeometric, with mean 25 and variance 25 * 0.9 * (1 - 250 / 10 000)
    assert counts.min() > 5
    assert counts.var() == pytest.approx(25 * 0.9 * 0.975, rel=0.15)
