"""Groups of samples that belong together: dealt to folds or splits as wholes, with the classes as even as possible."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["components", "deal", "together"]


def deal(
    strata: NDArray[np.integer[Any]],
    groups: NDArray[np.integer[Any]],
    shares: Sequence[float],
    ties: NDArray[np.uint64],
    *,
    held: NDArray[np.int64] | None = None,
) -> NDArray[np.uint32]:
    """The part, 0 to `len(shares)` - 1, of each sample: (N,) uint32, the same for all samples of a group.

    strata   (N,) the class of each sample, as `Target.strata`
    groups   (N,) the group of each sample; -1: it is alone
    shares   the fraction of the samples that each part is to have, of each class
    ties     (N,) decides between groups, and between samples, of which either could come first
    held     (len(shares), classes) the samples of each class that the parts have already; None: none

    Groups are dealt first, the largest one first: each goes to the part where it leaves the classes closest to the
    shares, by the sum of the squared differences, in fractions of a class. Samples that are alone then fill up each
    class. The result does not depend on the order of the samples, if `ties` does not.
    """
    weights = np.asarray(shares, np.float64)
    classes, strata = np.unique(strata, return_inverse=True)
    counts = np.zeros((len(weights), len(classes)), np.int64)  # of each part and class
    if held is not None:
        counts += held[:, classes]
    parts = np.empty(len(strata), np.uint32)
    grouped = np.flatnonzero(groups >= 0)
    if len(grouped):
        parts[grouped] = _deal_groups(strata[grouped], groups[grouped], weights, ties[grouped], counts)
    alone = np.flatnonzero(groups < 0)
    alone = alone[np.lexsort((ties[alone], strata[alone]))]
    starts = np.searchsorted(strata[alone], np.arange(len(classes) + 1))
    for number, (start, stop) in enumerate(pairwise(starts)):
        if start < stop:
            added = _filled(counts[:, number], stop - start, weights, counts.sum(1))
            counts[:, number] += added
            # why in turn: a part of a class that is in order of time or place would be of one time or place
            turn = np.argsort(np.concatenate([(np.arange(n) + 0.5) / n for n in added]), kind="stable")
            parts[alone[start:stop]] = np.repeat(np.arange(len(weights), dtype=np.uint32), added)[turn]
    return parts


def _deal_groups(
    strata: NDArray[np.integer[Any]],
    groups: NDArray[np.integer[Any]],
    weights: NDArray[np.float64],
    ties: NDArray[np.uint64],
    counts: NDArray[np.int64],
) -> NDArray[np.uint32]:
    """The part of each of these samples, which are added to `counts`."""
    _, groups = np.unique(groups, return_inverse=True)
    sizes = np.bincount(groups)
    firsts = np.full(len(sizes), np.iinfo(np.uint64).max, np.uint64)
    np.minimum.at(firsts, groups, ties)
    cells, cell_counts = np.unique(groups.astype(np.int64) * counts.shape[1] + strata, return_counts=True)
    cell_groups, cell_classes = np.divmod(cells, counts.shape[1])
    begins = np.searchsorted(cell_groups, np.arange(len(sizes) + 1)).tolist()
    class_sizes = np.bincount(strata, minlength=counts.shape[1]) + counts.sum(0)
    scale = (1.0 / np.maximum(class_sizes, 1) ** 2).tolist()
    shares, of_parts = weights.tolist(), range(len(weights))
    held: list[list[int]] = counts.tolist()
    totals = [sum(row) for row in held]
    class_list, count_list = cell_classes.tolist(), cell_counts.tolist()
    part_of = np.empty(len(sizes), np.uint32)
    for group in np.lexsort((firsts, -sizes)).tolist():
        own = range(begins[group], begins[group + 1])
        best, least = 0, (np.inf, np.inf)
        for part in of_parts:
            row, share = held[part], shares[part]
            cost = sum(
                scale[class_list[i]] * count_list[i] * (count_list[i] + 2 * row[class_list[i]]) / share for i in own
            )
            key = (cost, (int(sizes[group]) + 2 * totals[part]) / share)
            if key < least:
                best, least = part, key
        part_of[group] = best
        for i in own:
            held[best][class_list[i]] += count_list[i]
        totals[best] += int(sizes[group])
    counts[:] = held
    return part_of[groups]


def _filled(
    held: NDArray[np.int64], added: int, weights: NDArray[np.float64], totals: NDArray[np.int64]
) -> NDArray[np.int64]:
    """How many of the `added` samples of a class each part gets.

    The parts have `held` samples of the class already, and `totals` of all classes.
    """
    wanted = np.maximum((held.sum() + added) * weights / weights.sum() - held, 0)
    wanted *= added / max(wanted.sum(), 1e-300)
    out = np.floor(wanted + 1e-9).astype(np.int64)
    rest = added - int(out.sum())
    # the largest remainders; of equal ones the part with the fewest samples for its share
    order = np.lexsort((totals / weights, -np.round(wanted - out, 9)))
    out[order[:rest]] += 1
    return out


def components(*numbers: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """(N,) int64: a number for all samples that are connected by equal `numbers` (N,) of any kind; -1: a sample alone.

    In each of `numbers`, 0 is none. Components are numbered from 0 in the order of their first samples.
    """
    count = len(numbers[0])
    leaders = np.arange(count)
    while True:
        before = leaders.copy()
        for column in numbers:
            has = np.flatnonzero(column > 0)
            if len(has):
                _, inverse = np.unique(column[has], return_inverse=True)
                least = np.full(inverse.max() + 1, count)
                np.minimum.at(least, inverse, leaders[has])
                leaders[has] = least[inverse]
        leaders = np.minimum(leaders, leaders[leaders])
        if np.array_equal(before, leaders):
            break
    found, inverse, sizes = np.unique(leaders, return_inverse=True, return_counts=True)
    renumbered = np.full(len(found), -1, np.int64)
    renumbered[sizes > 1] = np.arange(int((sizes > 1).sum()))
    return renumbered[inverse]


def together(own: NDArray[np.integer[Any]], others: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
    """(n,) whether each of the numbers `own` is among `others`; 0 is none."""
    return (own > 0) & np.isin(own, others[others > 0])
