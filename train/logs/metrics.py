"""The run's measurements: clocks of every step, sums of every epoch, and the log that they are written to.

A GPU works behind the host's back: a step's host time is that of its launches. There two events, recorded before and
after each step, tell when the device did it; they are read where the losses are, so the steps run without a look.
"""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import torch

from pipeline import cuda
from pipeline.errors import ResoluteError
from pipeline.plan.plan import BatchSpec
from train.distributed import Ranks
from train.early_stopping import NotFinite

from .hardware import GpuUtilization, peak_memory_bytes, reset_peak_memory

__all__ = ["Meter", "NullLogWriter", "RunLogWriter", "read_log"]

_FLUSH_STEPS = 50  # between two looks at the losses: at each the log grows, and a GPU is waited for


class RunLogWriter:
    """run.jsonl, one record a line. Its length at a checkpoint is part of the state: a resume cuts it there."""

    def __init__(self, path: Path, *, keep_bytes: int = 0) -> None:
        self.path, self._pending = path, bytearray()
        self._file = path.open("r+b" if path.exists() else "w+b", buffering=0)
        self._file.truncate(keep_bytes)
        self._file.seek(keep_bytes)

    def write(self, record: dict[str, Any]) -> None:
        self._pending += json.dumps(record).encode() + b"\n"

    def sync(self, *, durable: bool = True) -> int:
        """Write all records, `durable` ones to survive the machine; returns the log's length in bytes.

        Raises `ResoluteError` if they can't be written.
        """
        try:
            while self._pending:
                del self._pending[: self._file.write(self._pending)]
            if durable:
                os.fsync(self._file.fileno())
        except OSError as error:
            kept = ", the last checkpoint is kept" if any(self.path.parent.glob("*.pt")) else ""
            raise ResoluteError(f"{self.path}: not written ({error.strerror}){kept}; make room and run again") from None
        return self._file.tell()

    def close(self) -> None:
        self._file.close()


class NullLogWriter(RunLogWriter):
    """That of the ranks that write none."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, record: dict[str, Any]) -> None:
        pass

    def sync(self, *, durable: bool = True) -> int:
        return 0

    def close(self) -> None:
        pass


def read_log(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class Meter:
    """Sums of the epoch under way. Losses and counts stay on the device until the epoch, or a checkpoint, ends."""

    def __init__(self, log: RunLogWriter, *, device: torch.device, ranks: Ranks | None = None) -> None:
        self._log, self._device, self._ranks = log, device, ranks or Ranks()
        self._steps: list[tuple[dict[str, Any], torch.Tensor, tuple[Any, Any]]] = []
        self._previous_end: Any = None  # the mark after the step before those in `_steps`
        self._counts = torch.zeros(6, dtype=torch.float64, device=device)
        self.sums: dict[str, float] = {}
        self.elapsed_s = 0.0  # of the run: training and validation
        self._last_loss: float | None = None  # the newest that was read
        self._gpu = GpuUtilization(device)
        self.start_epoch()

    def start_epoch(self) -> None:
        self.sums = {"samples": 0, "steps": 0, "wait_s": 0.0, "train_s": 0.0, "loss": 0.0, "lr": 0.0}
        self.sums |= {"gpu_frac": 0.0, "gpu_asked": 0}
        reset_peak_memory(self._device)
        self.start_eval()

    def mark(self) -> Any:
        """On a GPU a mark in its stream of work, for `step`; None on a CPU, where the host's clock tells."""
        return cuda.record_event(self._device) if self._device.type == "cuda" else None

    def start_eval(self) -> None:
        self.sums |= {"eval_samples": 0, "eval_s": 0.0}
        self._counts.zero_()

    def step(
        self, spec: BatchSpec, loss: torch.Tensor, lr: float, *, momentum: float, wait_s: float, compute_s: float,
        marks: tuple[Any, Any] = (None, None),
    ) -> None:  # fmt: skip
        """`loss`: this rank's part of the mean. `wait_s`: host time blocked for the batch. `compute_s`: host time of
        the step (on a GPU: of its launch). `marks`: before and after it. Clocks are the rank's own: the log has the
        first one's."""
        due = len(self._steps) + 1 >= _FLUSH_STEPS  # the same on all ranks
        step_s = wait_s + compute_s + self._drain_s(spec, due=due)
        if marks[0] is None:
            compute_s = step_s - wait_s
        sums = self.sums
        sums["samples"] += spec.global_size
        sums["steps"] += 1
        sums["train_s"] += step_s
        sums["lr"] = lr
        self.elapsed_s += step_s
        record = {
            "kind": "step", "index": spec.index, "step": spec.step, "stage": spec.stage, "epoch": spec.epoch,
            "res": spec.res, "samples": spec.global_size, "lr": lr, "momentum": momentum,
            "wait_s": wait_s, "compute_s": compute_s,
        }  # fmt: skip
        if (used := self._gpu.poll()) is not None:
            sums["gpu_frac"] += used
            sums["gpu_asked"] += 1
        self._steps.append((record, loss, marks))
        # why: on a GPU a look each step would be a sync, on several ranks a meeting
        if loss.device.type == "cpu" and self._ranks.world_size == 1:
            self._last_loss = float(loss)
            due = due or not math.isfinite(self._last_loss)
        if due:
            self.flush(durable=False)

    @property
    def status(self) -> str:
        """What a progress bar shows: the newest loss that is known, and images/s of the epoch so far."""
        sums = self.sums
        loss = "" if self._last_loss is None else f"loss {self._last_loss:.3f}, "
        return f"{loss}{sums['samples'] / sums['train_s']:.0f} images/s" if sums["train_s"] else ""

    def eval_step(self, spec: BatchSpec, counts: torch.Tensor, *, elapsed_s: float) -> None:
        elapsed_s += self._drain_s(spec)
        self._counts += counts
        self.sums["eval_samples"] += spec.global_size
        self.sums["eval_s"] += elapsed_s
        self.elapsed_s += elapsed_s

    def _drain_s(self, spec: BatchSpec, *, due: bool = False) -> float:
        """Time until a GPU has done the last batch of an epoch or validation, or before the losses are read (`due`):
        what follows has a clock of its own, or none."""
        if not (spec.last or due) or self._device.type != "cuda":
            return 0.0
        began = time.perf_counter()
        cuda.synchronize(self._device)  # sync: the epoch's time ends with its last kernel
        return time.perf_counter() - began

    def flush(self, *, durable: bool = True) -> int:
        """Write the steps so far to the log (`RunLog.sync`); returns its length. Raises `NotFinite` if a loss is."""
        if self._steps:
            parts = torch.stack([loss for _, loss, _ in self._steps])
            losses = self._ranks.sum(parts).tolist()  # sync: reads the losses; all marks have been reached then
            for (record, _, marks), loss in zip(self._steps, losses, strict=True):
                self._read_marks(record, *marks)
                self.sums["wait_s"] += record["wait_s"]
                self._log.write({**record, "loss": loss})
                self.sums["loss"] += loss * record["samples"]
                if not math.isfinite(loss):
                    raise NotFinite(f"loss is {loss}", record)
            self._steps.clear()
            self._last_loss = losses[-1]
        return self._log.sync(durable=durable)

    def _read_marks(self, record: dict[str, Any], began: Any, ended: Any) -> None:
        """On a GPU: put the device's time of the step in place of the host's.

        A batch is waited for only while the host is blocked for it and the device has nothing left to do: a device that
        is behind does not notice a host that waits, and its idle time at a save is no waiting for data.
        """
        if began is None:
            return
        record["compute_s"] = cuda.elapsed_s(began, ended)
        if self._previous_end is not None:
            record["wait_s"] = min(record["wait_s"], max(0.0, cuda.elapsed_s(self._previous_end, began)))
        self._previous_end = ended

    def end_epoch(self, spec: BatchSpec, *, res: int, batch_size: int) -> dict[str, Any]:
        """The epoch's record, written to the log: `spec` is its last batch, `res` and `batch_size` its training's.

        Accuracies are parts of one, losses of validation plain cross-entropy; None (as `eval_res`) where nothing was
        validated. `memory_bytes` is the peak, `gpu_frac` None where NVML tells nothing.
        """
        self.flush()
        sums = self.sums
        names = ("top1", "top5", "eval_loss", "ema_top1", "ema_top5", "ema_eval_loss")
        counts, validated = self._ranks.sum(self._counts).tolist(), sums["eval_samples"]
        record = {
            "kind": "epoch", "epoch": spec.epoch, "stage": spec.stage, "res": res,
            "batch_size": min(batch_size, sums["samples"]),  # a small set has no batches of the recipe's size
            "eval_res": spec.res if spec.split == "val" else None,
            "samples": sums["samples"], "steps": sums["steps"], "train_s": sums["train_s"],
            "wait_s": sums["wait_s"], "eval_s": sums["eval_s"], "elapsed_s": self.elapsed_s,
            "images_per_s": sums["samples"] / sums["train_s"], "stall_frac": sums["wait_s"] / sums["train_s"],
            "lr": sums["lr"], "loss": sums["loss"] / sums["samples"],
            **{name: count / validated if validated and math.isfinite(count) else None
               for name, count in zip(names, counts, strict=True)},
            "memory_bytes": peak_memory_bytes(self._device),
            "gpu_frac": sums["gpu_frac"] / sums["gpu_asked"] if sums["gpu_asked"] else None,
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
