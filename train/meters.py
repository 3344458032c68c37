"""Where did the time go, and what came of it? Per-step clocks, per-epoch sums, and the run's log."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import torch

from pipeline.errors import ResoluteError
from pipeline.plan import BatchSpec

__all__ = ["Meter", "RunLog", "read_log"]


class RunLog:
    """run.jsonl, one record a line. Its length at a checkpoint is part of the state: a resume cuts it there."""

    def __init__(self, path: Path, *, keep_bytes: int = 0) -> None:
        self.path, self._pending = path, bytearray()
        self._file = path.open("r+b" if path.exists() else "w+b", buffering=0)
        self._file.truncate(keep_bytes)
        self._file.seek(keep_bytes)

    def write(self, record: dict[str, Any]) -> None:
        self._pending += json.dumps(record).encode() + b"\n"

    def sync(self) -> int:
        """Bring all records to disk; returns the log's length in bytes. Raises `ResoluteError` if it can't be."""
        try:
            while self._pending:
                del self._pending[: self._file.write(self._pending)]
            os.fsync(self._file.fileno())
        except OSError as error:
            raise ResoluteError(
                f"{self.path}: not written ({error.strerror}), the last checkpoint is kept; make room and run again"
            ) from None
        return self._file.tell()

    def close(self) -> None:
        self._file.close()


def read_log(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class Meter:
    """Sums of the epoch under way. Losses and counts stay on the device until the epoch, or a checkpoint, ends."""

    def __init__(self, log: RunLog, *, device: torch.device) -> None:
        self._log, self._device = log, device
        self._steps: list[tuple[dict[str, Any], torch.Tensor]] = []
        self._counts = torch.zeros(4, dtype=torch.int64, device=device)
        self.sums: dict[str, float] = {}
        self.elapsed_s = 0.0  # of the run: training and validation
        self.start_epoch()

    def start_epoch(self) -> None:
        self.sums = {"samples": 0, "steps": 0, "wait_s": 0.0, "train_s": 0.0, "loss": 0.0, "lr": 0.0}
        self.start_eval()

    def start_eval(self) -> None:
        self.sums |= {"eval_samples": 0, "eval_s": 0.0}
        self._counts.zero_()

    def step(self, spec: BatchSpec, loss: torch.Tensor, lr: float, *, wait_s: float, compute_s: float) -> None:
        """`wait_s`: host time blocked for the batch. `compute_s`: host time of the step (on a GPU: of its launch)."""
        sums = self.sums
        sums["samples"] += spec.global_size
        sums["steps"] += 1
        sums["wait_s"] += wait_s
        sums["train_s"] += wait_s + compute_s
        sums["lr"] = lr
        self.elapsed_s += wait_s + compute_s
        record = {
            "kind": "step", "index": spec.index, "step": spec.step, "stage": spec.stage, "epoch": spec.epoch,
            "res": spec.res, "samples": spec.global_size, "lr": lr, "wait_s": wait_s, "compute_s": compute_s,
        }  # fmt: skip
        self._steps.append((record, loss))

    def eval_step(self, spec: BatchSpec, counts: torch.Tensor, *, elapsed_s: float) -> None:
        self._counts += counts
        self.sums["eval_samples"] += spec.global_size
        self.sums["eval_s"] += elapsed_s
        self.elapsed_s += elapsed_s

    def flush(self) -> int:
        """Write the steps so far to the log; returns its length. Raises `ResoluteError` if a loss is not finite."""
        if self._steps:
            losses = torch.stack([loss for _, loss in self._steps]).tolist()  # sync: reads the losses
            for (record, _), loss in zip(self._steps, losses, strict=True):
                self._log.write({**record, "loss": loss})
                self.sums["loss"] += loss * record["samples"]
                if not math.isfinite(loss):
                    raise ResoluteError(
                        f"{self._log.path}: loss is {loss} at step {record['step']} (epoch {record['epoch']}, lr "
                        f"{record['lr']:.4g}), expected a finite number; lower optim.lr or set optim.clip_norm"
                    )
            self._steps.clear()
        return self._log.sync()

    def end_epoch(self, spec: BatchSpec, *, res: int, batch_size: int) -> dict[str, Any]:
        """The epoch's record, written to the log: `spec` is its last batch, `res` and `batch_size` its training's.

        Accuracies are parts of one, None (as `eval_res`) where nothing was validated.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # sync: the epoch's time ends with its last kernel
        self.flush()
        sums = self.sums
        top1, top5, ema_top1, ema_top5 = self._counts.tolist()
        validated = sums["eval_samples"]
        record = {
            "kind": "epoch", "epoch": spec.epoch, "stage": spec.stage, "res": res, "batch_size": batch_size,
            "eval_res": spec.res if spec.split == "val" else None,
            "samples": sums["samples"], "steps": sums["steps"], "train_s": sums["train_s"],
            "wait_s": sums["wait_s"], "eval_s": sums["eval_s"], "elapsed_s": self.elapsed_s,
            "images_per_s": sums["samples"] / sums["train_s"], "stall_frac": sums["wait_s"] / sums["train_s"],
            "lr": sums["lr"], "loss": sums["loss"] / sums["samples"],
            "top1": top1 / validated if validated else None, "top5": top5 / validated if validated else None,
            "ema_top1": ema_top1 / validated if validated else None,
            "ema_top5": ema_top5 / validated if validated else None,
        }  # fmt: skip
        self._log.write(record)
        self.start_epoch()
        return record

    def state_dict(self) -> dict[str, Any]:
        log_bytes = self.flush()  # first: it completes the sums
        return {"sums": dict(self.sums), "elapsed_s": self.elapsed_s, "log_bytes": log_bytes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sums, self.elapsed_s = dict(state["sums"]), state["elapsed_s"]
        self.start_eval()
