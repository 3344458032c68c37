"""Number of CPU cores available to this process; all defaults for threads and workers use it."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

__all__ = ["available_cpus", "cpus_per_process", "use_cpus"]

_CGROUP = Path("/sys/fs/cgroup")
# Processes on this machine: of torchrun (also Accelerate and Lightning), Open MPI, MPICH and Intel MPI, MVAPICH2
_LOCAL_SIZES = (
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_LOCAL_SIZE",
)


def available_cpus(*, cgroup: Path = _CGROUP, membership: Path = Path("/proc/self/cgroup")) -> int:
    """CPU cores in the affinity mask, limited by the cgroup's CPU quota (rounded up); at least 1.

    Source: Linux kernel documentation, cgroup-v2 (`cpu.max`) and CFS bandwidth control (`cpu.cfs_quota_us`).
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for quota in _quotas(cgroup, membership):
        cores = min(cores, max(1, math.ceil(quota)))
    return max(1, cores)


def cpus_per_process() -> int:
    """CPU cores for each of the processes that a launcher has started on this machine; all for a single one.

    torchrun and MPI say how many processes they are, and share `available_cpus`. Slurm may bind each process to its own
    cores, so that its share is one of those that the job has on this machine. Processes that a program starts itself,
    as by torch.multiprocessing.spawn, are not counted.
    """
    cpus = available_cpus()
    if processes := next(filter(None, map(_number, _LOCAL_SIZES)), 0):
        return max(1, cpus // processes)
    if not (tasks := _slurm_tasks()):
        return cpus
    return min(cpus, _number("SLURM_CPUS_PER_TASK") or max(1, (_number("SLURM_CPUS_ON_NODE") or cpus) // tasks))


def _slurm_tasks() -> int:
    """Processes of this Slurm job step on this machine; 0: unknown.

    Source: Slurm's manual, srun(1), output environment variables.
    """
    counts: list[int] = []
    for part in os.environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):  # such as 4(x2),3 for three machines
        if found := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part):
            counts += [int(found[1])] * int(found[2] or 1)
    node = os.environ.get("SLURM_NODEID", "0")
    if node.isdecimal() and int(node) < len(counts):
        return counts[int(node)]
    return _number("SLURM_NTASKS_PER_NODE")


def _number(variable: str) -> int:
    """A number from the environment; 0 if it is not there, or none."""
    value = os.environ.get(variable, "")
    return int(value) if value.isdecimal() else 0


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
