"""Loggers, which show the scalars of run.jsonl in other tools: CSV files, TensorBoard, Weights & Biases and MLflow.

The training calls them at its start, after each epoch and at its end. The first exception of a logger is printed as one
line, and the logger is off for the rest of the process; so it is if one call took over `_MOST_S`. A service that does
not answer raises one by the timeouts below.
"""

from __future__ import annotations

import csv
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from resolute.console import say
from resolute.errors import ResoluteError, check_installed
from resolute.files import atomic_write
from resolute.train.score import METRICS

from .run_log import RunLogReader

__all__ = ["LOGGERS", "Logger", "Loggers", "Point", "check_loggers", "configuration", "flat"]

_MOST_S = 30.0
_METRICS = tuple(metric.key for metrics in METRICS.values() for metric in metrics)
_NAMES = {
    "step": ("wait_s", "compute_s", "lr", "momentum", "loss"),
    "epoch": (
        "epoch",
        "stage",
        "res",
        "images_per_s",
        "stall_frac",
        "loss",
        "eval_loss",
        "ema_eval_loss",
        *_METRICS,
        *(f"ema_{name}" for name in _METRICS),
        "memory_bytes",
        "gpu_frac",
    ),
}

# read when mlflow is imported, unless they are set
_OF_MLFLOW = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_ALLOW_FILE_STORE": "true",  # why: the store in a folder is no longer its default
}


class Point(NamedTuple):
    """The values of a training step or of an epoch by the names of run.jsonl; `step`: 0-based, of an epoch its last."""

    kind: str  # "step" or "epoch"
    step: int
    values: dict[str, float]

    @property
    def scalars(self) -> dict[str, float]:
        """The values by "KIND/NAME"."""
        return {f"{self.kind}/{name}": value for name, value in self.values.items()}


class Logger(Protocol):
    """A destination of points, made from a run's folder, the first record of its log, and `id` of earlier processes.

    All methods may raise anything.
    """

    place: str  # where to look at the run: a path, URL or command
    id: str | None  # the run at a service, which has the points of earlier processes; None: each process adds all again

    def add(self, points: Sequence[Point]) -> None:
        """Show the next points of the run, in order."""

    def close(self, *, finished: bool) -> None:
        """`finished`: the run is complete; otherwise it may be resumed."""


class Loggers:
    """The loggers `names` of the run in `folder`, whose log has its first record."""

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        self._folder, self._log = folder, RunLogReader(folder / "run.jsonl")
        self._loggers: dict[str, Logger | None] = dict.fromkeys(names)
        self._count, self._step = 0, 0  # of points read so far; the step of the last one
        self.update()

    def update(self) -> None:
        """Show what is new in the log."""
        if self._loggers:
            before, new = self._count, [*self._points(self._log.read())]
            self._count += len(new)
            for name in [*self._loggers]:
                self._attempt(name, partial(self._add, name, new, before))

    def close(self) -> None:
        """Show the rest of the log and close the loggers."""
        self.update()
        for name, logger in [*self._loggers.items()]:
            assert logger is not None  # why: `update` has made it
            self._attempt(name, partial(logger.close, finished=bool(self._log.kind("end"))))
        self._loggers = {}

    def _points(self, records: Sequence[Mapping[str, Any]]) -> Iterator[Point]:
        for record in records:
            self._step = record.get("step", self._step)
            names = _NAMES.get(record["kind"], ())
            values = {name: record[name] for name in names if record.get(name) is not None}
            if values:
                yield Point(record["kind"], self._step, values)

    def _attempt(self, name: str, work: Callable[[], object]) -> None:
        began = time.monotonic()
        try:
            work()
            _check_time(began)
        except Exception as error:  # why so broad: nothing that happens to a logger may end a training
            text = f"{type(error).__name__}: {error}"
            say(f"logger {name}: is off, the training continues without it ({text[:300]})")
            del self._loggers[name]

    def _add(self, name: str, new: Sequence[Point], before: int) -> None:
        """`new` are the points after the first `before` of the log."""
        start, path = self._log.start, self._folder / f"logger-{name}.json"
        run = [start.get("recipe_hash"), start.get("shards_hash")]
        state = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        state = state if state.get("run") == run else {}  # why: another recipe or set in this folder is another run
        logger = self._loggers[name]
        if logger is None:
            logger = self._loggers[name] = LOGGERS[name][0](self._folder, start, state.get("id"))
            print(f"logger {name}: {logger.place}", flush=True)
        sent = state.get("points", 0) if logger.id else 0
        logger.add(new[max(0, sent - before) :])
        if logger.id:
            state = {"run": run, "id": logger.id, "points": max(sent, before + len(new))}
            atomic_write(path, json.dumps(state) + "\n")


def _check_time(began: float) -> None:
    if time.monotonic() - began > _MOST_S:
        raise TimeoutError(f"it took over {_MOST_S:.0f} s")


class Csv:
    """RUN/csv: step.csv and epoch.csv with a row per point, and config.csv."""

    id: str | None = None

    def __init__(self, folder: Path, start: Mapping[str, Any], id_: str | None) -> None:
        self._folder = folder / "csv"
        self._folder.mkdir(exist_ok=True)
        self.place = str(self._folder)
        self._epochs: list[Point] = []
        self._write("config.csv", [("name", "value"), *flat(configuration(start)).items()])
        self._write("step.csv", [("step", *_NAMES["step"])])

    def add(self, points: Sequence[Point]) -> None:
        self._write("step.csv", [_row(point, _NAMES["step"]) for point in points if point.kind == "step"], mode="a")
        self._epochs += [point for point in points if point.kind == "epoch"]
        names = [name for name in _NAMES["epoch"] if any(name in point.values for point in self._epochs)]
        # why all again: the first epoch with a validation adds columns
        self._write("epoch.csv", [("step", *names), *(_row(point, names) for point in self._epochs)])

    def _write(self, name: str, rows: Sequence[Sequence[object]], *, mode: str = "w") -> None:
        with (self._folder / name).open(mode, encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)

    def close(self, *, finished: bool) -> None:
        pass


def _row(point: Point, names: Sequence[str]) -> list[object]:
    return [point.step, *(point.values.get(name, "") for name in names)]


class TensorBoard:
    """Event files in RUN/tb."""

    id: str | None = None

    def __init__(self, folder: Path, start: Mapping[str, Any], id_: str | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # why purge_step: every process writes all points; those of steps that a resume repeats must disappear
        self._writer = SummaryWriter(str(folder / "tb"), purge_step=0)
        self.place = f"tensorboard --logdir {folder / 'tb'}"
        environment = json.dumps(configuration(start)["environment"], indent=1)
        for name, text in (("recipe", start.get("recipe_text", "")), ("environment", environment)):
            self._writer.add_text(name, "".join(f"    {line}\n" for line in text.splitlines()), 0)  # Markdown: verbatim

    def add(self, points: Sequence[Point]) -> None:
        for point in points:
            for name, value in point.scalars.items():
                self._writer.add_scalar(name, value, point.step)
        self._writer.flush()

    def close(self, *, finished: bool) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases, online with an API key, else offline in RUN/wandb (`wandb sync` sends it).

    The environment variables of wandb apply, such as WANDB_PROJECT (default: resolute), WANDB_ENTITY and WANDB_MODE.
    """

    def __init__(self, folder: Path, start: Mapping[str, Any], id_: str | None) -> None:
        import wandb

        # why no console and git: they replace the streams of the process and start programs
        settings = wandb.Settings(silent=True, console="off", disable_git=True, init_timeout=20.0, finish_timeout=15.0)
        wandb.setup(settings)
        is_offline = "WANDB_MODE" not in os.environ and not wandb.login(prompt=False)  # why: never wait for input
        self._run = wandb.init(
            id=id_ or uuid.uuid4().hex[:12],
            resume="allow",
            dir=folder,
            name=folder.name,
            settings=settings,
            project=os.environ.get("WANDB_PROJECT", "resolute"),
            config=configuration(start),
            mode="offline" if is_offline else None,
        )
        self.id: str | None = self._run.id
        self.place = self._run.url or f"wandb sync {folder}/wandb/offline-run-*"

    def add(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log(point.scalars, step=point.step)  # does not wait: a process of wandb sends it

    def close(self, *, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)


class Mlflow:
    """A run of MLflow, at MLFLOW_TRACKING_URI, by default in the local store RUN/mlruns.

    The environment variables of MLflow apply, such as MLFLOW_EXPERIMENT_NAME (default: resolute).
    """

    def __init__(self, folder: Path, start: Mapping[str, Any], id_: str | None) -> None:
        os.environ.update(_OF_MLFLOW | os.environ)
        import mlflow

        uri = os.environ.get("MLFLOW_TRACKING_URI") or (folder / "mlruns").resolve().as_uri()
        self._client = mlflow.MlflowClient(uri)
        self._metric = mlflow.entities.Metric
        self.id: str | None = id_ or self._create(folder, start, mlflow.entities.Param)
        self._client.update_run(self.id, status="RUNNING")
        allowed = "MLFLOW_ALLOW_FILE_STORE=true " if uri.startswith("file:") else ""
        self.place = f"{allowed}mlflow ui --backend-store-uri {uri}"

    def _create(self, folder: Path, start: Mapping[str, Any], param: Callable[[str, str], Any]) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "resolute")
        experiment = self._client.get_experiment_by_name(name)
        number = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        id_: str = self._client.create_run(number, run_name=folder.name).info.run_id
        parameters = [param(key, value[:500]) for key, value in flat(configuration(start)).items()]
        for first in range(0, len(parameters), 100):  # the most that a request may have
            self._client.log_batch(id_, params=parameters[first : first + 100])
        return id_

    def add(self, points: Sequence[Point]) -> None:
        now, began = round(time.time() * 1000), time.monotonic()
        metrics = [
            self._metric(name, value, now, point.step) for point in points for name, value in point.scalars.items()
        ]
        for first in range(0, len(metrics), 1000):  # the most that a request may have
            _check_time(began)
            self._client.log_batch(self.id, metrics=metrics[first : first + 1000])

    def close(self, *, finished: bool) -> None:
        self._client.set_terminated(self.id, "FINISHED" if finished else "KILLED")


# by name: the class, and the package that it needs, which is also the extra that installs it
LOGGERS: dict[str, tuple[Callable[[Path, Mapping[str, Any], str | None], Logger], str]] = {
    "csv": (Csv, ""),
    "tensorboard": (TensorBoard, "tensorboard"),
    "wandb": (Wandb, "wandb"),
    "mlflow": (Mlflow, "mlflow"),
}


def check_loggers(names: Sequence[str]) -> None:
    """Raise `ResoluteError` if one is unknown or named twice, or its package is not installed."""
    if not {*names} <= {*LOGGERS} or len({*names}) < len(names):
        raise ResoluteError(
            f"--loggers: got {','.join(names)}, expected {', '.join(LOGGERS)}, each at most once, separated by commas; "
            "correct it"
        )
    for package in (LOGGERS[name][1] for name in names):
        if package:
            check_installed(package, setting="--loggers", extra=package)


def configuration(start: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """`recipe`: all values of the recipe; `environment`: data, machine and versions, from the log's first record."""
    left_out = ("kind", "recipe_text", "recipe_values", "stages", "class_names", "class_samples")
    return {
        "recipe": start.get("recipe_values", {}),
        "environment": {name: value for name, value in start.items() if name not in left_out},
    }


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
