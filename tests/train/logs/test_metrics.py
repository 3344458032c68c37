"""Step times on a GPU, here simulated, are device times, and are measured and logged without waiting for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from resolute.pipeline.loader.batch import Batch
from resolute.train.logs import metrics
from resolute.train.logs.metrics import Meter, RunLogWriter, read_log
from resolute.train.loop import run_batches
from tests.support.fake_cuda import FakeCuda
from tests.support.networks import make_batch

LAUNCH_S = 0.001
# (host blocked for the batch, work of the device): the device falls behind, then is starved, then has heavier steps
STEPS = [(0.0, 0.1)] * 4 + [(0.05, 0.1)] * 2 + [(2.0, 0.1)] + [(0.0, 0.1)] + [(0.0, 0.3)] * 4


class FakeLearner:
    momentum = 0.9

    def __init__(self, driver: FakeCuda) -> None:
        self.driver = driver

    def train_step(self, batch: Batch) -> tuple[torch.Tensor, float]:
        self.driver.host_s += LAUNCH_S
        self.driver.launch(STEPS[batch.spec.index][1])
        return torch.tensor(1.0), 0.1


def batches(driver: FakeCuda) -> Iterator[Batch]:
    for index, (blocked_s, _) in enumerate(STEPS):
        driver.host_s += blocked_s
        yield make_batch(index, n=4, last=index == len(STEPS) - 1)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[FakeCuda, Meter, Any]]:
    driver = FakeCuda().install(monkeypatch)
    monkeypatch.setattr("time.perf_counter", lambda: driver.host_s)
    with contextlib.closing(RunLogWriter(tmp_path / "run.jsonl")) as log:
        meter = Meter(log, device=torch.device("cpu"))  # its sums need a real device
        meter._device = torch.device("cuda", 0)
        yield driver, meter, FakeLearner(driver)


def test_compute_is_device_time_and_a_stall_counts_only_if_the_device_was_idle(
    run: tuple[FakeCuda, Meter, Any], tmp_path: Path
) -> None:
    driver, meter, learner = run
    began = driver.host_s
    assert run_batches(batches(driver), learner, meter, lambda spec: True)
    train_s = meter.sums["train_s"]
    meter.flush()
    records = read_log(tmp_path / "run.jsonl")
    assert [r["compute_s"] for r in records[:6]] == pytest.approx([0.1] * 6, abs=2 * LAUNCH_S)
    assert [r["compute_s"] for r in records[8:]] == pytest.approx([0.3] * 4, abs=2 * LAUNCH_S)
    # the host was blocked 0.05 s for the fifth and sixth batch, while the device still had work; 2 s were a stall
    assert [r["wait_s"] for r in records[:6]] == pytest.approx([0.0] * 6)
    assert 1.0 < records[6]["wait_s"] < 2.0
    assert meter.sums["wait_s"] == pytest.approx(sum(r["wait_s"] for r in records))
    assert train_s == pytest.approx(driver.host_s - began)  # the epoch's time ends with its last kernel
    assert sum(r["wait_s"] + r["compute_s"] for r in records) == pytest.approx(train_s, rel=0.01)


def test_the_hot_loop_does_not_synchronise_before_the_last_batch_of_an_epoch(
    run: tuple[FakeCuda, Meter, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Losses are copied every third step here, and logged once the device has got there."""
    monkeypatch.setattr(metrics, "_FLUSH_STEPS", 3)
    driver, meter, learner = run
    syncs, logged = [], []

    def after(spec: Any) -> bool:
        syncs.append(driver.syncs)
        logged.append(len(read_log(tmp_path / "run.jsonl")))
        return True

    run_batches(batches(driver), learner, meter, after)
    assert syncs == [0] * (len(STEPS) - 1) + [1]
    # the device is behind until the host waits for 2 s before the seventh step
    assert logged == [0] * 8 + [6] * 2 + [6, 12]
    meter.flush()
    assert [record["step"] for record in read_log(tmp_path / "run.jsonl")] == list(range(len(STEPS)))
