"""Trains one run in its folder: resumes, logs, saves checkpoints and handles signals.

An exclusive lock gives the folder to one training process at a time and is released when that process ends; commands
that only read (evaluate, predict, export, report) take no lock. On SIGINT, SIGTERM or SIGHUP the run saves and exits
with status 128 + the signal's number, after the current batch or warm-up shape. A second Ctrl-C exits immediately
without saving. Signals that were ignored when the process started (nohup, background jobs) stay ignored.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import timm
import torch
from tqdm import tqdm

from resolute.console import counted
from resolute.errors import ResoluteError, StorageError
from resolute.files import atomic_write, delete_partial, output_file, used_folder
from resolute.lock import exclusive_lock
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.loader.loader import Loader
from resolute.pipeline.plan.plan import BatchSpec, Plan
from resolute.train.devices.device import device_name
from resolute.train.devices.distributed import Ranks
from resolute.train.devices.hardware import describe, reset_peak_memory
from resolute.train.logs.loggers import Loggers
from resolute.train.logs.metrics import Meter, NullLogWriter, RunLogWriter
from resolute.train.out_of_memory import DoesNotFit, out_of_memory
from resolute.train.planner.estimate import Forecast, calibration, forecast, table
from resolute.train.planner.measure import measure_stages
from resolute.train.recipe import RECIPE_FILE
from resolute.train.recipe.schema import Recipe
from resolute.train.recipe.text import RecipeText
from resolute.train.report.console import EpochTable, Reports
from resolute.train.report.validation import confused_photos, write_validation
from resolute.train.score import METRICS, main_metric
from resolute.train.validation import related_photos

from . import checkpoint
from .checkpoint import LAST
from .early_stopping import BestSoFar, NotFinite, all_finite
from .learner import Learner
from .loop import run_batches
from .setup import Run, set_up
from .warmup import (
    announce_compilation,
    capture_graphs,
    check_micro_batches,
    cpu_warm_up_shapes,
    memory_to_spare,
    shapes,
    warm_up,
)

__all__ = ["session", "train"]

_LOCK, _LOG = ".lock", "run.jsonl"
_SLOW_S = 2.0  # a first step that takes longer is not repeated
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def train(run: Run, ranks: Ranks | None = None) -> int:
    """Train or resume until the recipe is done. Returns 0, or 128 + the number of the signal that stopped the run."""
    with session(run, ranks or Ranks()) as opened:
        return opened.fit()


@contextlib.contextmanager
def session(run: Run, ranks: Ranks) -> Iterator[_Session]:
    """`run` with its folder locked and its state resumed if there is a checkpoint.

    Raises `ResoluteError` naming the other process if one is training in the folder.
    """
    with _locked(run.folder) if ranks.is_main else contextlib.nullcontext(lambda: None) as check_lock:
        # why from the first rank: the others may not see the run's folder
        text = ranks.broadcast(run.recipe_text() if ranks.is_main else RecipeText(name="", toml="", where=""))
        parts = set_up(run, text, ranks)
        undo = _undone(run, check_lock) if ranks.is_main else contextlib.nullcontext(lambda: None)
        with undo as keep, _described(_Session(run, check_lock, keep, text, *parts)) as opened:
            yield opened


@contextlib.contextmanager
def _described(opened: _Session) -> Iterator[_Session]:
    """Name the stage and what to change if memory runs out in the block; closes the log at its end."""
    ranks = opened.ranks
    try:
        yield opened
    except (DoesNotFit, RuntimeError) as error:
        if not isinstance(error, DoesNotFit) and not out_of_memory(error):
            raise
        # why min: the metrics of the last epoch are computed after the last batch
        index = min(opened.position, opened.plan.total_batches - 1)
        spec = opened.plan.batch(index, rank=ranks.rank, world_size=ranks.world_size)
        failure = error if isinstance(error, DoesNotFit) else DoesNotFit(spec.split, spec.res, len(spec))
        raise failure.describe(opened.plan, opened.recipe, opened.learner.device) from None
    finally:
        opened.log.close()


@contextlib.contextmanager
def _undone(run: Run, check_lock: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Put the run's log and recipe back as they were, or delete them if there were none, at the end of the block.

    Unless what this yields is called, from the first batch on, or the run has checkpoints. The empty folder then goes
    with its lock.
    """
    folder, kept = run.folder, any(run.folder.glob("*.pt"))
    files = () if kept else (folder / _LOG, run.recipe_folder / RECIPE_FILE)
    before = {path: path.read_bytes() if path.exists() else None for path in files}

    def keep() -> None:
        nonlocal kept
        kept = True

    try:
        yield keep
    finally:
        if not kept:
            with contextlib.suppress(OSError, ResoluteError):
                check_lock()  # why: another folder may have taken the place of the run's
                for path in folder.glob("*.pt"):  # of `forecast`
                    path.unlink()
                for path, content in before.items():
                    if content is None:
                        path.unlink(missing_ok=True)
                    else:
                        atomic_write(path, content)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[Callable[[], None]]:
    """Create and lock the run's folder, and delete partial files left by killed writers.

    Yields a function that raises `StorageError` if it is no longer that folder, as when its mount is lost.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(used_folder(folder))
        except OSError as error:
            raise ResoluteError(f"{folder}: {error.strerror}, expected a writable folder; choose another RUN") from None
        is_held = stack.enter_context(
            exclusive_lock(folder / _LOCK, folder=folder, writer="training", remedy="choose another RUN")
        )
        delete_partial(folder)

        def check() -> None:
            if not is_held():
                raise StorageError(
                    f"{folder}: replaced while the run was writing, got a folder without its lock, expected the one "
                    "that it began in; mount its volume again, then run the same command: it resumes"
                )

        yield check


class _Stopped(Exception):
    """A signal arrived before the first batch."""


class _Session:
    """This process's part of a run: resumes, trains, saves and prints."""

    def __init__(
        self,
        run: Run,
        check_lock: Callable[[], None],
        keep: Callable[[], None],
        text: RecipeText,
        recipe: Recipe,
        shards: ShardSet,
        plan: Plan,
        learner: Learner,
    ) -> None:
        """`check_lock`: raises if the run's folder is no longer the one that was locked; called before each save.

        `keep`: called before the first batch: what is in the folder then stays.
        """
        self.run, self.recipe, self.plan, self.learner = run, recipe, plan, learner
        self._check_lock, self._keep = check_lock, keep
        self.ranks = learner.ranks
        self.identity = {"recipe": recipe.values(), "data": plan.config["shards"], "shards": shards.hash}
        state = None
        try:
            state = checkpoint.resume(run.newest, expect=self.identity)
            if self.ranks.is_main and run.options.from_ != LAST:
                # why first: from here on, the run resumes from it without --from, even if it is killed before its next
                # save
                checkpoint.link(run.newest, run.folder / LAST)
            path = run.folder / _LOG
            log_bytes = state["meter"]["log_bytes"] if state else 0
            self.log = RunLogWriter(path, keep_bytes=log_bytes) if self.ranks.is_main else NullLogWriter(path)
        except OSError as error:
            raise ResoluteError(
                f"{run.folder}: {error.strerror}, expected a writable folder; choose another RUN"
            ) from None
        related = related_photos(shards)
        self._related = 0 if related is None else int(related.sum())
        self.meter = Meter(self.log, device=learner.device, ranks=self.ranks, head=learner.head, related=related)
        self.reports = Reports(run.folder, on=self.ranks.is_main)
        self.table = EpochTable.of(
            learner.head.target, has_ema=learner.ema is not None, has_related=related is not None
        )
        self.position, self.best_so_far = 0, BestSoFar(recipe.stop, recipe.stages)
        self.is_new = state is None
        self.warm_up_s = self._pixel_s = 0.0  # the latter: of a training step per input pixel, where a limit needs it
        self.decode = run.options.decode if learner.device.type == "cuda" else None  # where images are decoded
        # stored in checkpoints for inference, in addition to the recipe
        self.about = {
            "name": recipe.name,
            "head": learner.head.to_json(),
            "margin": shards.margin,
            "grey_bits": shards.grey_bits,
            "generation": shards.generation,
            "set": {"source": run.set_path},
        }
        if state:
            learner.load_state_dict(state)
            if of_ranks := state.get("statistics"):
                learner.load_statistics(of_ranks)
            self.meter.load_state_dict(state["meter"])
            self.best_so_far.load_state_dict(state["progress"])
            self.position = state["position"]
            self._log_checkpoint(checkpoint.step_file(run.folder, state["step"]).name, state["sha256"])
            if self.ranks.is_main:  # why: a run killed after its last save leaves one too many
                checkpoint.keep_newest(run.folder, run.options.keep, newest=state["step"])
        else:
            self._write_start(shards, text)
        self.ranks.check_same(self.position, f"{run.folder}: ranks loaded different checkpoints")
        self.saved_at, self.saved_position = time.monotonic(), self.position
        self.stopped_by = 0
        self._stage_ended = False  # early, with the latest batch: `position` is in the next stage
        self.bar: tqdm[Any] | None = None
        self.skipped: Mapping[tuple[str, int, int], str] = {}  # the loader's: (split, res, sample) -> reason
        self.skipped_logged = 0  # number of them in the log

    def fit(self) -> int:
        with self._signals(), contextlib.ExitStack() as stack:
            if self.position < self.plan.total_batches and not self.best_so_far.ended:
                return self._train(stack)
            self._open_loggers(stack)  # why: those that were not set in training get the whole log
            how = f"stopped early ({self.best_so_far.ended})" if self.best_so_far.ended else "is finished"
            print(f"{self.run.folder}: this run {how}; choose another RUN to start a new one")
            print(self.reports.summary())
            return 0

    def _open_loggers(self, stack: contextlib.ExitStack) -> None:
        names = self.run.options.loggers if self.ranks.is_main else ()
        if names:
            self.log.sync(durable=False)  # why: they read its first record
        self.loggers = stack.enter_context(contextlib.closing(Loggers(names, self.run.folder)))

    def _train(self, stack: contextlib.ExitStack) -> int:
        """`stack`: to close the loggers at its end, after the last save."""
        plan, folder = self.plan, self.run.folder
        began = time.perf_counter()
        done = f"resuming at batch {self.position} of {plan.total_batches}" if self.position else "starting"
        print(f"{folder}: {done} ({self.recipe.name} {self.recipe.hash}, {self.learner.device})", flush=True)
        if self._related:
            print(self._related_line(), flush=True)
        try:
            with self.ready() as loader:
                if self.run.options.calibrate:
                    self._calibrate(self.forecast(loader, began=began))
                print(f"warmed up in {time.perf_counter() - began:.1f} s", flush=True)
                self._keep()
                self._open_loggers(stack)
                print(self.table.head, flush=True)
                self.skipped = loader.skipped
                while not (finished := run_batches(loader, self.learner, self.meter, self._after)):
                    if not self._stage_ended:
                        break
                    loader.load_state_dict({"next_batch": self.position})
        except NotFinite as error:
            raise error.describe(plan, folder) from None
        except _Stopped:
            again = "the same command starts it again" if self.is_new else self._advice
            print(f"{folder}: stopped by {self._signal_name} before its first batch; {again}")
            return 128 + self.stopped_by
        finally:
            if self.bar is not None:
                self.bar.close()
        if finished and self.position < plan.total_batches:
            raise RuntimeError(f"{folder}: the loader ended at batch {self.position}, expected {plan.total_batches}")
        self.ranks.finish_vote()  # so that it does not reach the next fold; what it asked for is decided here
        self.stopped_by = self.ranks.max(self.stopped_by)
        if not finished and not self.best_so_far.ended and self.position < plan.total_batches:
            self._save()
            self.reports.update()
            print(f"{folder}: stopped by {self._signal_name} and saved at batch {self.position}; {self._advice}")
            return 128 + self.stopped_by
        if self.ranks.is_main:
            print(self.reports.summary())
        if self.stopped_by and self.run.fold is not None:
            print(f"{folder}: finished; stopped by {self._signal_name} before what follows; {self._advice}")
            return 128 + self.stopped_by
        return 0

    def _related_line(self) -> str:
        """How many validation photos are related to training photos, and what follows from it."""
        photos, metric = len(self.plan.shards.splits["val"]), METRICS[self.learner.head.target.kind][0]
        if self._related == photos:
            return (
                f"all {photos:,} validation photos have a near copy or group-mate among the training photos: "
                f"{metric.title} says little about new photos"
            )
        have = "has" if self._related == 1 else "have"
        return (
            f"{self._related:,} of {photos:,} validation photos {have} a near copy or group-mate among the training "
            f"photos; {metric.title} is reported with and without them ({metric.unrelated.title})"
        )

    @contextlib.contextmanager
    def ready(self, *, limit_s: float | None = None) -> Iterator[Loader]:
        """Warm up every shape, then give the loader, positioned at the run's next batch.

        `limit_s`: on a CPU, for measuring only: shapes are left out that would take more than half of this time.
        """
        check_micro_batches(self.plan, self.learner)
        announce_compilation(self.learner.device, decode=self.run.options.decode)
        self._announce_warm_up()
        with self._loader(start=self.position) as loader:
            with memory_to_spare(self.learner.device):
                began = time.perf_counter()
                self._warm_up(limit_s=limit_s)
                self.warm_up_s = time.perf_counter() - began
            reset_peak_memory(self.learner.device)
            yield loader

    def forecast(self, loader: Loader, *, began: float, folds: int = 1, limit_s: float | None = None) -> Forecast:
        """Measure and return what the run will take; training from here on is unaffected.

        `began`: `time.perf_counter()` at the start of the process; `folds`: number of runs to forecast; `limit_s`: as
        of `measure_stages`. Says which stage is measured.
        """
        start_s, saving = time.perf_counter() - began, time.perf_counter()
        self._save()
        save_s = time.perf_counter() - saving
        throughputs = measure_stages(
            self.plan,
            loader,
            self.learner,
            limit_s=limit_s,
            pixel_s=self._pixel_s,
            say=partial(print, flush=True),
        )
        loader.load_state_dict({"next_batch": self.position})
        return forecast(
            self.plan,
            throughputs,
            eval_every=self.recipe.eval.every_epochs,
            start_s=start_s,
            save_s=save_s,
            save_every_s=self.run.options.save_every_s,
            folds=folds,
        )

    def _calibrate(self, result: Forecast) -> None:
        print(table(result))
        for record in calibration(result):
            self.log.write(record)

    def _loader(self, *, start: int) -> Loader:
        return Loader(
            self.plan,
            device=self.learner.device,
            decode=self.decode,
            num_threads=self.run.options.threads,
            start=start,
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
            mean=self.recipe.data.mean,
            std=self.recipe.data.std,
            on_bad_sample=self.recipe.data.on_bad_sample,
            dtype=self.learner.image_dtype,
        )

    def _check_stop(self) -> None:
        """Raise `_Stopped` on all ranks if any of them has received a signal."""
        self.stopped_by = self.ranks.max(self.stopped_by)
        if self.stopped_by:
            raise _Stopped

    def _announce_warm_up(self) -> None:
        count = sum(len(self._shapes(stages)) for stages in self.learner.stages_by_graph)
        line = f"warming up: a step of each of {counted(count, 'shape')}"
        if self.learner.device.type != "cpu":  # source: benchmarks/results/LOG.md, 2026-11-26
            line += ", for which kernels are compiled and tuned (40 s for a ResNet-50 at three resolutions on an H200)"
        if self.recipe.precision.compile:
            line += "; compiling the network takes about half a minute for each resolution"
        print(line, flush=True)

    def _shapes(self, stages: Collection[int]) -> list[tuple[str, int, int]]:
        """What the warm-up of `stages` runs: (split, res in px, local batch size)."""
        todo = shapes(self.plan, rank=self.ranks.rank, world_size=self.ranks.world_size, stages=stages)
        return (
            cpu_warm_up_shapes(todo)
            if self.learner.device.type == "cpu" and not self.recipe.precision.compile
            else todo
        )

    def _warm_up(self, *, limit_s: float | None = None) -> None:
        for stages in self.learner.stages_by_graph:
            todo = self._shapes(stages)
            if limit_s is not None and self.learner.device.type == "cpu":
                self._warm_up_within(0.5 * limit_s, todo, stage=stages[0])
            else:
                warm_up(self.learner, todo, self._check_stop, stage=stages[0])
        capture_graphs(self.learner, self.plan, self._check_stop)
        self._check_stop()

    def _warm_up_within(self, limit_s: float, todo: list[tuple[str, int, int]], *, stage: int) -> None:
        """Warm up the shapes of `todo` that fit into `limit_s`, the smallest first, and note how long a pixel takes."""
        began = time.perf_counter()
        for split, res, size in sorted(todo, key=lambda shape: (shape[0], shape[2] * shape[1] ** 2)):
            pixels = size * res**2 * self.ranks.world_size
            late = time.perf_counter() - began + self._pixel_s * pixels > limit_s
            if self.ranks.broadcast(late):
                continue
            # why again: the first step of all is slower
            for _ in range(2 if split == "train" and not self._pixel_s else 1):
                start = time.perf_counter()
                warm_up(self.learner, [(split, res, size)], self._check_stop, stage=stage)
                step_s = self.ranks.broadcast(time.perf_counter() - start)
                if step_s > _SLOW_S:
                    break
            if split == "train":
                self._pixel_s = step_s / pixels

    def _after(self, spec: BatchSpec) -> bool:
        """Bookkeeping between batches, not timed. False if the run should stop, or continue in another stage."""
        phase = self.plan.phase_at(spec.index)
        # an interrupted validation restarts from its first batch: its counts are not saved
        self.position = spec.index + 1 if spec.split == "train" or spec.last else phase.first
        self._update_bar(spec, phase.batches)
        # why: a timer or a signal on one rank must take effect on all ranks at the same batch
        late = self.ranks.is_main and time.monotonic() - self.saved_at > self.run.options.save_every_s
        stop, save = self.ranks.vote(self.stopped_by, self.position if late else 0)
        self.stopped_by = stop or self.stopped_by
        following = self.plan.phase_at(spec.index + 1) if spec.index + 1 < self.plan.total_batches else None
        if spec.last and (following is None or following.split == "train"):
            self._end_epoch(spec)
        elif spec.split == "train" and (save > self.saved_position or self._due(spec.step)):
            self._save()
        self._stage_ended = not stop and self.position > spec.index + 1
        return not (stop or self.best_so_far.ended or self._stage_ended)

    def _due(self, step: int) -> bool:
        every = self.run.options.save_every_steps
        return bool(every and (step + 1) % every == 0)

    def _end_epoch(self, spec: BatchSpec) -> None:
        phase = next(each for each in self.plan.phases if (each.split, each.epoch) == ("train", spec.epoch))
        largest = max(phase.shapes, key=lambda shape: shape.res)
        counts = self.plan.class_counts(spec.epoch).tolist() if self.ranks.is_main else []
        record = self.meter.end_epoch(spec, res=largest.res, batch_size=largest.batch_size, class_counts=counts)
        tqdm.write(self.table.row(record))
        done, best_so_far = spec.index + 1 == self.plan.total_batches, self.best_so_far
        is_best = best_so_far.update(record)
        if is_best:
            self.log.write({"kind": "best", "epoch": spec.epoch})
        if self.ranks.is_main and is_best:
            write_validation(self.run.folder, record, self.meter.details)
        if best_so_far.stage_ended:
            self._end_stage(spec)
        if done or best_so_far.ended:
            best = best_so_far.best_score if best_so_far.best_epoch >= 0 else None
            self.log.write(
                {
                    "kind": "end",
                    "elapsed_s": self.meter.elapsed_s,
                    f"best_{main_metric(record).key}": best,
                    "stopped_early": best_so_far.ended,
                }
            )
        self._save(best=is_best)
        if self.ranks.is_main and (done or best_so_far.ended):
            data = self.recipe.data
            confused_photos(
                self.run.folder, self.plan.shards, mean=data.mean, std=data.std, crop_pct=self.recipe.eval.crop_pct
            )
        self.reports.update()
        self.loggers.update()
        if best_so_far.ended:
            metric = main_metric(record)
            tqdm.write(
                f"stopped early: {best_so_far.ended}; best.pt is of epoch {best_so_far.best_epoch} ({metric.title} "
                f"{metric.text(best_so_far.best_score)}, {best_so_far.best_weights} weights), last.pt of this one"
            )

    def _end_stage(self, spec: BatchSpec) -> None:
        """Continue with the first batch of the next stage instead of the next epoch."""
        following = next(phase for phase in self.plan.phases if phase.stage > spec.stage)
        self.position = following.first
        record = {
            "kind": "stage_ended",
            "stage": spec.stage,
            "epoch": spec.epoch,
            "reason": self.best_so_far.stage_ended,
        }
        self.log.write({**record, "next_epoch": following.epoch, "next_step": following.first_step})
        here, there = (self.recipe.stages[stage].max_res for stage in (spec.stage, following.stage))
        tqdm.write(
            f"stage {spec.stage} ({here} px) ended early: {self.best_so_far.stage_ended}; next: stage "
            f"{following.stage} ({there} px), epoch {following.epoch}"
        )

    def _save(self, *, best: bool = False) -> None:
        self._log_skipped()
        folder, phase = self.run.folder, self.plan.phase_at(max(0, self.position - 1))
        step = phase.first_step + (self.position - phase.first if phase.split == "train" else 0)
        meter = self.meter.state_dict()
        if not all_finite(self.learner.network):
            lr = max(group["lr"] for group in self.learner.optimizer.param_groups)
            raise NotFinite.after(self.plan, step - 1, lr=lr)
        state = {
            **self.identity,
            **self.about,
            **self.learner.state_dict(),
            "meter": meter,
            "position": self.position,
            "step": step,
            "progress": self.best_so_far.state_dict(),
            "order": self.plan.order,
            "decode": self.decode,
            "statistics": self.ranks.of_all(self.learner.statistics()) if self.ranks.world_size > 1 else None,
            "res": self.recipe.stages[phase.stage].validation_res,
        }
        file = checkpoint.step_file(folder, step)
        if self.ranks.is_main:
            self._check_lock()
            digest = checkpoint.save(file, state)
            # why this order: a kill between the two repeats the epoch
            for name in ("best.pt", LAST) if best else (LAST,):
                checkpoint.link(file, folder / name)
            checkpoint.keep_newest(folder, self.run.options.keep, newest=step)
            self._log_checkpoint(file.name, digest)
        self.saved_at, self.saved_position = time.monotonic(), self.position

    def _log_skipped(self) -> None:
        """Log the samples that any rank's loader has skipped. A collective operation: all ranks call it."""
        new = dict(itertools.islice(self.skipped.items(), self.skipped_logged, None))
        for (split, res, sample), reason in self.ranks.gather(new).items():
            self.log.write({"kind": "skipped", "split": split, "res": res, "sample": sample, "reason": reason})
        self.skipped_logged = len(self.skipped)

    def _log_checkpoint(self, file: str, digest: str) -> None:
        self.log.write({"kind": "checkpoint", "file": file, "position": self.position, "sha256": digest})
        self.log.sync()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Within the block, signals make the run save and stop; ignored signals stay ignored."""
        previous = {number: signal.getsignal(number) for number in _SIGNALS}
        handled = [number for number, handler in previous.items() if handler is not signal.SIG_IGN]
        for number in handled:
            signal.signal(number, self._stop)
        try:
            yield
        finally:
            for number in handled:
                signal.signal(number, previous[number])

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.stopped_by and number != signal.SIGINT:
            return  # why: closing a terminal sends SIGHUP twice, from the kernel and from the shell
        if self.stopped_by:
            # why os._exit: hanging storage must not delay the second Ctrl-C, and no traceback should be printed; files
            # are written atomically, and the lock ends with the process
            with contextlib.suppress(OSError):
                os.write(2, f"{self.run.folder}: stopped immediately, without saving; {self._advice}\n".encode())
            os._exit(128 + number)
        self.stopped_by = number

    @property
    def _signal_name(self) -> str:
        return signal.Signals(self.stopped_by).name

    @property
    def _advice(self) -> str:
        how = "" if self.run.options.from_ == LAST else " without --from"
        return f"run the same command{how} to resume"

    def _update_bar(self, spec: BatchSpec, batches: int) -> None:
        if self.bar is None or spec.index == self.plan.phase_at(spec.index).first:
            if self.bar is not None:
                self.bar.close()
            title = f"epoch {spec.epoch} {spec.split} {spec.res} px"
            hidden = None if self.ranks.is_main else True  # None: hidden unless stderr is a terminal
            self.bar = tqdm(total=batches, desc=title, unit="batch", leave=False, disable=hidden)
        if spec.split == "train":
            self.bar.set_postfix_str(self.meter.status, refresh=False)
        self.bar.update()

    def _write_start(self, shards: ShardSet, text: RecipeText) -> None:
        if self.ranks.is_main:
            with output_file(self.run.recipe_folder / RECIPE_FILE) as file:
                file.write(text.toml.encode())
        self.log.write(
            {
                "kind": "start",
                "recipe": self.recipe.name,
                "recipe_hash": self.recipe.hash,
                "shards_hash": shards.hash,
                "generation": shards.generation,
                "target": shards.target.kind,
                "classes": len(shards.classes),
                "class_names": list(shards.classes),
                "class_samples": self.plan.class_samples.tolist() if self.ranks.is_main else [],
                "train_samples": len(shards.splits["train"]),
                "val_samples": len(shards.splits["val"]),
                **({"val_related": self._related} if self._related else {}),
                "val_majority": _largest_share(shards),
                "units": list(shards.target.units),
                "stages": self.identity["recipe"]["stages"],
                "recipe_values": self.identity["recipe"],
                "recipe_text": text.toml,
                "machine": describe(self.learner.device, threads=self.run.options.threads),
                "order": self.plan.order,
                "total_steps": self.plan.total_steps,
                "ranks": self.ranks.world_size,
                "device": device_name(self.learner.device),
                "python": platform.python_version(),
                "torch": torch.__version__,
                "timm": timm.__version__,
            }
        )


def _largest_share(shards: ShardSet) -> float | None:
    """The fraction of validation samples of the most frequent class; None for other targets, or without samples."""
    samples = shards.splits["val"].samples
    if shards.target.kind != "class" or not len(samples):
        return None
    return float(np.bincount(samples["label"]).max() / len(samples))
