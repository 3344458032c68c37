"""The switch cost is what its definition says, on made-up times."""

from __future__ import annotations

import pytest

from benchmarks.switch import around_s, cost_s, first_batches, slowest_ratio, steady_s
from benchmarks.table import repeated

STEADY = [2.0] * 30


@pytest.mark.parametrize(("workers", "first"), [(1, 5), (2, 6), (4, 8), (5, 5), (16, 16)])
def test_whole_rounds_of_the_workers_are_counted(workers: int, first: int) -> None:
    assert first_batches(workers) == first


def test_a_plain_case_worked_by_hand() -> None:
    times = [7.0, 3.0, 2.0, 2.0, 1.0, *([2.0] * 10), *([9.0] * 5)]  # the next change slows the last five
    assert steady_s(times, 1) == 2.0
    assert cost_s(times, 1) == 15.0 - 5 * 2.0
    assert slowest_ratio(times, 1) == 3.5


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_a_steady_stage_costs_nothing(workers: int) -> None:
    assert cost_s([0.25] * 60, workers) == around_s([0.5] * 60, [0.25] * 60, workers) == 0


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_bursts_are_no_cost(workers: int) -> None:
    """Workers that finish together deliver one slow batch and then fast ones."""
    burst = [12.0] + [0.0] * (workers - 1)
    assert cost_s(burst * 20, workers) == pytest.approx(0)
    late = [20.0, *(burst * 20)[1:]]
    assert cost_s(late, workers) == pytest.approx(8)


def test_one_hiccup_in_the_steady_part_does_not_change_the_cost() -> None:
    times = [5.0, *STEADY]
    hiccup = times.copy()
    hiccup[15] += 100
    assert cost_s(hiccup, 1) == cost_s(times, 1) == 3.0


def test_what_was_lost_before_the_change_counts_in_around_only() -> None:
    before = [1.0] * 25 + [1.0, 1.0, 1.0, 2.0, 4.0]
    assert cost_s([6.0, *STEADY], 1) == 4.0
    assert around_s(before, [6.0, *STEADY], 1) == 4.0 + 4.0


def test_a_batch_that_comes_early_is_a_gain() -> None:
    assert cost_s([0.5, *STEADY], 1) == -1.5


def test_a_table_shows_every_change_loader_and_consumer() -> None:
    from benchmarks.switch import table

    keys = ("cost_s", "around_s", "slowest_s", "slowest_ratio", "steady_s")
    values = {key: repeated([0.5]) for key in keys}
    changes = [
        {"from_res": a, "to_res": b, "loaders": {"ours": values, "peer": values}} for a, b in [(32, 48), (48, 64)]
    ]
    result = {
        "first": 5,
        "consumers": {
            "drained": {"step_s": None, "changes": changes},
            "paced": {"step_s": [0.1, 0.2, 0.3], "changes": changes},
        },
    }
    text = table(result)
    assert text.count("32 -> 48 px") == text.count("48 -> 64 px") == 4
    assert text.count("DataLoader rebuilt") == text.count("  ours") == 4
    assert "100 / 200 / 300 ms" in text
    assert "500.0" in text
