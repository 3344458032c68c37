"""Facts that a run records about its machine and its process."""

from __future__ import annotations

import json
import platform
from typing import Any

import pytest
import torch

from resolute.train.devices.hardware import GpuUtilization, describe, peak_memory_bytes
from tests.support.fake_cuda import FakeCuda


def test_gpu_utilization_is_polled_rarely_and_not_again_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, cuda = [10.0], torch.device("cuda")
    monkeypatch.setattr("resolute.train.devices.hardware.time.monotonic", lambda: clock[0])
    driver: Any = FakeCuda().install(monkeypatch)
    use = GpuUtilization(cuda)
    assert [use.poll(), use.poll()] == [0.4, None]
    clock[0] += 3
    assert use.poll() == 0.4

    def refused(device: object) -> int:
        raise RuntimeError("not supported")

    clock[0] += 3
    monkeypatch.setattr(driver, "utilization", refused)
    assert use.poll() is None
    clock[0] += 3
    monkeypatch.setattr(driver, "utilization", lambda device: 40)
    assert use.poll() is None
    assert GpuUtilization(torch.device("cpu")).poll() is None


def test_the_machine_is_described_without_its_host_name() -> None:
    description = describe(torch.device("cpu"), threads=2)
    assert description["cores"] >= 1
    assert description["threads"] == 2
    assert description["gpu"] is None
    assert platform.node() not in json.dumps(description)
    assert 10 * 2**20 < peak_memory_bytes(torch.device("cpu")) < description["ram_bytes"]
