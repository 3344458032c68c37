"""The process that measures rows of `resolute.benchmarks.gpu` that train: it keeps networks whose kernels are tuned."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from resolute.pipeline.dataset.shard_set import ShardSet

from .loaders import child
from .loaders.job import Job
from .loaders.registry import GPU_LOADERS
from .trainer import Trainer

__all__ = ["Measurements", "Setup", "serve"]

_FASTEST = 100_000  # images/s: an upper bound, so that no loader runs out of batches
_WARM_UP = 4  # batches that are not timed: more than are prefetched on the device
_MORE_WORKERS = 1.5  # a DataLoader is tried with as many workers as cores, and with more


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The sizes of all rows. `seconds`: of each measurement."""

    shards: str
    device: str
    resolutions: tuple[int, ...]
    seconds: float


class Measurements:
    """Measures rows. Networks are kept: their kernels are tuned or compiled once."""

    def __init__(self, setup: Setup) -> None:
        self._setup, self._device = setup, torch.device(setup.device)
        self._cpus = sorted(os.sched_getaffinity(0))
        self._shards = dataclasses.replace(ShardSet.open(setup.shards), resolutions=setup.resolutions)
        self._trainers: dict[tuple[str, int, bool], Trainer] = {}
        torch.backends.cudnn.benchmark = True  # each shape is tuned once, in the warm-up

    def run(self, row: dict[str, Any]) -> dict[str, Any]:
        """The result of a row. {"part": "feed" or "change", …}: the arguments of the method of that name."""
        words = {name: value for name, value in row.items() if name != "part"}
        return self.change(**words) if row["part"] == "change" else self.feed(**words)

    def feed(self, *, loader: str, cores: int, batch_size: int, models: Sequence[str], compile: bool) -> dict[str, Any]:
        """A loader alone, and training on its batches, by resolution, with `cores` CPU cores for all of it.

        {"workers", "tried": {workers: images/s}, "res": {px: {"alone": …, MODEL: {"live": …, "synthetic": images/s
        before and after}}}}: values of `child.timed`.
        """
        if self._device.type == "cpu":
            torch.set_num_threads(cores)  # why first: another number of threads compiles the network again
        trainers = {model: self._trainer(model, batch_size, compile) for model in models}
        measured_s = self._setup.seconds * (3 + len(models))
        batches = 20 + int(measured_s * _FASTEST / batch_size)
        self._use(cores)
        try:
            workers, tried = cores, {}
            if GPU_LOADERS[loader].module == "dataloader":
                counts = [cores, int(_MORE_WORKERS * cores)]
                tried = {count: self._alone(self._job(loader, count, batch_size, batches)) for count in counts}
                workers = max(counts, key=lambda count: tried[count])
            results = {}
            for res in self._setup.resolutions:
                job = dataclasses.replace(self._job(loader, workers, batch_size, batches), resolutions=(res,))
                results[str(res)] = self._fed(job, res, trainers)
        finally:
            self._use(len(self._cpus))
        return {"workers": workers, "tried": tried, "res": results}

    def change(
        self, *, loader: str, workers: int, batch_size: int, model: str, steps: int, round: int
    ) -> dict[str, Any]:
        """{"step_s": [resolution][step]}: seconds of training steps across the changes of size, all cores in use."""
        if self._device.type == "cpu":
            torch.set_num_threads(len(self._cpus))
        trainer = self._trainer(model, batch_size, False)
        times = trainer.step_times(GPU_LOADERS[loader], self._job(loader, workers, batch_size, steps))
        return {"step_s": [own[:steps] for own in times]}

    def _fed(self, job: Job, res: int, trainers: dict[str, Trainer]) -> dict[str, Any]:
        seconds, result = self._setup.seconds, dict[str, Any]()
        with closing(child.adapter(job).stream(job)) as stream:
            for images in itertools.islice(stream, _WARM_UP):
                assert images.shape == (job.batch_size, 3, res, res), images.shape
                assert str(images.dtype) == f"torch.{job.dtype}", images.dtype
                assert images.device.type == self._device.type, images.device
            result["alone"] = child.timed(stream, len, seconds=seconds, device=self._device)
            for model, trainer in trainers.items():
                before = trainer.rate(res, seconds=seconds / 2)
                live = trainer.live(stream, seconds=seconds, steps_before=_WARM_UP)
                after = trainer.rate(res, seconds=seconds / 2)
                result[model] = {"live": live, "synthetic": [before, after]}
        return result

    def _alone(self, job: Job) -> float:
        """Images/s of a loader at the first resolution."""
        job = dataclasses.replace(job, resolutions=job.resolutions[:1])
        with closing(child.adapter(job).stream(job)) as stream:
            for _ in itertools.islice(stream, _WARM_UP):
                pass
            rate = child.timed(stream, len, seconds=self._setup.seconds, device=self._device)["images_per_s"]
        return float(rate)

    def _job(self, loader: str, workers: int, batch_size: int, batches: int) -> Job:
        entry, trainer = GPU_LOADERS[loader], next(iter(self._trainers.values()))
        return Job(
            module=entry.module,
            variant=entry.variant,
            shards=self._setup.shards,
            resolutions=self._setup.resolutions,
            batches=batches,
            batch_size=batch_size,
            workers=workers,
            device=self._setup.device,
            dtype="float16" if trainer.image_dtype is torch.float16 else "float32",
        )

    def _trainer(self, model: str, batch_size: int, compiled: bool) -> Trainer:
        key = (model, batch_size, compiled)
        if key not in self._trainers:
            # why: networks of another batch size would keep their memory
            self._trainers = {each: kept for each, kept in self._trainers.items() if each[1:] == key[1:]}
            self._trainers[key] = Trainer(
                self._shards, model=model, device=self._device, batch_size=batch_size, compiled=compiled
            )
        return self._trainers[key]

    def _use(self, cores: int) -> None:
        """Restrict all threads of this process, and those that it starts, to the first `cores` of its CPU cores."""
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(int(thread.name), self._cpus[:cores])


def serve(connection: Connection, log: Path, setup: Setup) -> None:
    """Receive rows and send their results, until the connection ends; all output goes to `log`.

    A row that fails ends the process; the last line of the log says why.
    """
    os.setsid()  # so that it can be ended together with the loaders' processes
    os.environ["PYTHONWARNINGS"] = "ignore"  # of those processes: torchvision warns in each
    with log.open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    measurements = Measurements(setup)
    with contextlib.suppress(EOFError):
        while True:
            connection.send(measurements.run(connection.recv()))
