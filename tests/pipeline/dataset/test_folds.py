"""Folds are stratified, complete, the same on every machine, and any set has any number of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.shard_set import ShardSet, fold_numbers
from tests.support.trees import tree


@pytest.mark.parametrize(("folds", "seed"), [(2, 0), (5, 4), (1000, 0)])
def test_fold_sizes_differ_by_at_most_one_in_each_class_and_in_total(folds: int, seed: int) -> None:
    sizes = [1 + i * 37 % 230 for i in range(120)] + [0, 1, 2000]
    labels = np.random.default_rng(1).permutation(np.repeat(np.arange(len(sizes)), sizes)).astype(np.uint32)
    numbers = fold_numbers(labels, folds, seed=seed)
    for label in range(len(sizes)):
        counts = np.bincount(numbers[labels == label], minlength=folds)
        assert len(counts) == folds
        assert np.ptp(counts) <= 1
    assert np.ptp(np.bincount(numbers)) <= 1


def test_folds_are_the_same_in_every_process_and_version() -> None:
    labels = np.array([0, 1, 2, 1, 0, 0, 2, 70_000, 1, 1, 0, 2], np.uint32)
    expected = [0, 2, 0, 1, 1, 0, 1, 2, 0, 1, 2, 2]
    assert fold_numbers(labels, 3).tolist() == expected
    assert fold_numbers(labels, 3, seed=1).tolist() != expected


def test_folds_of_a_set_are_disjoint_and_complete_and_leave_val_out(shard_set: ShardSet) -> None:
    whole, files, folds = shard_set.splits["train"], tree(Path(shard_set.root)), 7
    seen = []
    for fold in range(folds):
        folded = shard_set.with_fold(fold, folds)
        train, val = folded.splits["train"], folded.splits["val"]
        assert set(folded.splits) == {"train", "val"}
        held_out = fold_numbers(whole.samples["label"], folds) == fold
        for split, chosen in ((train, ~held_out), (val, held_out)):
            np.testing.assert_array_equal(split.samples[:], whole.samples[:][chosen])
            for res in shard_set.resolutions:
                np.testing.assert_array_equal(split.stored[res][:], whole.stored[res][:][chosen])
        seen += val.samples["key"].tolist()
    assert sorted(seen) == whole.samples["key"].tolist()
    assert tree(Path(shard_set.root)) == files


def test_another_fold_or_number_of_folds_is_other_data(shard_set: ShardSet) -> None:
    sets = [shard_set, *(shard_set.with_fold(fold, folds) for fold, folds in ((0, 3), (1, 3), (0, 5)))]
    assert len({shards.fingerprint() for shards in sets}) == 4
    assert shard_set.with_fold(1, 3).fingerprint() == sets[2].fingerprint()


def test_a_fold_that_cannot_be_is_refused(shard_set: ShardSet) -> None:
    for fold, folds, message in (
        (3, 3, "got fold 3 of 3, expected 0 to 2"),
        (0, 1, "got 1 folds, expected 2 to 75"),
        (0, 76, "got 76 folds, expected 2 to 75, the number of training"),
    ):
        with pytest.raises(ResoluteError, match=message):
            shard_set.with_fold(fold, folds)
    with pytest.raises(ResoluteError, match="expected a set without a fold"):
        shard_set.with_fold(0, 3).with_fold(0, 3)
    with pytest.raises(ResoluteError, match=r"got fold=.*, expected both or none; "):
        ShardSet.open(shard_set.root, fold=0)
