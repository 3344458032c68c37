"""Logger `mlflow`: a run of MLflow, at MLFLOW_TRACKING_URI, by default in the local store RUN/mlruns.

The environment variables of MLflow apply, such as MLFLOW_EXPERIMENT_NAME (default: resolute). Its usage statistics are
off unless MLFLOW_DISABLE_TELEMETRY=false.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when mlflow is imported
os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # why: the store in a folder is no longer its default

import mlflow
from mlflow.entities import Metric, Param

from .base import Point, Run, SentPoints, configuration, flat

__all__ = ["MlflowLogger"]

_MOST = 90  # values of a request; MLflow takes 1000 metrics, 100 parameters
_LONGEST = 500  # characters of a parameter


class MlflowLogger:
    """One run of MLflow, which all processes of the training continue."""

    def __init__(self, run: Run) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI") or (run.folder / "mlruns").resolve().as_uri()
        self._client = mlflow.MlflowClient(uri)
        self._sent = SentPoints("mlflow", run)
        self._id = self._sent.id or self._create(run)
        self._sent.store(self._id)
        self._client.update_run(self._id, status="RUNNING")
        allowed = "MLFLOW_ALLOW_FILE_STORE=true " if uri.startswith("file:") else ""
        self.place = f"{allowed}mlflow ui --backend-store-uri {uri}"

    def _create(self, run: Run) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "resolute")
        experiment = self._client.get_experiment_by_name(name)
        number = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        id_: str = self._client.create_run(number, run_name=run.folder.name).info.run_id
        parameters = [Param(key, value[:_LONGEST]) for key, value in flat(configuration(run.start)).items()]
        for first in range(0, len(parameters), _MOST):
            self._client.log_batch(id_, params=parameters[first : first + _MOST])
        return id_

    def add(self, new: Sequence[Point]) -> None:
        now = round(time.time() * 1000)
        metrics = [Metric(name, value, now, point.step)
                   for point in self._sent.unsent(new) for name, value in point.values.items()]  # fmt: skip
        for first in range(0, len(metrics), _MOST):
            self._client.log_batch(self._id, metrics=metrics[first : first + _MOST])
        self._sent.store(self._id)

    def close(self, *, finished: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if finished else "KILLED")
