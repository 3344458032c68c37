"""The layout of several generations: keys and shards of each follow those of the older ones."""

from __future__ import annotations

import numpy as np

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
    assert LAYOUT.shards == {"train": range(4), "val": range(3)}
    assert list(LAYOUT) == [("train", n) for n in range(4)] + [("val", n) for n in range(3)]
    assert LAYOUT.keys("train", 2) == range(20, 25)
    assert LAYOUT.keys("train", 3) == range(25, 35)
    assert [LAYOUT.generation("val", n) for n in range(3)] == [0, 1, 1]
    assert LAYOUT.has("val", 2)
    assert not LAYOUT.has("val", 3)


def test_only_generations_from_the_first_one_on_are_to_be_made() -> None:
    newest = ShardLayout(generations=LAYOUT.generations, shard_samples=10, first=2)
    assert list(newest) == [("train", 3)]
    assert (len(newest), newest.images) == (1, {"train": 10, "val": 0})
    assert newest.keys("val", 1) == LAYOUT.keys("val", 1)


def test_each_generation_has_an_order_of_its_own() -> None:
    orders = [shuffled(0, "train", 100, generation=number) for number in range(3)]
    for order in orders:
        assert sorted(order.tolist()) == list(range(100))
    assert not any(np.array_equal(orders[a], orders[b]) for a, b in ((0, 1), (0, 2), (1, 2)))
    assert np.array_equal(orders[0], shuffled(0, "train", 100))
