"""The protocol of a logger, and the values that all of them receive: points and configuration from run.jsonl."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from resolute.files import atomic_write
from resolute.train.logs.score import METRICS

__all__ = ["Logger", "Point", "Run", "SentPoints", "configuration", "flat", "points"]

_METRICS = tuple(metric.key for metrics in METRICS.values() for metric in metrics)
_NAMES = {
    "step": ("wait_s", "compute_s", "lr", "momentum", "loss"),
    "epoch": ("epoch", "stage", "res", "images_per_s", "stall_frac", "loss", "eval_loss", "ema_eval_loss", *_METRICS,
              *(f"ema_{name}" for name in _METRICS), "memory_bytes", "gpu_frac"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Point:
    """The values of a training step or of an epoch; `step`: 0-based optimizer step, of an epoch its last."""

    kind: str  # "step" or "epoch"
    step: int
    values: dict[str, float]  # by "KIND/NAME"; the names are those of run.jsonl


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run as loggers see it. `start`: the first record of its log."""

    folder: Path
    start: Mapping[str, Any]


class Logger(Protocol):
    """A destination of scalars. Its constructor takes a `Run`; all calls come from one thread of its own and may block.

    Any exception ends the logger, never the training. Every process of a run creates the logger again and calls `add`
    with all points of run.jsonl, those of earlier processes included: a logger rewrites its files (TensorBoard, CSV) or
    leaves out what it has already sent (`SentPoints`).
    """

    place: str  # where to look at the run: a path, URL or command

    def add(self, new: Sequence[Point]) -> None:
        """Show the next points of the run, in order."""

    def close(self, *, finished: bool) -> None:
        """Send everything. `finished`: the run is complete; otherwise it may be resumed."""


def points(records: Iterable[Mapping[str, Any]], *, step: int = 0) -> Iterator[Point]:
    """The points of the next records of a log. `step`: of the last point before them."""
    for record in records:
        kind = record["kind"]
        if kind == "step":
            step = record["step"]
        if kind in _NAMES:
            values = {f"{kind}/{name}": record[name] for name in _NAMES[kind] if record.get(name) is not None}
            yield Point(kind=kind, step=step, values=values)


def configuration(start: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """`recipe`: all values of the recipe; `environment`: data, machine and versions, from the log's first record."""
    left_out = ("kind", "recipe_text", "recipe_values", "stages", "class_names", "class_samples")
    return {"recipe": start.get("recipe_values", {}),
            "environment": {name: value for name, value in start.items() if name not in left_out}}  # fmt: skip


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested tables as text by dotted name, such as `recipe.stages.0.res`; lists of numbers stay whole, as JSON."""
    result: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
            value = {str(number): item for number, item in enumerate(value)}
        if isinstance(value, Mapping):
            result |= flat(value, f"{prefix}{name}.")
        else:
            result[f"{prefix}{name}"] = value if isinstance(value, str) else json.dumps(value)
    return result


class SentPoints:
    """RUN/logger-NAME.json: the id of the run at a service, and the number of points that it has received.

    A resumed process continues that run and leaves out these points, which a resume may compute again. A folder in
    which another recipe or set is trained starts a new run.
    """

    def __init__(self, name: str, run: Run) -> None:
        self._path = run.folder / f"logger-{name}.json"
        self._identity = [run.start.get("recipe_hash"), run.start.get("shards_hash")]
        state = json.loads(self._path.read_text(encoding="utf-8")) if self._path.exists() else {}
        if state.get("identity") != self._identity:
            state = {}
        self.id: str | None = state.get("id")
        self.count: int = state.get("points", 0)
        self._seen = 0

    def unsent(self, new: Sequence[Point]) -> Sequence[Point]:
        """The points of `new` that no process has sent."""
        skipped = min(len(new), max(0, self.count - self._seen))
        self._seen += len(new)
        return new[skipped:]

    def store(self, id_: str) -> None:
        """Remember that the service's run `id_` has all points that `unsent` has seen. Raises `OSError`."""
        self.id, self.count = id_, max(self.count, self._seen)
        atomic_write(self._path, json.dumps({"identity": self._identity, "id": id_, "points": self.count}) + "\n")
