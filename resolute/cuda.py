"""All access to CUDA devices: a thin wrapper around `torch.cuda`.

Devices may lack an index: "cuda" is the current device, as everywhere in torch (although some torch functions, such as
`set_per_process_memory_fraction`, reject it). Nothing else in `pipeline` and `train` calls `torch.cuda`, so a test can
simulate any number of GPUs by replacing `driver`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from resolute.errors import ResoluteError

__all__ = [
    "allocated_bytes",
    "allocator_retries",
    "available",
    "available_bytes",
    "captured_graph",
    "copy_to_host",
    "current_stream",
    "device_count",
    "device_guard",
    "device_name",
    "elapsed_s",
    "empty_cache",
    "limit_memory",
    "memory_limit_bytes",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "record_event",
    "reserved_bytes",
    "reset_peak_memory",
    "resolve_device",
    "rng_state",
    "rng_states",
    "set_rng_state",
    "set_rng_states",
    "side_stream",
    "synchronize",
    "total_bytes",
    "use_device",
    "used_bytes",
    "utilization",
    "with_index",
]

T = TypeVar("T")
driver: Any = torch.cuda


def available() -> bool:
    return bool(driver.is_available())


def device_count() -> int:
    return int(driver.device_count())


def with_index(device: str | torch.device) -> torch.device:
    """Add the index of the current device to a CUDA device without one; other devices are returned unchanged."""
    device = torch.device(device)
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", driver.current_device())


def resolve_device(device: str | torch.device) -> torch.device:
    """Resolve "cpu", "cuda" or "cuda:N" (see `with_index`). Raises `ResoluteError` if the device is not available."""
    # why not torch.device: it takes 256 for 0, as indices have 8 bits
    name = re.fullmatch(r"cpu(?::0)?|cuda(?::(0|[1-9][0-9]{0,8}))?", str(device))
    if name is None:
        raise ResoluteError(f"device: got {str(device) or 'no name'}, expected cpu, cuda or cuda:N; choose one")
    if name[0].startswith("cpu"):
        return torch.device("cpu")
    if not available():
        raise ResoluteError(f"device {device}: no CUDA device found, expected one; use device cpu")
    if name[1] is None:
        try:
            return with_index("cuda")
        except RuntimeError as error:  # for example in a process that was forked from one that uses CUDA
            raise ResoluteError(
                f"device {device}: cannot be used, got '{str(error).splitlines()[0]}', expected a working CUDA device; "
                "use it in a process of its own, or choose device cpu"
            ) from None
    if int(name[1]) >= device_count():
        raise ResoluteError(f"device {device}: got {device_count()} CUDA devices, expected more; choose another")
    return torch.device("cuda", int(name[1]))


def use_device(device: str | torch.device) -> torch.device:
    """Make `device` the current device of this process; returns it with its index."""
    device = with_index(device)
    driver.set_device(device)
    return device


def device_guard(device: torch.device) -> Any:
    """Context manager: `device` is the current device within the block."""
    return driver.device(with_index(device))


def device_name(device: torch.device) -> str:
    return str(driver.get_device_name(with_index(device)))


def has_bf16(device: torch.device) -> bool:
    """Whether the GPU computes in bf16 itself: compute capability 8.0 (Ampere) or newer, and ROCm's GPUs."""
    return torch.version.hip is not None or driver.get_device_capability(with_index(device)) >= (8, 0)


def utilization(device: torch.device) -> float:
    """Fraction of time in which kernels were running, 0 to 1. Raises NVML's errors if it is not supported."""
    return float(driver.utilization(with_index(device))) / 100


def total_bytes(device: torch.device) -> int:
    return int(driver.get_device_properties(with_index(device)).total_memory)


def limit_memory(device: torch.device, limit_bytes: float) -> None:
    """Limit the memory of this process's tensors to `limit_bytes`."""
    driver.set_per_process_memory_fraction(limit_bytes / total_bytes(device), with_index(device))


def memory_limit_bytes(device: torch.device) -> float:
    """Memory limit of this process's tensors: the device's memory unless `limit_memory` set less."""
    return float(driver.get_per_process_memory_fraction(with_index(device)) * total_bytes(device))


def available_bytes(device: torch.device) -> int:
    """Free memory of the device plus what torch's allocator reserves for this process."""
    return int(driver.mem_get_info(with_index(device))[0] + driver.memory_reserved(with_index(device)))


def allocated_bytes(device: torch.device) -> int:
    """Memory of this process's tensors."""
    return int(driver.memory_allocated(with_index(device)))


def reserved_bytes(device: torch.device) -> int:
    """Memory that torch's allocator holds for this process, tensors included."""
    return int(driver.memory_reserved(with_index(device)))


def peak_allocated_bytes(device: torch.device) -> int:
    """Peak of `allocated_bytes` since `reset_peak_memory`."""
    return int(driver.max_memory_allocated(with_index(device)))


def peak_reserved_bytes(device: torch.device) -> int:
    return int(driver.max_memory_reserved(with_index(device)))


def used_bytes(device: torch.device) -> int:
    """Memory in use on the device by all: torch's allocator, DALI's pools, CUDA's contexts and other processes."""
    free, total = driver.mem_get_info(with_index(device))
    return int(total - free)


def allocator_retries(device: torch.device) -> int:
    """Number of allocations of this process that succeeded only after torch had freed cached blocks."""
    statistics = driver.memory_stats(with_index(device))
    return int(statistics.get("num_alloc_retries", 0))


def reset_peak_memory(device: torch.device) -> None:
    driver.reset_peak_memory_stats(with_index(device))


def empty_cache() -> None:
    """Return reserved memory that no tensor uses to the device."""
    driver.empty_cache()


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all launched work."""
    driver.synchronize(with_index(device))


def current_stream(device: torch.device) -> Any:
    return driver.current_stream(with_index(device))


def record_event(device: torch.device, *, timing: bool = True, stream: Any = None) -> Any:
    """Record an event on `stream`, by default the current one; `timing`: for `elapsed_s`. The host does not wait."""
    event = driver.Event(enable_timing=timing)
    event.record(current_stream(device) if stream is None else stream)
    return event


def copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Start copying a GPU's tensor to pinned memory. The host does not wait: record an event to know when it ends."""
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)


@contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """Launch the block's work in a stream of its own, for which the current stream waits afterwards."""
    stream, current = driver.Stream(with_index(device)), current_stream(device)
    stream.wait_stream(current)
    with driver.stream(stream):
        yield
    current.wait_stream(stream)


def captured_graph(work: Callable[[], T], *, pool: Any = None) -> tuple[Any, T]:
    """(CUDA graph of the launches of `work`, which are not run, its result). `pool`: memory shared with other graphs.

    Other threads may call CUDA meanwhile, as those of the loader do.
    """
    graph = driver.CUDAGraph()
    with driver.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = work()
    return graph, result


def elapsed_s(first: Any, last: Any) -> float:
    """Device time in seconds between two events, both of which must have completed."""
    return float(first.elapsed_time(last)) / 1e3


def rng_state(device: torch.device) -> torch.Tensor:
    state: torch.Tensor = driver.get_rng_state(with_index(device))
    return state


def set_rng_state(state: torch.Tensor, device: torch.device) -> None:
    driver.set_rng_state(state, with_index(device))


def rng_states() -> list[torch.Tensor]:
    """Random generator states of all CUDA devices; empty without a GPU."""
    return list(driver.get_rng_state_all()) if available() else []


def set_rng_states(states: list[torch.Tensor]) -> None:
    if states:
        driver.set_rng_state_all(states)
