"""Settings that every part of the check receives, and the result that it returns."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

__all__ = ["Part", "Result", "Settings"]

Verdict = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True, kw_only=True)
class Part:
    """A step of the check: its name, its title in the report, and its time limit on a GPU and on a CPU."""

    name: str
    title: str
    limit_s: float


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Sizes of the check. Those for a CPU only show that the check itself works; its times mean nothing."""

    device: str  # cuda or cpu
    folder: str  # of all output
    shards: str  # the set that the check reads
    threads: int
    resolutions: tuple[int, ...]
    photos: int  # of the set that the check makes
    batch_size: int  # of the loader alone
    train_batch_size: int
    model: str  # timm's name
    seconds: float  # length of a measurement
    stage_epochs: int  # of the switch cost

    @classmethod
    def for_device(cls, device: str, *, folder: Path, shards: str, threads: int, memory_gib: float = 0) -> Settings:
        """`memory_gib`: of the GPU."""
        common: dict[str, Any] = {"device": device, "folder": str(folder), "shards": shards, "threads": threads}
        if device == "cpu":
            return cls(**common, resolutions=(32, 48), photos=100, batch_size=16, train_batch_size=8,
                       model="test_resnet", seconds=0.2, stage_epochs=2)  # fmt: skip
        return cls(**common, resolutions=(128, 160, 224), photos=3000, batch_size=512,
                   train_batch_size=256 if memory_gib > 36 else 64, model="resnet50", seconds=1.5,
                   stage_epochs=3)  # fmt: skip

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Settings:
        values = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**values, "resolutions": tuple(values["resolutions"])})


@dataclass(frozen=True, kw_only=True)
class Result:
    """Outcome of a part: a verdict, one line that explains it, and tables (headings, rows) for the report."""

    verdict: Verdict
    summary: str
    tables: list[tuple[list[str], list[list[str]]]] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)  # raw numbers, for the JSON file

    @classmethod
    def judged(cls, good: bool, summary: str, **more: Any) -> Result:
        return cls(verdict="passed" if good else "failed", summary=summary, **more)
