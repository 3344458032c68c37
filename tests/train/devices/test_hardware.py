"""Facts that a run records about its machine and its process."""

from __future__ import annotations

import json
import platform

import torch

from resolute.train.devices.hardware import describe, peak_memory_bytes


def test_the_machine_is_described_without_its_host_name() -> None:
    description = describe(torch.device("cpu"), threads=2)
    assert description["cores"] >= 1
    assert description["threads"] == 2
    assert description["gpu"] is None
    assert platform.node() not in json.dumps(description)
    assert 10 * 2**20 < peak_memory_bytes(torch.device("cpu")) < description["ram_bytes"]
