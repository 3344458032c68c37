"""Reads run.jsonl: steps as columns, other records as dicts, binned curves and stage change costs."""

from __future__ import annotations

import json
import math
from array import array
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resolute.console import counted
from resolute.errors import ResoluteError
from resolute.train.score import best_score

__all__ = [
    "SWITCH_STEPS",
    "RunLogReader",
    "change_text",
    "format_duration",
    "is_measurable",
    "noise_s",
    "switch_costs",
]

SWITCH_STEPS = 5  # steps after a stage change that count towards its cost
_MIN_GROUPS = 4  # groups of that many steps that show how much such a group varies
_COLUMNS = ("step", "epoch", "stage", "res", "samples", "wait_s", "compute_s", "lr", "momentum", "loss")

Columns = dict[str, NDArray[np.float64]]


class RunLogReader:
    """The records of run.jsonl. `read` is incremental: it parses only what was appended since the last call."""

    def __init__(self, path: Path) -> None:
        self.path, self._offset, self._lines = path, 0, 0
        self._columns = {name: array("d") for name in _COLUMNS}
        self.other_records: list[dict[str, Any]] = []  # all records except steps

    def read(self) -> list[dict[str, Any]]:
        """Read and return the new records. Raises `ResoluteError` if there is no log or a line is damaged."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except OSError as error:
            raise ResoluteError(
                f"{self.path}: no run log ({error.strerror}), expected the log of a run; name a folder in runs/"
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
                f"{self.path}: line {self._lines} is damaged, expected a JSON record; remove that line"
            ) from None
        return record

    def kind(self, kind: str) -> list[dict[str, Any]]:
        """All records of a kind other than "step"."""
        return [record for record in self.other_records if record["kind"] == kind]

    @property
    def start(self) -> dict[str, Any]:
        return next(iter(self.kind("start")), {})

    @property
    def epochs(self) -> list[dict[str, Any]]:
        return self.kind("epoch")

    @property
    def best_epoch(self) -> dict[str, Any] | None:
        """The epoch whose weights the run keeps in best.pt; None if none was validated.

        Logs of earlier versions do not name it: there, the best one at the largest resolution.
        """
        if named := self.kind("best"):
            return next(epoch for epoch in reversed(self.epochs) if epoch["epoch"] == named[-1]["epoch"])
        scores = [(epoch.get("eval_res") or 0, best_score(epoch), -k) for k, epoch in enumerate(self.epochs)]
        best = max((score for score in scores if score[1] is not None), default=None)
        return None if best is None else self.epochs[-best[2]]

    @property
    def steps(self) -> Columns:
        """A copy of the columns, each float64 (steps,); `time_s` = `wait_s` + `compute_s`."""
        columns = {name: np.array(column) for name, column in self._columns.items()}
        return columns | {"time_s": columns["wait_s"] + columns["compute_s"]}

    def binned(self, limit: int) -> Columns:
        """The steps in about `limit` bins of consecutive steps; no bin spans a stage change.

        Times, rates and losses are means over a bin's `count` steps; `*_max` are maxima, so no outlier is lost.
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


def switch_costs(
    stages: NDArray[np.float64], times_s: NDArray[np.float64], res: NDArray[np.float64]
) -> list[dict[str, Any]]:
    """The cost of each change of stage, or of resolution in a ramp: extra time of the first steps over usual ones.

    `stages`, `times_s`, `res` (px): (steps,). A usual step takes the median time of the stage's steps at the same
    resolution. `cost_s`: time of the first 5 steps - that of usual ones; `steps`: their number, if there are fewer;
    `median_s`: the mean time of usual ones; `slowest_ratio`: the largest ratio of a step to a usual one; `noise_s`: 5th
    and 95th percentile of what later groups of 5 steps at the same resolution took longer than usual ones, None for
    fewer than 4 groups; `from_res`: of the step before, px. In a stage that draws a resolution for each step, only its
    start is a change.
    """
    usual = np.empty_like(times_s)
    for shape in np.unique(np.stack([stages, res]), axis=1).T:
        same = (stages == shape[0]) & (res == shape[1])
        usual[same] = np.median(times_s[same])
    costs = []
    for stage in np.unique(stages):
        steps = np.flatnonzero(stages == stage)
        changes = np.flatnonzero(np.diff(res[steps])) + 1
        is_ramp = len(changes) < len(np.unique(res[steps]))
        starts = [0, *changes.tolist()] if is_ramp else [0]
        for start, end in pairwise([*starts, len(steps)]):
            first = steps[start : min(start + SWITCH_STEPS, end)]
            if not first[0]:
                continue  # why: the start of the run is no change
            groups = steps[start:end][SWITCH_STEPS:]
            groups = groups[: len(groups) // SWITCH_STEPS * SWITCH_STEPS].reshape(-1, SWITCH_STEPS)
            extra_s = (times_s[groups] - usual[groups]).sum(1)
            costs.append(
                {
                    "stage": int(stage),
                    "res": int(res[first[0]]),
                    "from_res": int(res[first[0] - 1]),
                    "in_stage": start > 0,
                    "steps": len(first),
                    "cost_s": float((times_s[first] - usual[first]).sum()),
                    "median_s": float(usual[first].mean()),
                    "slowest_ratio": float((times_s[first] / usual[first]).max()),
                    "noise_s": np.quantile(extra_s, (0.05, 0.95)).tolist() if len(extra_s) >= _MIN_GROUPS else None,
                }
            )
    return costs


def noise_s(cost: dict[str, Any]) -> float | None:
    """The noise of a cost from `switch_costs`, s: 90 % of the other groups of 5 steps differ less from usual ones.

    It is the larger distance from 0 of their 5th and 95th percentile; None if there are fewer than 4 groups.
    """
    return None if cost["noise_s"] is None else max(map(abs, cost["noise_s"]))


def is_measurable(cost: dict[str, Any]) -> bool:
    """Whether a cost from `switch_costs` is larger than its noise, see `noise_s`; not if the noise is unknown."""
    noise = noise_s(cost)
    return noise is not None and cost["cost_s"] > noise


def change_text(cost: dict[str, Any]) -> str:
    """A cost from `switch_costs` in words, with its noise: "no measurable cost at 128 -> 160 px: first 5 steps …"."""
    before, res, noise = cost["from_res"], cost["res"], noise_s(cost)
    change = f"{before} -> {res} px" if before != res else f"stage {cost['stage'] - 1} -> {cost['stage']}"
    largest = max(abs(cost["cost_s"]), noise or 0.0)
    scale, digits, unit = (1e3, 1, "ms") if largest < 0.1 else (1.0, 2 if largest < 1 else 1, "s")
    first = f"first {counted(cost['steps'], 'step')} {scale * cost['cost_s']:+.{digits}f} {unit}"
    if noise is None:
        return f"change {change}: {first}; too few other steps to know the noise"
    what = f"change {change} cost {scale * cost['cost_s']:.{digits}f} {unit}"
    if not is_measurable(cost):
        what = f"no measurable cost at {change}"
    return f"{what}: {first}, other groups of {SWITCH_STEPS} steps ±{scale * noise:.{digits}f} {unit}"


def format_duration(seconds: float) -> str:
    """`seconds` as text in ms, s, min or h."""
    if seconds < 1:
        return f"{1e3 * seconds:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
