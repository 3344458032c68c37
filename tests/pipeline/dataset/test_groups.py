"""Groups stay whole, classes as even as the groups allow, whatever the order of the samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from resolute.pipeline.dataset.groups import components, deal
from resolute.pipeline.dataset.shard_set import fold_numbers


def _made_up(seed: int, *, samples: int, groups: int, classes: int, alone: float) -> tuple[NDArray[np.int64], ...]:
    """Classes and groups of samples: groups of very different sizes, mostly of one class each."""
    rng = np.random.default_rng(seed)
    group = rng.zipf(1.6, samples) % groups
    of_group = rng.integers(classes, size=groups)
    strata = np.where(rng.random(samples) < 0.9, of_group[group], rng.integers(classes, size=samples))
    return strata, np.where(rng.random(samples) < alone, -1, group)


def _unevenness(strata: NDArray[np.int64], folds: NDArray[np.integer[Any]], count: int) -> float:
    """The mean over classes of the standard deviation of a class's share in the folds."""
    table = np.zeros((count, strata.max() + 1))
    np.add.at(table, (folds, strata), 1)
    table = table[:, table.sum(0) > 0]
    return float((table / table.sum(0)).std(0).mean())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_folds_are_as_even_as_those_of_scikit_learn(seed: int) -> None:
    model_selection = pytest.importorskip("sklearn.model_selection")
    strata, groups = _made_up(seed, samples=3000, groups=400, classes=3 + seed, alone=0.0)
    ours = fold_numbers(strata, 5, groups=groups)
    theirs = np.empty(len(strata), np.int64)
    splitter = model_selection.StratifiedGroupKFold(5)
    for fold, (_, held_out) in enumerate(splitter.split(np.zeros(len(strata)), strata, groups)):
        theirs[held_out] = fold
    assert _unevenness(strata, ours, 5) <= 1.05 * _unevenness(strata, theirs, 5) + 1e-3
    for group in range(groups.max() + 1):
        assert len(np.unique(ours[groups == group])) <= 1


def test_samples_without_a_group_fill_up_the_classes() -> None:
    rng = np.random.default_rng(1)
    strata, groups = rng.integers(4, size=2000), np.where(rng.random(2000) < 0.6, -1, rng.integers(100, size=2000))
    folds = fold_numbers(strata, 5, groups=groups)
    for label in range(4):
        assert np.ptp(np.bincount(folds[strata == label], minlength=5)) <= 1


def test_parts_have_their_shares_and_large_groups_are_not_all_on_one_side() -> None:
    sizes = np.repeat([40, 20, 10, 5, 2], [20, 20, 40, 80, 100])
    groups = np.repeat(np.arange(len(sizes)), sizes)
    strata = groups % 2
    parts = deal(strata, groups, [0.8, 0.2], np.arange(len(groups), dtype=np.uint64))
    in_val = parts == 1
    for label in (0, 1):
        assert in_val[strata == label].mean() == pytest.approx(0.2, abs=0.005)
    held_out = sizes[np.unique(groups[in_val])]
    assert {int(size): int((held_out == size).sum()) for size in np.unique(sizes)} == pytest.approx(
        {2: 20, 5: 16, 10: 8, 20: 4, 40: 4}, abs=2
    )


def test_the_order_of_the_samples_decides_nothing() -> None:
    strata, groups = _made_up(3, samples=1000, groups=150, classes=5, alone=0.3)
    ties = np.random.default_rng(0).permutation(1000).astype(np.uint64)
    order = np.random.default_rng(1).permutation(1000)
    renamed = np.where(groups < 0, -1, 1000 - groups)
    parts = deal(strata, groups, [0.3, 0.7], ties)
    np.testing.assert_array_equal(deal(strata[order], renamed[order], [0.3, 0.7], ties[order]), parts[order])


def test_components_connect_both_kinds_of_numbers() -> None:
    group = np.array([1, 1, 0, 2, 2, 0, 0, 9])
    near = np.array([0, 5, 5, 0, 0, 7, 7, 0])
    assert components(group, near).tolist() == [0, 0, 0, 1, 1, 2, 2, -1]
    chain = np.arange(100)
    assert set(components(chain // 2 + 1, (chain + 1) // 2 + 1).tolist()) == {0}
    assert components(np.zeros(3, np.int64)).tolist() == [-1, -1, -1]
