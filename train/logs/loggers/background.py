"""Runs loggers beside the training: each has a thread that reads run.jsonl and calls it.

The training never calls a logger, waits for one only at its end (`_CLOSE_S`), and is not ended by one: the first
exception of a logger is printed as one warning, and the logger is off for the rest of the process.
"""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from resolute.console import say
from resolute.errors import check_installed
from resolute.train.logs.run_log import RunLogReader

from .base import Logger, Run, points

__all__ = ["LOGGERS", "Loggers", "check_loggers"]

# name: (its module and class here, the package that it needs, which is also the extra that installs it)
LOGGERS = {
    "csv": ("csv_files", "CsvLogger", ""),
    "tensorboard": ("tensorboard", "TensorBoardLogger", "tensorboard"),
    "wandb": ("wandb_run", "WandbLogger", "wandb"),
    "mlflow": ("mlflow_run", "MlflowLogger", "mlflow"),
}
_EVERY_S = 2.0  # between two reads of the log
_CLOSE_S = 30.0  # longest wait for all loggers at the end


def check_loggers(names: Sequence[str]) -> None:
    """Raise `ResoluteError` if the package of a logger is not installed."""
    for package in (LOGGERS[name][2] for name in names):
        if package:
            check_installed(package, setting="--loggers", extra=package)


class Loggers:
    """The loggers `names` of the run in `folder`, which start at once; `close` lets them finish."""

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        self._threads = [_Thread(name, folder) for name in names]

    def close(self) -> None:
        """Let the loggers show the rest of the log, for at most `_CLOSE_S` in all."""
        for thread in self._threads:
            thread.closing.set()
        ends = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, ends - time.monotonic()))
            if thread.is_alive():
                _warn(thread.name, f"is not done after {_CLOSE_S:.0f} s; its last values may be missing there")
        self._threads = []


class _Thread(threading.Thread):
    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name=name, daemon=True)
        self._folder, self.closing = folder, threading.Event()
        self.start()

    def run(self) -> None:
        try:
            self._follow_log()
        except Exception as error:  # why so broad: nothing that happens to a logger may end a training
            text = f"{type(error).__name__}: {error}"
            _warn(self.name, f"is off, the training continues without it ({text[:300]})")

    def _follow_log(self) -> None:
        log, logger, step = RunLogReader(self._folder / "run.jsonl"), None, 0
        done = False
        while not done:
            done = self.closing.wait(_EVERY_S)  # why before: what is read next is then the whole log
            records = log.read()
            if logger is None and log.start:
                logger = self._open(Run(folder=self._folder, start=log.start))
            if logger is not None and (new := list(points(records, step=step))):
                logger.add(new)
                step = new[-1].step
        if logger is not None:
            logger.close(finished=bool(log.kind("end")))

    def _open(self, run: Run) -> Logger:
        module, cls, _ = LOGGERS[self.name]
        logger: Logger = getattr(importlib.import_module(f"{__package__}.{module}"), cls)(run)
        print(f"logger {self.name}: {logger.place}", flush=True)
        return logger


def _warn(name: str, text: str) -> None:
    say(f"logger {name}: {text}")
    sys.stderr.flush()
