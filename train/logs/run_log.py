"""What does a run's log say so far? Its steps as columns, read once, and thinned without losing a maximum."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import ResoluteError

__all__ = ["SWITCH_STEPS", "RunLogReader", "best_epoch", "best_top1", "is_better", "switch_costs"]

SWITCH_STEPS = 5
_COLUMNS = ("step", "stage", "res", "samples", "wait_s", "compute_s", "lr", "momentum", "loss")

Columns = dict[str, NDArray[np.float64]]


class RunLogReader:
    """The records of run.jsonl. `read` takes what was added since the last call: an epoch costs only its own lines."""

    def __init__(self, path: Path) -> None:
        self.path, self._offset, self._lines = path, 0, 0
        self._columns = {name: array("d") for name in _COLUMNS}
        self.other_records: list[dict[str, Any]] = []  # every record that is no step

    def read(self) -> list[dict[str, Any]]:
        """The new records. Raises `ResoluteError` if there is no log, or a line of it is damaged."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except OSError as error:
            raise ResoluteError(
                f"{self.path}: no run log ({error.strerror}), expected one; name a folder below runs/"
            ) from None
        text = text[: text.rfind(b"\n") + 1]  # why: the last line may still be being written
        new = [self._record(line) for line in text.splitlines()]
        self._offset += len(text)
        for record in new:
            if record["kind"] == "step":
                for name, column in self._columns.items():
                    column.append(record.get(name, math.nan))
            else:
                self.other_records.append(record)
        return new

    def _record(self, line: bytes) -> dict[str, Any]:
        self._lines += 1
        try:
            record: dict[str, Any] = json.loads(line)
            record["kind"]
        except (ValueError, KeyError, TypeError):
            raise ResoluteError(
                f"{self.path}: line {self._lines} is damaged, expected one record; remove that line"
            ) from None
        return record

    def kind(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in self.other_records if record["kind"] == kind]

    @property
    def start(self) -> dict[str, Any]:
        return next(iter(self.kind("start")), {})

    @property
    def epochs(self) -> list[dict[str, Any]]:
        return self.kind("epoch")

    @property
    def steps(self) -> Columns:
        """One float64 array (steps,) a column, a copy; `time_s` is wait and compute."""
        columns = {name: np.array(column) for name, column in self._columns.items()}
        return columns | {"time_s": columns["wait_s"] + columns["compute_s"]}

    def binned(self, limit: int) -> Columns:
        """At most about `limit` bins of neighbouring steps, none across a stage change.

        Means of times, rates and losses, `count` steps each; `*_max` are the largest single steps of a bin.
        """
        steps = self.steps
        n = len(steps["step"])
        if n == 0:
            return {**steps, **{name: np.zeros(0) for name in ("count", "images_per_s", "time_s_max", "wait_s_max")}}
        first = np.concatenate([[0], np.flatnonzero(np.diff(steps["stage"])) + 1, [n]])
        width = -(-n // limit)
        starts = np.concatenate([np.arange(a, b, width) for a, b in pairwise(first.tolist())])
        count = np.diff(np.append(starts, n)).astype(np.float64)
        bins = {name: np.add.reduceat(column, starts) / count for name, column in steps.items()}
        bins |= {name: steps[name][starts] for name in ("step", "stage", "res")}
        bins |= {f"{name}_max": np.maximum.reduceat(steps[name], starts) for name in ("time_s", "wait_s")}
        return bins | {"count": count, "images_per_s": bins["samples"] / bins["time_s"]}


def best_top1(epoch: dict[str, Any]) -> float:
    """Of raw and averaged weights, as a part of one."""
    return max(epoch["top1"] or 0.0, epoch["ema_top1"] or 0.0)


def best_epoch(epochs: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """The best validated epoch so far, in the sense of `is_better`, at the last validation's resolution; None if none.
    """
    validated = [epoch for epoch in epochs if epoch["top1"] is not None]
    best = None
    for epoch in validated:
        if best is None or is_better(best_top1(epoch), epoch.get("eval_res"), best_top1(best), best.get("eval_res"),
                                     last_res=validated[-1].get("eval_res")):  # fmt: skip
            best = epoch
    return best


def is_better(top1: float, res: int | None, best: float, best_res: int | None, *, last_res: int | None) -> bool:
    """Whether a validation (top-1 at `res` px) takes the place of the best one before it (`best` at `best_res` px).

    Accuracies at different resolutions do not compare: a validation at another resolution is always better, unless
    the best one was already made at `last_res`, that of the run's last validation, at which its weights will be used.
    """
    return top1 > best if res == best_res else best_res != last_res


def switch_costs(stages: NDArray[np.float64], times_s: NDArray[np.float64]) -> list[dict[str, Any]]:
    """For each stage change: what the first steps cost beyond the stage's median step, and the slowest of them.

    `stages`, `times_s` (steps,). `cost_s`: time of the first 5 steps - 5 medians; `slowest_ratio`: slowest / median.
    """
    costs = []
    for stage in np.unique(stages)[1:]:
        times = times_s[stages == stage]
        first, median = times[:SWITCH_STEPS], float(np.median(times))
        costs.append({
            "stage": int(stage), "cost_s": float(first.sum() - len(first) * median), "median_s": median,
            "slowest_ratio": float(first.max() / median),
        })  # fmt: skip
    return costs
