"""Rates, waits and the costs of changes equal their definitions; loaders are compared within a round."""

from __future__ import annotations

import itertools
import time
from collections.abc import Generator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from resolute.benchmarks.change import around_s, cost_s, first_batches, measure, steady_s, table
from resolute.benchmarks.loader import measure_rates, rates_table
from resolute.benchmarks.loaders import child
from resolute.benchmarks.loaders.job import Job
from resolute.benchmarks.loaders.run import Runner
from resolute.benchmarks.storage.__main__ import paced

STEADY = [2.0] * 30


class Clock:
    """Replaces the module `time`."""

    def __init__(self) -> None:
        self.now, self.busy = 0.0, 0.0

    def perf_counter(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.busy

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def images(clock: Clock, *, each_s: Iterator[float], size: int = 4) -> Generator[torch.Tensor, None, None]:
    for step_s in each_s:
        clock.now += step_s
        clock.busy += step_s / 10
        yield torch.zeros(size, 3, 2, 2)


def runner(*loaders: str, rounds: int = 2) -> Runner:
    return Runner(job=Job(shards="", resolutions=(32, 64), workers=1), loaders=loaders, rounds=rounds)


# ---- clocks ----------------------------------------------------------------------------------------------------------


def test_the_rate_counts_images_after_the_warm_up_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "time", clock := Clock())
    slow_start = itertools.chain([30.0, 10.0, 10.0], itertools.repeat(2.0))
    loader = SimpleNamespace(stream=lambda job: images(clock, each_s=slow_start))
    result = child.rate(loader, Job(shards="", resolutions=(2,), batch_size=4, seconds=10, warm_up=3))
    assert result["first_batch_s"] == 30
    assert result["images_per_s"] == pytest.approx(4 / 2)
    assert result["host_us_per_image"] == pytest.approx(1e6 * 0.2 / 4)


def test_the_clock_of_a_paced_consumer_counts_waits_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "time", clock := Clock())
    waits, sizes = [9.0, 1.0, 1.0, 5.0, 2.0], iter([32, 32, 32, 64, 64])

    def stream(job: Job) -> Generator[torch.Tensor, None, None]:
        for _ in images(clock, each_s=iter(waits)):
            yield torch.zeros(1, 3, size := next(sizes), size)

    job = Job(shards="", resolutions=(32, 64), steps_s=(100.0, 200.0))
    assert child.clock(SimpleNamespace(stream=stream), job) == [[9.0, 1.0, 1.0], [5.0, 2.0]]
    assert clock.now == sum(waits) + 3 * 100 + 2 * 200


# ---- the cost of a change --------------------------------------------------------------------------------------------


def test_the_cost_of_a_change_equals_its_definition() -> None:
    times = [7.0, 3.0, 2.0, 2.0, 1.0, *([2.0] * 10), *([9.0] * 5)]  # the next change slows the last five
    assert steady_s(times, 1) == 2.0
    assert cost_s(times, 1) == 15.0 - 5 * 2.0
    assert cost_s([0.5, *STEADY], 1) == -1.5  # an early batch
    before = [1.0] * 25 + [1.0, 1.0, 1.0, 2.0, 4.0]  # time lost before the change counts in `around_s` only
    assert cost_s([6.0, *STEADY], 1) == 4.0
    assert around_s(before, [6.0, *STEADY], 1) == 4.0 + 4.0


@pytest.mark.parametrize(("workers", "first"), [(2, 6), (5, 5)])
def test_whole_rounds_of_workers_are_counted_so_that_their_bursts_have_no_cost(workers: int, first: int) -> None:
    """Workers that finish together deliver one slow batch and then fast ones."""
    assert first_batches(workers) == first
    burst = [12.0] + [0.0] * (workers - 1)
    assert cost_s(burst * 20, workers) == pytest.approx(0)
    assert cost_s([20.0, *(burst * 20)[1:]], workers) == pytest.approx(8)


def test_drained_and_paced_consumers_are_measured_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = {"ours": [[9.0, *([1.0] * 29)], [4.0, *STEADY[1:]]], "pillow": [[3.0] * 30, [8.0, *([4.0] * 29)]]}
    paces: list[Any] = []

    def run(self: Runner, name: str, **settings: Any) -> list[list[float]]:
        paces.append(settings["steps_s"])
        return stages[name]

    monkeypatch.setattr(Runner, "run", run)
    result = measure(runner("ours", "pillow"), batches=30)
    assert paces == [()] * 4 + [pytest.approx((1.3 * 3.0, 1.3 * 4.0))] * 4  # of the slower loader
    for consumer in result["consumers"].values():
        (change,) = consumer["changes"]
        assert change["loaders"]["ours"]["cost_s"]["raw"] == [cost_s(stages["ours"][1], 1)] * 2 == [2.0] * 2
        assert change["loaders"]["ours"]["cost_steps"]["raw"] == [1.0] * 2  # in steady steps of 2 s
        assert change["loaders"]["pillow"]["slowest_ratio"]["median"] == 2.0
    assert table(result).count("32 -> 64 px") == 4


# ---- loaders side by side --------------------------------------------------------------------------------------------


def rate(images_per_s: float) -> dict[str, Any]:
    return {
        "images_per_s": images_per_s,
        "cpu_s_per_1000": 2.0,
        "cores_busy": 1.5,
        "first_batch_s": 0.1,
        "host_us_per_image": 9.0,
        "processes": 3,
        "threads": 9,
        "layout": "NCHW",
    }


def test_ratios_are_taken_within_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    # of three rounds, each at both resolutions
    rates = {"ours": iter([10.0, 10.0, 40.0, 40.0, 30.0, 30.0]), "pillow": iter([5.0, 5.0, 10.0, 10.0, 30.0, 30.0])}
    monkeypatch.setattr(Runner, "run", lambda self, name, **settings: rate(next(rates[name])))
    result = measure_rates(runner("ours", "pillow", "timm-scheduled", rounds=3))  # the last has no rate of its own
    assert [entry["res"] for entry in result["res"]] == [32, 64]
    for entry in result["res"]:
        assert set(entry["loaders"]) == {"ours", "pillow"}
        assert entry["loaders"]["pillow"]["ours_times"]["raw"] == [2.0, 4.0, 1.0]
        assert entry["loaders"]["pillow"]["images_per_s"]["median"] == 10.0
    assert "2.00 (1.00..4.00)" in rates_table(result)


def test_every_loader_takes_part_with_its_faster_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {("ours", 1): 10.0, ("ours", 2): 40.0, ("pillow", 1): 20.0, ("pillow", 2): 5.0}
    monkeypatch.setattr(Runner, "run", lambda self, name, *, workers, **settings: rate(rates[name, workers]))
    for entry in measure_rates(runner("ours", "pillow"), counts=(1, 2))["res"]:
        ours, pillow = entry["loaders"]["ours"], entry["loaders"]["pillow"]
        assert (ours["workers"], ours["images_per_s"]["median"]) == (2, 40.0)
        assert (pillow["workers"], pillow["images_per_s"]["median"]) == (1, 20.0)
        assert pillow["ours_times"]["raw"] == [2.0, 2.0]


# ---- slow storage ----------------------------------------------------------------------------------------------------


@pytest.mark.timing
def test_waits_are_counted_per_epoch_without_compute_time() -> None:
    def batches() -> Iterator[tuple[int, int]]:
        for epoch, waits_s in enumerate([(0.2, 0.0, 0.1, 0.0), (0.05, 0.0)]):
            for wait_s in waits_s:
                time.sleep(wait_s)
                yield epoch, 8

    first, second = paced(batches(), step_s=0.05, began=time.perf_counter())
    assert 0.2 <= first["start_s"] < 0.3
    assert 0.1 <= first["slowest_s"] < 0.2
    assert first["stall_frac"] == pytest.approx(0.1 / 0.3, abs=0.1)  # not the first batch's 0.2 s
    assert second["stall_frac"] == pytest.approx(0.05 / 0.15, abs=0.15)
    assert second["images_per_s"] == pytest.approx(16 / 0.15, rel=0.3)
