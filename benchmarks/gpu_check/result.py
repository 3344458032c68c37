"""`Settings` of the check, the `Result` of a part, and its `Report` while it runs."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

__all__ = ["Part", "Report", "Result", "Settings"]

Verdict = Literal["passed", "failed", "skipped"]
Table = tuple[list[str], list[list[str]]]  # headings, rows


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the check: its name, its title in the report, and its time limit on a GPU, in s."""

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
    rounds: int  # of a measurement that is compared with another
    stage_epochs: int  # of the switch cost

    @classmethod
    def for_device(cls, device: str, *, folder: Path, shards: str, threads: int, memory_gib: float = 0) -> Settings:
        """`memory_gib`: of the GPU. On a large one, computing a batch takes longer than launching its step."""
        common: dict[str, Any] = {"device": device, "folder": str(folder), "shards": shards, "threads": threads}
        if device == "cpu":
            return cls(
                **common,
                resolutions=(32, 48),
                photos=100,
                batch_size=16,
                train_batch_size=8,
                model="test_resnet",
                seconds=0.2,
                rounds=2,
                stage_epochs=2,
            )
        train_batch_size = 1024 if memory_gib > 70 else 256 if memory_gib > 36 else 64
        return cls(
            **common,
            resolutions=(128, 160, 224),
            photos=3000,
            batch_size=1024,
            train_batch_size=train_batch_size,
            model="resnet50",
            seconds=1.5,
            rounds=3,
            stage_epochs=3,
        )

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
    """Outcome of a part: a verdict, one line that explains it, and tables for the report."""

    verdict: Verdict
    summary: str
    tables: list[Table] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)  # raw numbers, for the JSON file

    @classmethod
    def judged(cls, good: bool, summary: str) -> Result:
        return cls(verdict="passed" if good else "failed", summary=summary)


class Report:
    """The tables and raw numbers of a part, written to its file row by row: a crash or a hang loses none of them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.tables: list[Table] = []
        self.values: dict[str, Any] = {}
        self.save(Result(verdict="failed", summary="no result"))

    def table(self, *headings: str) -> None:
        """Begin a table; a heading that ends in # has numbers below it."""
        self.tables.append((list(headings), []))

    def row(self, *cells: Any) -> None:
        self.tables[-1][1].append([str(cell) for cell in cells])
        print(*cells, sep=" | ", flush=True)
        self.save(Result(verdict="failed", summary="no result"))

    def save(self, result: Result) -> None:
        """Replace the file by `result` with the tables and numbers so far."""
        whole = dataclasses.replace(result, tables=self.tables, values=self.values)
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(dataclasses.asdict(whole)), encoding="utf-8")
        partial.replace(self._path)

    @staticmethod
    def load(path: Path) -> Result | None:
        """The result in a part's file, None if there is none."""
        return Result(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None
