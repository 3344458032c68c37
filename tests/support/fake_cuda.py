"""Simulated GPUs: replaces `torch.cuda` behind `resolute.cuda`, with the errors that torch raises.

Time is simulated: a test advances `host_s`, launched work is queued on the device, and an event can be read only after
a later synchronisation, so that a blocking read is detected.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from resolute import cuda

GIB = 2**30


class FakeCuda:
    """`devices` GPUs of `gib` GiB each, of which a process may use `fraction`."""

    def __init__(
        self,
        *,
        devices: int = 1,
        gib: float = 80,
        fraction: float = 1.0,
        current: int = 0,
        capability: tuple[int, int] = (9, 0),
    ) -> None:
        self.capability = capability
        self.devices, self.gib, self.fractions, self.current = devices, gib, [fraction], current
        self.peak_reserved, self.allocated, self.percent = 0, 3 * GIB, 40
        self.retries = 0  # of the allocator
        self.host_s = self.free_at_s = self.synchronized_s = 0.0
        self.syncs = 0
        self.rng = [torch.zeros(16, dtype=torch.uint8) for _ in range(devices)]
        fake = self

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                self.timing, self.at_s = enable_timing, 0.0

            def record(self, stream: Any) -> None:
                self.at_s = max(fake.host_s, fake.free_at_s)

            def elapsed_time(self, last: Event) -> float:
                assert self.timing
                assert last.timing
                if max(self.at_s, last.at_s) > fake.synchronized_s:
                    raise RuntimeError("device not ready")
                return 1e3 * (last.at_s - self.at_s)

            def query(self) -> bool:
                done = self.at_s <= fake.host_s
                fake.synchronized_s = max(fake.synchronized_s, self.at_s if done else 0.0)
                return done

            def synchronize(self) -> None:
                fake.syncs += self.at_s > fake.host_s
                fake.host_s = max(fake.host_s, self.at_s)
                fake.synchronized_s = max(fake.synchronized_s, self.at_s)

        self.Event: Any = Event

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
        monkeypatch.setattr(cuda, "driver", self)
        return self

    def launch(self, work_s: float) -> None:
        self.free_at_s = max(self.host_s, self.free_at_s) + work_s

    def _index(self, device: Any, *, optional: bool = True) -> int:
        """As torch.cuda._utils._get_device_index."""
        device = torch.device(device)
        assert device.type == "cuda"
        if device.index is None and not optional:
            raise ValueError(f"Expected a torch.device with a specified index or an integer, but got:{device}")
        index = self.current if device.index is None else device.index
        if index >= self.devices:
            raise AssertionError("Invalid device id")
        return index

    def is_available(self) -> bool:
        return self.devices > 0

    def device_count(self) -> int:
        return self.devices

    def current_device(self) -> int:
        if not self.devices:
            raise RuntimeError("No CUDA GPUs are available")
        return self.current

    def set_device(self, device: Any) -> None:
        self.current = self._index(device)

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before, self.current = self.current, self._index(device)
        yield
        self.current = before

    def get_device_name(self, device: Any) -> str:
        return f"Fake GPU {self._index(device)}"

    def get_device_capability(self, device: Any) -> tuple[int, int]:
        self._index(device)
        return self.capability

    def get_device_properties(self, device: Any) -> Any:
        return SimpleNamespace(name=self.get_device_name(device), total_memory=int(self.gib * GIB))

    def utilization(self, device: Any) -> int:
        self._index(device)
        return self.percent

    def set_per_process_memory_fraction(self, fraction: float, device: Any) -> None:
        self._index(device, optional=False)
        assert 0 <= fraction <= 1
        self.fractions.append(fraction)

    def get_per_process_memory_fraction(self, device: Any) -> float:
        self._index(device, optional=False)
        return self.fractions[-1]

    def mem_get_info(self, device: Any) -> tuple[float, float]:
        self._index(device)
        return self.gib * GIB, self.gib * GIB

    def memory_reserved(self, device: Any) -> int:
        return 0 * self._index(device)

    def memory_allocated(self, device: Any) -> int:
        self._index(device)
        return self.allocated

    def max_memory_allocated(self, device: Any) -> int:
        self._index(device)
        return self.allocated

    def max_memory_reserved(self, device: Any) -> int:
        self._index(device)
        return self.peak_reserved

    def memory_stats(self, device: Any) -> dict[str, int]:
        self._index(device)
        return {"num_alloc_retries": self.retries}

    def reset_peak_memory_stats(self, device: Any) -> None:
        self._index(device)

    def empty_cache(self) -> None:
        pass

    def get_rng_state(self, device: Any) -> torch.Tensor:
        return self.rng[self._index(device)].clone()

    def set_rng_state(self, new_state: torch.Tensor, device: Any) -> None:
        self.rng[self._index(device)] = new_state.clone()

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [self.get_rng_state(torch.device("cuda", index)) for index in range(self.devices)]

    def set_rng_state_all(self, new_states: list[torch.Tensor]) -> None:
        for index, state in enumerate(new_states):
            self.set_rng_state(state, torch.device("cuda", index))

    def current_stream(self, device: Any) -> Any:
        return SimpleNamespace(name=f"stream of {self._index(device)}", wait_stream=lambda other: None)

    def Stream(self, device: Any) -> Any:
        return SimpleNamespace(name=f"side stream of {self._index(device)}", wait_stream=lambda other: None)

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        yield

    def CUDAGraph(self) -> Any:
        return SimpleNamespace(replays=0)

    @contextmanager
    def graph(self, graph: Any, *, pool: Any = None, capture_error_mode: str = "global") -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        yield

    def synchronize(self, device: Any) -> None:
        self._index(device)
        self.syncs += 1
        self.host_s = self.synchronized_s = max(self.host_s, self.free_at_s)
