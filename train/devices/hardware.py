"""The machine's description for run.jsonl, and memory use and GPU utilisation."""

from __future__ import annotations

import functools
import os
import platform
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch

from resolute import cuda
from resolute.machine import available_cpus

__all__ = [
    "GpuUtilization",
    "bf16_is_emulated",
    "describe",
    "gpu_memory",
    "peak_memory_bytes",
    "process_age_s",
    "reset_peak_memory",
]

_EVERY_S = 2.0  # NVML's own figure is a mean of the last 1/6 to 1 s


def describe(device: torch.device, *, threads: int) -> dict[str, Any]:
    """The machine record of run.jsonl, without host names or paths; None for what the machine does not have."""
    on_gpu = device.type == "cuda"
    return {
        "system": platform.system(),
        "cpu": _cpuinfo("model name") or platform.processor() or platform.machine(),
        "threads": threads,
        "cores": available_cpus(),
        "ram_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpu": cuda.device_name(device) if on_gpu else None,
        "gpu_memory_bytes": cuda.total_bytes(device) if on_gpu else None,
        "cuda": torch.version.cuda if on_gpu else None,
    }


def _cpuinfo(*fields: str) -> str:
    """The value of the first of `fields` in Linux's /proc/cpuinfo; "" without it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    values = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in values if name.strip() in fields), "")


@functools.cache
def _cpu_flags() -> frozenset[str]:
    return frozenset(_cpuinfo("flags", "Features").split())  # of x86, of ARM


def bf16_is_emulated(device: torch.device) -> bool:
    """Whether `device` has no bf16 instructions, which makes bf16 slower than float32. False for CPUs without flags.

    Measured on such a CPU (AVX512 alone): 15.8 ms for a product of two 256 x 256 matrices, 0.54 ms in float32.
    """
    if device.type == "cuda":
        return not cuda.has_bf16(device)
    flags = _cpu_flags()
    return len(flags) > 0 and flags.isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})


def process_age_s() -> float:
    """Seconds since this process started, in ticks of 10 ms; without /proc, its CPU time instead."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        booted_s = float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
    except OSError:
        return time.process_time()
    return booted_s - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def peak_memory_bytes(device: torch.device) -> int:
    """On a GPU: peak of tensor memory since `reset_peak_memory`. On a CPU: peak resident memory of the process."""
    if device.type == "cuda":
        return cuda.peak_allocated_bytes(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def gpu_memory(device: torch.device) -> dict[str, int]:
    """For the log: torch's reserved memory at its peak, and what all on the device use now, with the pools of DALI,
    which do not shrink. Empty on a CPU."""
    if device.type != "cuda":
        return {}
    return {"reserved_bytes": cuda.peak_reserved_bytes(device), "device_bytes": cuda.used_bytes(device)}


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        cuda.reset_peak_memory(device)


class GpuUtilization:
    """Fraction of the time in which the GPU runs kernels, from NVML."""

    def __init__(self, device: torch.device) -> None:
        self._on = device.type == "cuda"
        self._device, self._polled = device, 0.0

    def poll(self) -> float | None:
        """0 to 1; None within 2 s of the last value, or if NVML cannot provide it."""
        if not self._on or time.monotonic() - self._polled < _EVERY_S:
            return None
        self._polled = time.monotonic()
        try:
            return cuda.utilization(self._device)
        except Exception:  # why so broad: missing NVML support (MIG, some containers) must not end a run
            self._on = False
            return None
