"""What machine does a run have, and how much of it is in use?"""

from __future__ import annotations

import os
import platform
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch

from pipeline import cuda
from pipeline.cpu_count import available_cpus

__all__ = ["GpuUtilization", "describe", "peak_memory_bytes", "process_age_s", "reset_peak_memory"]

_EVERY_S = 2.0  # NVML's own figure is a mean of the last 1/6 to 1 s


def describe(device: torch.device, *, threads: int) -> dict[str, Any]:
    """The record of the machine in run.jsonl: no host name, no path. What there is none of is None."""
    on_gpu = device.type == "cuda"
    return {
        "system": platform.system(), "cpu": _cpu(), "threads": threads,
        "cores": available_cpus(),
        "ram_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpu": cuda.device_name(device) if on_gpu else None,
        "gpu_memory_bytes": cuda.total_bytes(device) if on_gpu else None,
        "cuda": torch.version.cuda if on_gpu else None,
    }  # fmt: skip


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def process_age_s() -> float:
    """Since this process began, to a tick of 10 ms; where the system does not tell, the CPU time it has used."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        booted_s = float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
    except OSError:
        return time.process_time()
    return booted_s - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def peak_memory_bytes(device: torch.device) -> int:
    """On a GPU: most that tensors held since `reset_peak_memory`. On a CPU: most that the process ever held."""
    if device.type == "cuda":
        return cuda.peak_allocated_bytes(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        cuda.reset_peak_memory(device)


class GpuUtilization:
    """Part of the time in which the GPU ran kernels, from NVML."""

    def __init__(self, device: torch.device) -> None:
        self._on = device.type == "cuda"
        self._device, self._asked = device, 0.0

    def poll(self) -> float | None:
        """0 to 1; None if it was asked less than 2 s ago, or nothing can tell."""
        if not self._on or time.monotonic() - self._asked < _EVERY_S:
            return None
        self._asked = time.monotonic()
        try:
            return cuda.utilization(self._device)
        except Exception:  # why: what NVML cannot do (MIG, some containers) ends no run; the table shows "-"
            self._on = False
            return None
