"""The part `device`: what the machine is and has."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
import sysconfig
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .result import Report, Result, Settings

__all__ = ["device"]

_QUERIED = "name,driver_version,pcie.link.gen.current,pcie.link.width.current,mig.mode.current,power.limit"
_PACKAGES = (
    "nvidia-dali-cuda130",
    "nvidia-dali-cuda120",
    "nvidia-nvimgcodec-cu13",
    "nvidia-nvimgcodec-cu12",
    "nvidia-nvjpeg",
    "nvidia-nvjpeg-cu12",
    "triton",
)
_COPIED_MIB = 256


def device(settings: Settings, report: Report) -> Result:
    """Versions, links and tools; fails if this build of torch has no kernels for the GPU, or Triton cannot compile."""
    import torch

    from resolute.benchmarks.record import machine, versions

    facts: dict[str, Any] = {**machine(torch.device(settings.device)), **versions([])}
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            facts[name] = version(name)
    compilers = [path for path in map(shutil.which, (os.environ.get("CC") or "gcc", "clang")) if path]
    facts["C compiler"] = Path(compilers[0]).name if compilers else "none"
    facts["Python.h"] = Path(sysconfig.get_paths()["include"], "Python.h").exists()
    facts["compute-sanitizer"] = "found" if shutil.which("compute-sanitizer") else "none"
    problem = ""
    if settings.on_gpu:
        problem = _gpu_facts(facts)
    report.table("", "")
    for name, value in facts.items():
        report.row(name, value)
    report.values |= facts
    if settings.on_gpu and not (compilers and facts["Python.h"]):
        problem = problem or "Triton needs a C compiler and Python.h"
    name = str(facts["gpu"] or facts["cpu"])
    return Result.judged(not problem, f"{name}: {problem}" if problem else name)


def _gpu_facts(facts: dict[str, Any]) -> str:
    """Add what only a GPU has; returns what is wrong, or ""."""
    import torch

    with contextlib.suppress(OSError, subprocess.SubprocessError):
        facts["nvidia-smi"] = subprocess.run(
            ["nvidia-smi", f"--query-gpu={_QUERIED}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=15,
            check=True,
        ).stdout.strip()
    facts |= {"CUDA of torch": torch.version.cuda, "cuDNN": torch.backends.cudnn.version()}
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        facts[f"cuda:{i}"] = (
            f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}, {gpu.total_memory / 2**30:.1f} GiB, "
            f"{gpu.multi_processor_count} multiprocessors"
        )
    try:
        ctypes.CDLL("libnvcuvid.so.1")
        facts["libnvcuvid"] = "found"
    except OSError:
        facts["libnvcuvid"] = "not found: the GPU's JPEG engines cannot be used"
    for pinned in (True, False):
        facts[f"host to device, {'pinned' if pinned else 'pageable'}"] = f"{_copy_rate(pinned):.1f} GB/s"
    major, minor = torch.cuda.get_device_capability()
    built = torch.cuda.get_arch_list()
    facts["torch's architectures"] = " ".join(built)
    numbers = [int(number) for number in re.findall(r"sm_(\d+)", " ".join(built))]
    if any(number // 10 == major and number % 10 <= minor for number in numbers):  # code for 8.0 runs on 8.6 too
        return ""
    return f"this torch has no kernels for compute capability {major}.{minor}"


def _copy_rate(pinned: bool) -> float:
    """GB/s of copies from the host to the GPU."""
    import torch

    host = torch.zeros(_COPIED_MIB * 2**20, dtype=torch.uint8, pin_memory=pinned)
    device = torch.empty_like(host, device="cuda")
    device.copy_(host)
    torch.cuda.synchronize()  # sync: begins a timed interval
    began = time.perf_counter()
    for _ in range(4):
        device.copy_(host, non_blocking=True)
    torch.cuda.synchronize()  # sync: ends it
    return 4 * host.numel() / (time.perf_counter() - began) / 1e9
