"""`make plan`: measures a few steps of every stage and prints the forecast of a run, without leaving any trace."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

import torch

from pipeline import cuda
from pipeline.errors import ResoluteError
from pipeline.loader.loader import Batch, Loader
from pipeline.plan.plan import Plan
from pipeline.storage.atomic_file import output_file, used_folder
from train.distributed import Ranks
from train.logs.hardware import peak_memory_bytes, process_age_s, reset_peak_memory
from train.loop import Learner
from train.setup import Options

from .estimate import Forecast, advice, parse_duration, table, to_json, with_doubled_batches
from .measure import Pace, Stopwatch, measure, restored, synthetic

__all__ = ["measure_stages", "plan"]


def plan(
    options: Options, ranks: Ranks, *, budget: str | None, folds: Sequence[int] = (), file: Path | None = None
) -> int:
    """Print the forecast of the run of `options` and, with a `budget` such as "11m", advice; returns 0.

    `folds`: folds to train one after another; measured on the first one's data. `file`: for the forecast as JSON.
    """
    from train.trainer import session  # why here: a cyclic import; train.trainer needs `measure_stages`

    budget_s = parse_duration(budget) if budget else None
    began = time.perf_counter() - process_age_s()  # why: a run's time includes starting Python and loading torch
    with _scratch(options.folder.parent, ranks) as folder:
        options = dataclasses.replace(options, folder=Path(folder), fold=folds[0] if folds else options.fold)
        with session(options, ranks) as run, run.ready() as loader:
            result = run.forecast(loader, began=began, folds=max(1, len(folds)))
            print(table(result))
            lines = []
            if budget_s:
                too_long = result.total_s() > budget_s
                doubled = _with_doubled_batches(result, run.plan, run.learner) if too_long else None
                lines = advice(result, budget_s, doubled)
                print("\n".join(lines), flush=True)
    if file is not None and ranks.is_main:
        with output_file(file) as opened:
            opened.write((json.dumps(to_json(result, budget_s, lines), indent=1) + "\n").encode())
    return 0


@contextlib.contextmanager
def _scratch(runs: Path, ranks: Ranks) -> Iterator[str]:
    """A temporary run folder, the same on all ranks, on the file system that will hold the run."""
    is_new = not runs.exists()
    with contextlib.ExitStack() as stack:
        try:
            if ranks.is_main:
                stack.enter_context(used_folder(runs))
            folder = ranks.broadcast(tempfile.mkdtemp(prefix=".plan-", dir=runs) if ranks.is_main else "")
        except OSError as error:
            raise ResoluteError(f"{runs}: {error.strerror}, expected a writable folder; choose another RUN") from None
        if ranks.is_main:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)

        def delete_and_exit(number: int, _frame: FrameType | None) -> None:
            # why not an exception: Python ignores those that a handler raises inside a destructor
            if ranks.is_main:
                shutil.rmtree(folder, ignore_errors=True)
                if is_new:
                    with contextlib.suppress(OSError):
                        runs.rmdir()
            os._exit(128 + number)

        for number in (signal.SIGTERM, signal.SIGHUP):  # why: their default action would leave the folder behind
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, delete_and_exit)
                stack.callback(signal.signal, number, signal.SIG_DFL)
        yield folder


def measure_stages(plan: Plan, loader: Loader, learner: Learner) -> list[Pace]:
    """Measure every stage. The learner's state is restored; the loader's position is not."""
    paces = []
    for stage in range(len(plan.stages)):
        reset_peak_memory(learner.device)
        with restored(learner):
            paces.append(measure(
                plan, loader, stage, _watch(learner), train=learner.train_step, validate=learner.eval_step,
                synthetic_batch=_synthetic_batch(learner, plan, stage),
                memory=lambda: peak_memory_bytes(learner.device),
            ))  # fmt: skip
    return paces


def _with_doubled_batches(result: Forecast, plan: Plan, learner: Learner, *, about_s: float = 1.0) -> Forecast | None:
    """The forecast with doubled batch sizes in the stages where they fit; None if there are none."""
    # why: a rank that is out of memory would leave the others waiting, and compiling new shapes takes minutes
    if learner.ranks.world_size > 1 or learner.recipe.precision.compile:
        return None
    models: list[float | None] = []
    for stage in result.stages:
        try:
            batch = itertools.repeat(_synthetic_batch(learner, plan, stage.stage, times=2)).__next__
            enough = 2 * stage.batch_size <= stage.images
            models.append(_watch(learner).rate(batch, learner.train_step, about_s=about_s)[0] if enough else None)
        except torch.OutOfMemoryError:
            models.append(None)
    return with_doubled_batches(result, models, shared=learner.device.type == "cpu") if any(models) else None


def _synthetic_batch(learner: Learner, plan: Plan, stage: int, times: float = 1.0) -> Batch:
    """A batch of random images, `times` as large as the first training batch of `stage`."""
    first = next(s.first for s in plan.passes if (s.split, s.stage) == ("train", stage))
    spec = plan.batch(first, rank=learner.ranks.rank, world_size=learner.ranks.world_size)
    return synthetic(spec, device=learner.device, dtype=learner.image_dtype, times=times)


def _watch(learner: Learner) -> Stopwatch:
    def sync() -> None:
        if learner.device.type == "cuda":
            cuda.synchronize(learner.device)  # sync: ends the timed interval

    return Stopwatch(sync=sync, broadcast=learner.ranks.broadcast)
