"""TensorBoard event files in RUN/tb, with the scalars of run.jsonl at the same steps."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipeline.errors import ResoluteError

from .score import METRICS

__all__ = ["TensorBoardWriter", "check_installed"]

_STEP = ("wait_s", "compute_s", "lr", "momentum", "loss")
_METRICS = tuple(metric.key for metrics in METRICS.values() for metric in metrics)
_EPOCH = ("images_per_s", "stall_frac", "loss", "eval_loss", "ema_eval_loss", *_METRICS,
          *(f"ema_{name}" for name in _METRICS), "memory_bytes", "gpu_frac")  # fmt: skip


def check_installed() -> None:
    if importlib.util.find_spec("tensorboard") is None:
        raise ResoluteError(
            "--tensorboard: the package tensorboard is not installed, expected it; "
            "run `pip install -e '.[tensorboard]'`"
        )


class TensorBoardWriter:
    """Writes the event files of a process."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter  # why here: the package is optional

        # why purge_step: every process rewrites all records; those truncated by a resume must disappear
        self._writer, self._step = SummaryWriter(str(folder), purge_step=0), 0

    def add(self, records: Iterable[dict[str, Any]]) -> None:
        """Add the log's next records; an epoch's values are written at its last step."""
        for record in records:
            if record["kind"] == "step":
                self._step = record["step"]
            names = {"step": _STEP, "epoch": _EPOCH}.get(record["kind"], ())
            for name in names:
                if record.get(name) is not None:
                    self._writer.add_scalar(f"{record['kind']}/{name}", record[name], self._step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
