"""The index finds what differs in few bits, once each, and says when photos are like too many others."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from resolute.prep.near_copies import index
from resolute.prep.near_copies.descriptor import HASHES, MIRROR
from resolute.prep.near_copies.index import Index, equal_hashes


@pytest.fixture
def hashes() -> NDArray[np.uint64]:
    """(3000, HASHES) of photos that have nothing to do with each other."""
    return np.random.default_rng(0).integers(1, 2**64, (3000, HASHES), dtype=np.uint64)


def bits(*numbers: int) -> np.uint64:
    return np.uint64(sum(1 << number for number in numbers))


def close(found: NDArray[np.void]) -> list[tuple[int, ...]]:
    """Those that cannot be by chance."""
    return [tuple(int(value) for value in row) for row in found[found["bits"] <= 7].tolist()]


def test_pairs_of_up_to_seven_bits_are_found(hashes: NDArray[np.uint64]) -> None:
    hashes[5, 0] = hashes[2900, 0] ^ bits(1, 17, 18, 33, 34, 49, 50)
    hashes[7, 0] = hashes[100, 6] ^ bits(0, 63)  # the whole of 7 is a part of 100
    hashes[8, 0] = hashes[200, 2] ^ MIRROR ^ bits(3)
    hashes[300, 1] = hashes[400, 1]  # the same part of both
    hashes[500, 3] = hashes[600, 3] ^ MIRROR
    hashes[700, 1] = hashes[800, 2] ^ MIRROR  # the part without its left is that without its right, mirrored
    found, cut_short = Index(hashes).candidates(np.arange(3000))
    assert cut_short == 0
    assert close(found) == [
        (5, 2900, 7, 0, 0, 0),
        (100, 7, 2, 6, 0, 0),
        (200, 8, 1, 2, 1, 0),
        (300, 400, 0, 1, 0, 1),
        (500, 600, 0, 3, 1, 1),
        (700, 800, 0, 1, 1, 1),
    ]


def test_only_those_that_are_asked_for_are_compared(hashes: NDArray[np.uint64]) -> None:
    hashes[1, 0], hashes[3, 0] = hashes[2, 0], hashes[4, 0]
    hashes[10] = 0
    found, _ = Index(hashes).candidates(np.array([1, 10]))
    assert close(found) == [(1, 2, 0, 0, 0, 0)]
    nothing, _ = Index(np.zeros((4, HASHES), np.uint64)).candidates(np.arange(4))
    assert len(nothing) == 0
    assert len(Index(np.zeros((0, HASHES), np.uint64)).candidates(np.arange(0))[0]) == 0


def test_photos_that_are_like_thousands_are_counted(hashes: NDArray[np.uint64]) -> None:
    hashes[:500, 0] = hashes[0, 0] ^ np.arange(500, dtype=np.uint64) // 50
    found, cut_short = Index(hashes).candidates(np.arange(3000))
    assert cut_short == 500
    assert len(found) <= 500 * index.MAX_FOUND + 10
    assert all(differing <= 1 for _, _, differing, *_ in close(found)), "the closest ones"


def test_equal_hashes_are_those_of_the_first_row(hashes: NDArray[np.uint64]) -> None:
    hashes[7] = hashes[2]
    hashes[9, 0] = hashes[2, 0]
    assert equal_hashes(hashes[:10]).tolist() == [0, 1, 2, 3, 4, 5, 6, 2, 8, 9]
