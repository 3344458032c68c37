"""The record of machine, versions and commit in every result, without host names or paths."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import features

from pipeline.cpu_count import available_cpus
from pipeline.errors import ResoluteError

if TYPE_CHECKING:
    import torch

    from pipeline.dataset.shard_set import ShardSet

__all__ = ["commit", "cpu_flags", "find_device", "machine", "read_into_cache", "versions"]

_PACKAGES = ("torch", "torchvision", "timm", "nvidia-dali-cuda130", "nvidia-dali-cuda120", "numpy", "pillow")


def find_device(name: str) -> torch.device:
    """The device for `--device`; "auto" is a GPU if there is one. Raises `ResoluteError` if it does not exist."""
    if name not in ("auto", "cpu", "cuda"):
        raise ResoluteError(f"--device: got {name}, expected auto, cpu or cuda; choose one")
    import torch  # why here: command line errors should not wait for the import

    if name == "cuda" and not torch.cuda.is_available():
        raise ResoluteError("--device cuda: no CUDA device found, expected one; use --device cpu")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _cpuinfo(field: str) -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == field:
                return value.strip()
    return ""


def cpu_flags() -> frozenset[str]:
    """Instruction set extensions as Linux names them; empty elsewhere."""
    return frozenset(_cpuinfo("flags").split())


def machine(device: torch.device | None = None) -> dict[str, Any]:
    """The processor, and the GPU if `device` is one."""
    record: dict[str, Any] = {
        "cpu": _cpuinfo("model name") or platform.processor() or platform.machine(),
        "cores": available_cpus(),
        "ram_gib": round(ram_bytes() / 2**30, 1),
        "system": platform.system(),
        "load_before": round(os.getloadavg()[0], 2),  # load average of the last minute: above 0, other work ran
        "gpu": None,
    }
    if device and device.type == "cuda":
        import torch

        gpu = torch.cuda.get_device_properties(device)
        record |= {"gpu": gpu.name, "gpu_memory_gib": round(gpu.total_memory / 2**30, 1)}
    return record


def ram_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def versions(*more: str) -> dict[str, str | None]:
    """Versions of Python and of those of the usual packages and `more` that are installed."""
    installed: dict[str, str | None] = {"python": platform.python_version()}
    for name in (*_PACKAGES, *more):
        with contextlib.suppress(PackageNotFoundError):
            installed["nvidia-dali" if name.startswith("nvidia-dali") else name] = version(name)
    return installed | {"libjpeg_turbo (Pillow)": features.version("libjpeg_turbo")}


def commit() -> str | None:
    """The commit of the running code, with "-dirty" if tracked files are modified; None outside git."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=Path(__file__).parent, capture_output=True, text=True, timeout=30, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def read_into_cache(shards: ShardSet) -> bool:
    """Read all training shards once if they take at most a quarter of the memory; returns whether they did.

    Otherwise the first measurement would pay for a cold page cache.
    """
    paths = {shards.path(res, shard) for res in shards.resolutions for shard in shards.splits["train"].shards}
    if sum(path.stat().st_size for path in paths) > ram_bytes() // 4:
        return False
    for path in paths:
        with path.open("rb") as file:
            while file.read(1 << 24):
                pass
    return True
