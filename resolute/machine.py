"""Number of CPU cores available to this process; all defaults for threads and workers use it."""

from __future__ import annotations

import math
import os
from pathlib import Path

__all__ = ["available_cpus", "cpus_per_process", "use_cpus"]

_CGROUP = Path("/sys/fs/cgroup")


def available_cpus(*, cgroup: Path = _CGROUP, membership: Path = Path("/proc/self/cgroup")) -> int:
    """CPU cores in the affinity mask, limited by the cgroup's CPU quota (rounded up); at least 1.

    Source: Linux kernel documentation, cgroup-v2 (`cpu.max`) and CFS bandwidth control (`cpu.cfs_quota_us`).
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for quota in _quotas(cgroup, membership):
        cores = min(cores, max(1, math.ceil(quota)))
    return max(1, cores)


def cpus_per_process() -> int:
    """CPU cores for each of the processes that torchrun has started on this machine; all of them for a single one."""
    return max(1, available_cpus() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def use_cpus(count: int) -> None:
    """Restrict this process, and those that it starts, to the first `count` of its CPU cores; 0: no limit."""
    if count:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])


def _quotas(root: Path, membership: Path) -> list[float]:
    """CPU quotas, in cores, of this process's cgroup and its ancestors."""
    quotas = []
    for line in _read(membership).splitlines():
        _, controllers, path = line.split(":", 2) if line.count(":") >= 2 else ("", "none", "")
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root if not controllers else next((p for p in (root / "cpu", root / controllers) if p.is_dir()), root)
        relative = Path(path.lstrip("/"))
        for folder in [base / relative, *(base / parent for parent in relative.parents), base]:
            quota = _cgroup_v2(folder) if not controllers else _cgroup_v1(folder)
            if quota is not None:
                quotas.append(quota)
    return quotas


def _cgroup_v2(folder: Path) -> float | None:
    words = _read(folder / "cpu.max").split()
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0] != "max" else None


def _cgroup_v1(folder: Path) -> float | None:
    quota, period = _read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip()
    return int(quota) / int(period) if quota and period and int(quota) > 0 else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
