"""Every question that Resolute asks of CUDA devices, and every order that it gives them.

Devices are given as `torch.device`, with an index or without: "cuda" is the current device, as everywhere in torch,
but some of torch's own functions refuse it (`set_per_process_memory_fraction`). Nothing else in `pipeline` and `train`
calls `torch.cuda`, so a test that replaces `driver` has a machine with any number of GPUs.
"""

from __future__ import annotations

from typing import Any

import torch

from .errors import ResoluteError

__all__ = [
    "allocated_bytes", "available", "available_bytes", "current_stream", "device_count", "device_name", "elapsed_s",
    "empty_cache", "indexed", "limit_memory", "memory_limit_bytes", "on", "peak_allocated_bytes",
    "peak_reserved_bytes", "reached", "record_event", "reserved_bytes", "reset_peak_memory", "rng_state", "rng_states",
    "select", "set_rng_state", "set_rng_states", "synchronize", "total_bytes", "usable", "utilization",
]  # fmt: skip

driver: Any = torch.cuda


def available() -> bool:
    return bool(driver.is_available())


def device_count() -> int:
    return int(driver.device_count())


def indexed(device: str | torch.device) -> torch.device:
    """The device with its index: that of the current device where there was none. Other kinds stay as they are."""
    device = torch.device(device)
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", driver.current_device())


def usable(device: str | torch.device) -> torch.device:
    """The device with its index. Raises `ResoluteError` if it is not there."""
    kind = torch.device(device).type
    if kind not in ("cpu", "cuda"):
        raise ResoluteError(f"device: got {device}, expected cpu or cuda; choose one")
    if kind == "cuda" and not available():
        raise ResoluteError(f"device {device}: no CUDA device found, expected one; use device cpu")
    found = indexed(device)
    if kind == "cuda" and (found.index or 0) >= device_count():
        raise ResoluteError(f"device {device}: got {device_count()} CUDA devices, expected more; choose another")
    return found


def select(device: str | torch.device) -> torch.device:
    """Make it this process's current device; returns it with its index."""
    device = indexed(device)
    driver.set_device(device)
    return device


def on(device: torch.device) -> Any:
    """A block in which it is the current device."""
    return driver.device(indexed(device))


def device_name(device: torch.device) -> str:
    return str(driver.get_device_name(indexed(device)))


def utilization(device: torch.device) -> float:
    """Part of the time in which it ran kernels, 0 to 1. Raises whatever NVML does where it cannot tell."""
    return float(driver.utilization(indexed(device))) / 100


def total_bytes(device: torch.device) -> int:
    return int(driver.get_device_properties(indexed(device)).total_memory)


def limit_memory(device: torch.device, limit_bytes: float) -> None:
    """Let tensors of this process take at most so much."""
    driver.set_per_process_memory_fraction(limit_bytes / total_bytes(device), indexed(device))


def memory_limit_bytes(device: torch.device) -> float:
    """What tensors of this process may take: all there is, unless `limit_memory` said less."""
    return float(driver.get_per_process_memory_fraction(indexed(device)) * total_bytes(device))


def available_bytes(device: torch.device) -> int:
    """What nobody uses, and what torch keeps for this process."""
    return int(driver.mem_get_info(indexed(device))[0] + driver.memory_reserved(indexed(device)))


def allocated_bytes(device: torch.device) -> int:
    """Of this process's tensors."""
    return int(driver.memory_allocated(indexed(device)))


def reserved_bytes(device: torch.device) -> int:
    """Of this process's tensors, and what torch keeps for more."""
    return int(driver.memory_reserved(indexed(device)))


def peak_allocated_bytes(device: torch.device) -> int:
    """The most that tensors held since `reset_peak_memory`."""
    return int(driver.max_memory_allocated(indexed(device)))


def peak_reserved_bytes(device: torch.device) -> int:
    return int(driver.max_memory_reserved(indexed(device)))


def reset_peak_memory(device: torch.device) -> None:
    driver.reset_peak_memory_stats(indexed(device))


def empty_cache() -> None:
    """Give back what torch keeps and no tensor uses."""
    driver.empty_cache()


def synchronize(device: torch.device) -> None:
    """Wait until it has done all that was launched. Every call is marked `# sync:` with its reason."""
    driver.synchronize(indexed(device))


def current_stream(device: torch.device) -> Any:
    return driver.current_stream(indexed(device))


def record_event(device: torch.device) -> Any:
    """A mark in the current stream of work, for `elapsed_s`; the host does not wait."""
    event = driver.Event(enable_timing=True)
    event.record(current_stream(device))
    return event


def elapsed_s(first: Any, last: Any) -> float:
    """Seconds of the device between two marks. Both must have been reached: synchronise, or read what came after."""
    return float(first.elapsed_time(last)) / 1e3


def reached(event: Any) -> bool:
    """Whether the device has come to a mark; the host does not wait."""
    return bool(event.query())


def rng_state(device: torch.device) -> torch.Tensor:
    state: torch.Tensor = driver.get_rng_state(indexed(device))
    return state


def set_rng_state(state: torch.Tensor, device: torch.device) -> None:
    driver.set_rng_state(state, indexed(device))


def rng_states() -> list[torch.Tensor]:
    """Of all devices; none without a GPU."""
    return list(driver.get_rng_state_all()) if available() else []


def set_rng_states(states: list[torch.Tensor]) -> None:
    if states:
        driver.set_rng_state_all(states)
