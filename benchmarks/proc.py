"""Linux's view of processes and files: process trees, their CPU time, and the page cache.

Imports only the standard library, because FFCV's interpreter, without Resolute's dependencies, imports it too.
"""

from __future__ import annotations

import ctypes
import os
import resource
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

__all__ = [
    "adopt_orphans",
    "cpu_time",
    "descendants",
    "evict_files",
    "read_files",
    "stat_fields",
    "timed_with_children",
]

_PR_SET_CHILD_SUBREAPER = 36  # Source: prctl(2)


def stat_fields(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third (state) on; [] if the process does not exist. Source: proc(5)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # why: the name may hold spaces
    except OSError:
        return []


def descendants(pid: int) -> list[int]:
    """The process's children, their children and so on, parents before children; those that have ended included."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        if fields := stat_fields(int(path.name)):
            children.setdefault(int(fields[1]), []).append(int(path.name))
    family = [pid]
    for member in family:  # grows meanwhile
        family += children.get(member, [])
    return family[1:]


def cpu_time(root: int) -> tuple[float, int, int] | None:
    """(CPU s, processes, threads) of process `root` and its descendants; None if it does not exist.

    The time of an ended child counts once its parent has waited for it.
    """
    family = [fields for fields in map(stat_fields, (root, *descendants(root))) if fields]
    if not stat_fields(root):
        return None
    ticks = sum(int(value) for fields in family for value in fields[11:15])  # utime, stime, cutime, cstime
    return ticks / os.sysconf("SC_CLK_TCK"), len(family), sum(int(fields[17]) for fields in family)


def adopt_orphans() -> None:
    """From now on this process waits for all its descendants, so that the CPU time of orphans counts too."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def timed_with_children(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and CPU seconds of all processes that `work` starts, of which none must outlive it for long.

    `adopt_orphans` has to be called before.
    """
    began, cpu_s = time.perf_counter(), _children_cpu_s()
    work()
    elapsed_s = time.perf_counter() - began
    return elapsed_s, _children_cpu_s() - cpu_s


def _children_cpu_s() -> float:
    """CPU seconds of all ended descendants; waits for the orphans among them, such as prep's fork server."""
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def read_files(paths: Iterable[Path]) -> None:
    """Read files into the page cache."""
    for path in paths:
        with path.open("rb") as file:
            while file.read(1 << 24):
                pass


def evict_files(paths: Iterable[Path]) -> None:
    """Evict files from the page cache, if the system complies."""
    os.sync()  # why: dirty pages cannot be evicted
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
