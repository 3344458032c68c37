"""CPU time of a process and all its descendants."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["tree"]


def tree(root: int) -> tuple[float, int, int] | None:
    """(CPU s, processes, threads) of process `root` and its living descendants; None without Linux's /proc.

    The time of an ended child counts once its parent has waited for it.
    """
    results: dict[int, tuple[int, float, int]] = {}
    try:
        tick = os.sysconf("SC_CLK_TCK")
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    text = (entry / "stat").read_text()
                except OSError:  # it has just ended
                    continue
                # why: the name, in brackets, may hold spaces. Source: proc(5), fields 3 onwards
                fields = text[text.rindex(")") + 2 :].split()
                used = sum(map(int, fields[11:15])) / tick  # utime, stime, cutime, cstime
                results[int(entry.name)] = (int(fields[1]), used, int(fields[17]))
    except (OSError, ValueError):
        return None
    if root not in results:
        return None
    inside, new = {root}, {root}
    while new:
        new = {pid for pid, (parent, _, _) in results.items() if parent in new} - inside
        inside |= new
    return sum(results[pid][1] for pid in inside), len(inside), sum(results[pid][2] for pid in inside)
