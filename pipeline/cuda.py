"""All access to CUDA devices: a thin wrapper around `torch.cuda`.

Devices may lack an index: "cuda" is the current device, as everywhere in torch (although some torch functions, such as
`set_per_process_memory_fraction`, reject it). Nothing else in `pipeline` and `train` calls `torch.cuda`, so a test can
simulate any number of GPUs by replacing `driver`.
"""

from __future__ import annotations

from typing import Any

import torch

from resolute.errors import ResoluteError

__all__ = [
    "allocated_bytes", "available", "available_bytes", "current_stream", "device_count", "device_name", "elapsed_s",
    "empty_cache", "indexed", "limit_memory", "memory_limit_bytes", "on", "peak_allocated_bytes",
    "peak_reserved_bytes", "record_event", "reserved_bytes", "reset_peak_memory", "rng_state", "rng_states",
    "select", "set_rng_state", "set_rng_states", "synchronize", "total_bytes", "usable", "utilization",
]  # fmt: skip

driver: Any = torch.cuda


def available() -> bool:
    return bool(driver.is_available())


def device_count() -> int:
    return int(driver.device_count())


def indexed(device: str | torch.device) -> torch.device:
    """Add the index of the current device to a CUDA device without one; other devices are returned unchanged."""
    device = torch.device(device)
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", driver.current_device())


def usable(device: str | torch.device) -> torch.device:
    """Resolve "cpu", "cuda" or "cuda:N" (see `indexed`). Raises `ResoluteError` if the device is not available."""
    kind = torch.device(device).type
    if kind not in ("cpu", "cuda"):
        raise ResoluteError(f"device: got {device}, expected cpu or cuda; choose one")
    if kind == "cuda" and not available():
        raise ResoluteError(f"device {device}: no CUDA device found, expected one; use device cpu")
    resolved = indexed(device)
    if kind == "cuda" and (resolved.index or 0) >= device_count():
        raise ResoluteError(f"device {device}: got {device_count()} CUDA devices, expected more; choose another")
    return resolved


def select(device: str | torch.device) -> torch.device:
    """Make `device` the current device of this process; returns it with its index."""
    device = indexed(device)
    driver.set_device(device)
    return device


def on(device: torch.device) -> Any:
    """Context manager: `device` is the current device within the block."""
    return driver.device(indexed(device))


def device_name(device: torch.device) -> str:
    return str(driver.get_device_name(indexed(device)))


def has_bf16(device: torch.device) -> bool:
    """Whether the GPU computes in bf16 itself: compute capability 8.0 (Ampere) or newer, and ROCm's GPUs."""
    return torch.version.hip is not None or driver.get_device_capability(indexed(device)) >= (8, 0)


def utilization(device: torch.device) -> float:
    """Fraction of time in which kernels were running, 0 to 1. Raises NVML's errors if it is not supported."""
    return float(driver.utilization(indexed(device))) / 100


def total_bytes(device: torch.device) -> int:
    return int(driver.get_device_properties(indexed(device)).total_memory)


def limit_memory(device: torch.device, limit_bytes: float) -> None:
    """Limit the memory of this process's tensors to `limit_bytes`."""
    driver.set_per_process_memory_fraction(limit_bytes / total_bytes(device), indexed(device))


def memory_limit_bytes(device: torch.device) -> float:
    """Memory limit of this process's tensors: the device's memory unless `limit_memory` set less."""
    return float(driver.get_per_process_memory_fraction(indexed(device)) * total_bytes(device))


def available_bytes(device: torch.device) -> int:
    """Free memory of the device plus what torch's allocator reserves for this process."""
    return int(driver.mem_get_info(indexed(device))[0] + driver.memory_reserved(indexed(device)))


def allocated_bytes(device: torch.device) -> int:
    """Memory of this process's tensors."""
    return int(driver.memory_allocated(indexed(device)))


def reserved_bytes(device: torch.device) -> int:
    """Memory that torch's allocator holds for this process, tensors included."""
    return int(driver.memory_reserved(indexed(device)))


def peak_allocated_bytes(device: torch.device) -> int:
    """Peak of `allocated_bytes` since `reset_peak_memory`."""
    return int(driver.max_memory_allocated(indexed(device)))


def peak_reserved_bytes(device: torch.device) -> int:
    return int(driver.max_memory_reserved(indexed(device)))


def reset_peak_memory(device: torch.device) -> None:
    driver.reset_peak_memory_stats(indexed(device))


def empty_cache() -> None:
    """Return reserved memory that no tensor uses to the device."""
    driver.empty_cache()


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all launched work. Every call is marked `# sync:` with its reason."""
    driver.synchronize(indexed(device))


def current_stream(device: torch.device) -> Any:
    return driver.current_stream(indexed(device))


def record_event(device: torch.device, *, timing: bool = True) -> Any:
    """Record an event on the current stream, with `timing` one for `elapsed_s`; the host does not wait."""
    event = driver.Event(enable_timing=timing)
    event.record(current_stream(device))
    return event


def elapsed_s(first: Any, last: Any) -> float:
    """Device time in seconds between two events, both of which must have completed."""
    return float(first.elapsed_time(last)) / 1e3


def rng_state(device: torch.device) -> torch.Tensor:
    state: torch.Tensor = driver.get_rng_state(indexed(device))
    return state


def set_rng_state(state: torch.Tensor, device: torch.device) -> None:
    driver.set_rng_state(state, indexed(device))


def rng_states() -> list[torch.Tensor]:
    """Random generator states of all CUDA devices; empty without a GPU."""
    return list(driver.get_rng_state_all()) if available() else []


def set_rng_states(states: list[torch.Tensor]) -> None:
    if states:
        driver.set_rng_state_all(states)
