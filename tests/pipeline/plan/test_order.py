"""The orders `shuffled` and `windowed`: every sample once, rotating or nested fractions."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from resolute.pipeline.plan.order import Order, sample_ids

ORDERS: tuple[Order, ...] = ("shuffled", "windowed")


def epoch_ids(
    order: Order,
    *,
    total: int,
    samples: int | None = None,
    offset: int = 0,
    epoch: int = 0,
    seed: int = 3,
    **sizes: Any,
) -> NDArray[np.int64]:
    samples = total if samples is None else samples
    return sample_ids(
        order, np.arange(samples), seed=seed, epoch=epoch, samples=samples, offset=offset, total=total, **sizes
    )


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("total", [1, 2, 63, 75, 4097])
def test_fractions_hold_every_sample_once_and_consecutive_ones_cover_the_set(order: Order, total: int) -> None:
    rng = np.random.default_rng(total)
    for trial in range(30):
        samples, offset = int(rng.integers(1, total + 1)), int(rng.integers(0, total))
        sizes: dict[str, Any] = (
            {}
            if order == "shuffled" or trial % 2
            else {"block": 1 << int(rng.integers(0, 8)), "window": 1 << int(rng.integers(0, 5))}
        )
        part = epoch_ids(order, total=total, samples=samples, offset=offset, epoch=trial, **sizes)
        following = epoch_ids(
            order,
            total=total,
            samples=max(1, total - samples),
            offset=(offset + samples) % total,
            epoch=trial + 1,
            **sizes,
        )
        again = epoch_ids(order, total=total, samples=samples, offset=offset, epoch=trial + 2, **sizes)
        assert set(part.tolist()) == set(again.tolist()) <= set(range(total))
        assert len(set(part.tolist())) == samples
        if samples < total:
            assert sorted([*part, *following]) == list(range(total))


@pytest.mark.parametrize("order", ORDERS)
def test_epochs_and_seeds_give_independent_orders(order: Order) -> None:
    n = 6400
    first = epoch_ids(order, total=n)
    for other in (epoch_ids(order, total=n, epoch=1), epoch_ids(order, total=n, seed=4)):
        assert (first == other).sum() < 8  # Poisson(1): 8 or more has a probability of 1e-5
        assert abs(np.corrcoef(first, other)[0, 1]) < 4 / np.sqrt(n)
    assert (np.abs(np.diff(first)) == 1).sum() < (12 if order == "shuffled" else 6400 * 4 / 64)
    np.testing.assert_array_equal(first, epoch_ids(order, total=n))


def test_block_order_equals_the_golden_value() -> None:
    """Changing this value changes the batches of every run in progress."""
    digest = hashlib.sha256()
    for total, samples, offset in ((75, 75, 0), (75, 40, 60), (100_000, 33_333, 90_000), (10**8, 1000, 99_999_990)):
        digest.update(epoch_ids("windowed", total=total, samples=samples, offset=offset, epoch=2).tobytes())
    assert digest.hexdigest()[:16] == "77bd048138e655f1"
