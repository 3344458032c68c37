"""The options of the soak test."""

from __future__ import annotations

from pathlib import Path

from resolute.settings import setting, settings

__all__ = ["SoakOptions"]


@settings("")
class SoakOptions:
    seed: int = setting(0, "seed of all events")
    kills: int = setting(300, "minimum number of kills", ge=0)
    faults: int = setting(100, "minimum number of storage faults", ge=0)
    minutes: float = setting(60.0, "start no cycle after that")
    only: tuple[str, ...] = setting((), "scenarios, such as prep-folder, prep-jobs, verify, train-1, eval")
    index: int | None = setting(None, "only the cycle of this number of each scenario")
    out: Path | None = setting(None, "JSON file to write (default: bench/soak.json)")
