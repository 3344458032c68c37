"""Rates, waits and stalls equal their definitions, with a clock that only measured work advances."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from resolute.benchmarks.loaders import child
from resolute.benchmarks.loaders.job import Job
from resolute.benchmarks.training import stalls

CPU = torch.device("cpu")


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
    waits, phases = [9.0, 1.0, 1.0, 5.0, 2.0], iter([0, 0, 0, 1, 1])
    batches = zip(phases, images(clock, each_s=iter(waits)), strict=False)
    assert child.clock(batches, lambda batch: batch[0], [100.0, 200.0], CPU) == [[9.0, 1.0, 1.0], [5.0, 2.0]]
    assert clock.now == sum(waits) + 3 * 100 + 2 * 200


def test_the_stall_is_the_fraction_of_time_blocked_for_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalls, "time", clock := Clock())

    def batches() -> Iterator[Any]:
        for wait_s in itertools.chain([50.0, 50.0], itertools.repeat(3.0)):
            clock.now += wait_s
            yield SimpleNamespace(labels=torch.zeros(8))

    def train_step(batch: Any) -> None:
        clock.now += 1.0

    learner: Any = SimpleNamespace(train_step=train_step, device=CPU)
    got = stalls.train_for(learner, batches(), seconds=20, steps_before=2)
    assert got == {"images_per_s": 8 / 4, "stall_frac": 3 / 4}
    short = stalls.train_for(learner, batches(), seconds=1e-9, steps_before=2)
    assert short["images_per_s"] == 8 / 4  # one step at least
