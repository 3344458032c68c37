"""A run's measurements: times of every step, sums of every epoch, and the log run.jsonl.

A GPU runs asynchronously, so the host's time of a step is only that of the kernel launches. Two events around each step
measure the device's time; they are read together with the losses, so that steps need no device sync.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from resolute import cuda
from resolute.errors import ResoluteError
from resolute.pipeline.plan.plan import BatchSpec
from resolute.train.devices.distributed import Ranks
from resolute.train.devices.hardware import GpuUtilization, gpu_memory, peak_memory_bytes, reset_peak_memory
from resolute.train.early_stopping import NotFinite
from resolute.train.model.outputs import CLASSES, Outputs
from resolute.train.validation import BatchScores, Validation

__all__ = ["Meter", "NullLogWriter", "RunLogWriter", "read_log"]

_FLUSH_STEPS = 50  # steps between copies of the losses to the host, and writes of the log


class RunLogWriter:
    """Writes run.jsonl, one JSON record per line. Checkpoints store its length, to which a resume truncates it."""

    def __init__(self, path: Path, *, keep_bytes: int = 0) -> None:
        self.path, self._pending = path, bytearray()
        self._file = path.open("r+b" if path.exists() else "w+b", buffering=0)
        self._file.truncate(keep_bytes)
        self._file.seek(keep_bytes)

    def write(self, record: dict[str, Any]) -> None:
        self._pending += json.dumps(record).encode() + b"\n"

    def sync(self, *, durable: bool = True) -> int:
        """Write all pending records, with fsync if `durable`; returns the log's length in bytes.

        Raises `ResoluteError` if they cannot be written.
        """
        try:
            while self._pending:
                del self._pending[: self._file.write(self._pending)]
            if durable:
                os.fsync(self._file.fileno())
        except OSError as error:
            state = ", the last checkpoint is kept" if any(self.path.parent.glob("*.pt")) else ""
            message = f"{self.path}: not written ({error.strerror}){state}; make room and run again"
            raise ResoluteError(message) from None
        return self._file.tell()

    def close(self) -> None:
        self._file.close()


class NullLogWriter(RunLogWriter):
    """The log of ranks other than 0: writes nothing."""

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
    """Sums of the current epoch. Losses and counts stay on the device until they are flushed.

    `related` (N,): validation samples with a near copy or group-mate in the training split, see `Validation`.
    """

    def __init__(
        self,
        log: RunLogWriter,
        *,
        device: torch.device,
        ranks: Ranks | None = None,
        head: Outputs = CLASSES,
        related: NDArray[np.bool_] | None = None,
    ) -> None:
        self._log, self._device, self._ranks = log, device, ranks or Ranks()
        self._steps: list[tuple[dict[str, Any], torch.Tensor, tuple[Any, Any]]] = []
        # records and marks of steps, their losses on the host, and when these are there
        self._copies: deque[tuple[list[tuple[dict[str, Any], tuple[Any, Any]]], torch.Tensor, Any]] = deque()
        self._previous_end: Any = None  # the mark after the last flushed step
        self._validation = Validation(head, ranks=self._ranks, related=related)
        self.details: dict[str, Any] = {}  # of the last validation by weights, see `Validation.finish`; on rank 0
        self.sums: dict[str, float] = {}
        self.elapsed_s = 0.0  # training and validation time of the run
        self._last_loss: float | None = None  # the newest one read from the device
        self._gpu = GpuUtilization(device)
        self.start_epoch()

    def start_epoch(self) -> None:
        self.sums = {"samples": 0, "steps": 0, "wait_s": 0.0, "train_s": 0.0, "loss": 0.0, "lr": 0.0}
        self.sums |= {"gpu_frac": 0.0, "gpu_asked": 0}
        reset_peak_memory(self._device)
        self._retries = cuda.allocator_retries(self._device) if self._device.type == "cuda" else 0
        self.start_eval()

    def mark(self) -> Any:
        """On a GPU, an event recorded in the current stream, for `step`; None on a CPU."""
        return cuda.record_event(self._device) if self._device.type == "cuda" else None

    def start_eval(self) -> None:
        self.sums |= {"eval_s": 0.0}
        self._validation.start()

    def step(
        self,
        spec: BatchSpec,
        loss: torch.Tensor,
        lr: float,
        *,
        momentum: float,
        wait_s: float,
        compute_s: float,
        marks: tuple[Any, Any] = (None, None),
    ) -> None:
        """Record a training step. `loss`: this rank's part of the mean loss, on the device. `wait_s`: host time blocked
        waiting for the batch. `compute_s`: host time of the step (on a GPU: of its launches). `marks`: from `mark`,
        before and after the step. Times are per rank; the log has rank 0's."""
        step_s = wait_s + compute_s + self._drain_s(spec)
        if marks[0] is None:
            compute_s = step_s - wait_s
        sums = self.sums
        sums["samples"] += spec.global_size
        sums["steps"] += 1
        sums["train_s"] += step_s
        sums["lr"] = lr
        self.elapsed_s += step_s
        record = {
            "kind": "step",
            "index": spec.index,
            "step": spec.step,
            "stage": spec.stage,
            "epoch": spec.epoch,
            "res": spec.res,
            "samples": spec.global_size,
            "lr": lr,
            "momentum": momentum,
            "wait_s": wait_s,
            "compute_s": compute_s,
        }
        if (utilization := self._gpu.poll()) is not None:
            sums["gpu_frac"] += utilization
            sums["gpu_asked"] += 1
        self._steps.append((record, loss, marks))
        due = len(self._steps) >= _FLUSH_STEPS  # the same on all ranks
        # why not always: reading the loss is a sync on a GPU, and a collective operation on several ranks
        if loss.device.type == "cpu" and self._ranks.world_size == 1:
            self._last_loss = float(loss)  # no sync: on a CPU
            due = due or not math.isfinite(self._last_loss)
        if due:
            self._read_copies(wait=False)
            self._start_copy()
            self._read_copies(wait=False)  # why again: on a CPU it is there
            self._log.sync(durable=False)

    @property
    def status(self) -> str:
        """Text for the progress bar: the newest known loss, and images/s of the epoch so far."""
        sums = self.sums
        loss = "" if self._last_loss is None else f"loss {self._last_loss:.3f}, "
        return f"{loss}{sums['samples'] / sums['train_s']:.0f} images/s" if sums["train_s"] else ""

    def eval_step(self, spec: BatchSpec, scores: BatchScores, *, elapsed_s: float) -> None:
        self._validation.add(scores, global_size=spec.global_size)
        elapsed_s += self._drain_s(spec)
        self.sums["eval_s"] += elapsed_s
        self.elapsed_s += elapsed_s

    def _drain_s(self, spec: BatchSpec) -> float:
        """Seconds until a GPU finishes its queued work, after the last batch of an epoch or validation; else 0, without
        waiting."""
        if not spec.last or self._device.type != "cuda":
            return 0.0
        began = time.perf_counter()
        cuda.synchronize(self._device)  # sync: the epoch's time ends with its last kernel
        return time.perf_counter() - began

    def flush(self, *, durable: bool = True) -> int:
        """Write the steps so far to the log; returns its length in bytes. Raises `NotFinite` for a loss that is not."""
        self._start_copy()
        self._read_copies(wait=True)
        return self._log.sync(durable=durable)

    def _start_copy(self) -> None:
        """Start copying the losses of the steps since the last copy to the host."""
        if not self._steps:
            return
        losses = self._ranks.sum(torch.stack([loss for _, loss, _ in self._steps]))
        steps = [(record, marks) for record, _, marks in self._steps]
        event = None
        if self._device.type == "cuda":
            losses = cuda.copy_to_host(losses)
            event = cuda.record_event(self._device, timing=False)
        self._copies.append((steps, losses, event))
        self._steps.clear()

    def _read_copies(self, *, wait: bool) -> None:
        """Log the steps whose losses have arrived; with `wait`, all of them."""
        while self._copies:
            steps, copied, event = self._copies[0]
            if event is not None and not wait and not event.query():
                return
            if event is not None:
                event.synchronize()  # sync: with `wait` alone, at a checkpoint or the end of an epoch
            self._copies.popleft()
            losses = copied.tolist()  # no sync: on the host
            for (record, marks), loss in zip(steps, losses, strict=True):
                self._read_marks(record, *marks)
                self.sums["wait_s"] += record["wait_s"]
                self._log.write({**record, "loss": loss})
                self.sums["loss"] += loss * record["samples"]
                if not math.isfinite(loss):
                    raise NotFinite(f"loss is {loss}", record)
            self._last_loss = losses[-1]

    def _read_marks(self, record: dict[str, Any], began: Any, ended: Any) -> None:
        """On a GPU: replace the host's times of the step by the device's.

        Time counts as waiting only while the host is blocked for a batch and the device is idle: a device with queued
        work is not slowed down, and its idle time during a checkpoint is not a stall.
        """
        if began is None:
            return
        record["compute_s"] = cuda.elapsed_s(began, ended)  # no sync: the losses after it have been read
        if self._previous_end is not None:
            idle_s = cuda.elapsed_s(self._previous_end, began)  # no sync: as above
            record["wait_s"] = min(record["wait_s"], max(0.0, idle_s))
        self._previous_end = ended

    def end_epoch(
        self, spec: BatchSpec, *, res: int, batch_size: int, class_counts: Sequence[int] = ()
    ) -> dict[str, Any]:
        """Write the epoch's record to the log and return it. `spec`: its last batch; `res`, `batch_size`: of training;
        `class_counts` (C,): training samples of each class, see `Plan.class_counts`.

        The metrics of the set's kind (`score.METRICS`), fractions in 0 to 1, the validation losses (see
        `validation.score_batch`) and `eval_res` are None without a validation. If samples are `related`, the record
        has `top1_unrelated` (`mAP_unrelated`, `r2_unrelated`) too; also None if all are. `memory_bytes` is the peak;
        `gpu_frac` is None without NVML; `unix_s` is the time of day, in s since 1970.
        """
        self.flush()
        sums = self.sums
        metrics, self.details = self._validation.finish()
        record = {
            "kind": "epoch",
            "epoch": spec.epoch,
            "stage": spec.stage,
            "res": res,
            "batch_size": min(batch_size, sums["samples"]),  # why: a small set has smaller batches
            "eval_res": spec.res if spec.split == "val" else None,
            "unix_s": time.time(),
            "samples": sums["samples"],
            "steps": sums["steps"],
            "train_s": sums["train_s"],
            "wait_s": sums["wait_s"],
            "eval_s": sums["eval_s"],
            "elapsed_s": self.elapsed_s,
            "images_per_s": sums["samples"] / sums["train_s"],
            "stall_frac": sums["wait_s"] / sums["train_s"],
            "lr": sums["lr"],
            "loss": sums["loss"] / sums["samples"],
            **metrics,
            "memory_bytes": peak_memory_bytes(self._device),
            **self._gpu_memory(),
            "gpu_frac": sums["gpu_frac"] / sums["gpu_asked"] if sums["gpu_asked"] else None,
            "class_counts": list(class_counts),
        }
        self._log.write(record)
        self.start_epoch()
        return record

    def _gpu_memory(self) -> dict[str, int]:
        if self._device.type != "cuda":
            return {}
        return {**gpu_memory(self._device), "alloc_retries": cuda.allocator_retries(self._device) - self._retries}

    def state_dict(self) -> dict[str, Any]:
        log_bytes = self.flush()  # why first: it completes the sums
        return {"sums": dict(self.sums), "elapsed_s": self.elapsed_s, "log_bytes": log_bytes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sums, self.elapsed_s = dict(state["sums"]), state["elapsed_s"]
        self.start_eval()
