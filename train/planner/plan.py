"""`resolute plan`: measures a few steps of every stage and prints the forecast of a run, without leaving any trace."""

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
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from resolute.console import counted
from resolute.errors import ResoluteError
from resolute.files import check_output, output_file, used_folder
from resolute.pipeline.plan.plan import Plan
from resolute.train.cross_validation import chosen_folds
from resolute.train.devices.distributed import Ranks, join
from resolute.train.devices.hardware import process_age_s
from resolute.train.learner import Learner
from resolute.train.options import PlanOptions
from resolute.train.out_of_memory import out_of_memory
from resolute.train.recipe.schema import Recipe, scaled
from resolute.train.recipe.text import RecipeText
from resolute.train.report.classes import HEADS, class_rows
from resolute.train.setup import Run
from resolute.train.synthetic import synthetic_batch
from resolute.train.trainer import session

from .estimate import Forecast, advice, parse_duration, table, to_json, with_doubled_batches
from .measure import Stopwatch, expected_s

__all__ = ["announce", "default_limit_s", "fitting_scale", "main", "plan", "scratch_run"]

_CPU_LIMIT_S = 60.0  # of measuring
# Values of `scale_epochs` for a budget: up to 1 in steps of 0.01, up to 10 in steps of 0.05
_SCALES = (*(n / 100 for n in range(1, 100)), *(n / 20 for n in range(20, 201)))
_CLASSES = 3  # most and least frequent ones shown


def main(args: PlanOptions) -> int:
    """`resolute plan`: print, and write to `--json`, the forecast of a run. Returns the exit status."""
    if args.json:
        check_output(args.json, setting="--json", suffixes=(".json",))
    run = Run.of(args)
    with join(args.device) as ranks:
        chosen, folds = ([], 0) if args.folds is None else chosen_folds(args.folds)
        if chosen:
            run = dataclasses.replace(run, fold=(chosen[0], folds))
        return plan(
            run,
            ranks,
            budget=args.budget,
            runs=max(1, len(chosen)),
            file=args.json,
            limit_s=parse_duration(args.limit, setting="--limit") if args.limit else None,
        )


def plan(
    run: Run,
    ranks: Ranks,
    *,
    budget: str | None,
    runs: int = 1,
    file: Path | None = None,
    limit_s: float | None = None,
) -> int:
    """Print the forecast of `run` and, with a `budget` such as "11m", advice; returns 0.

    `runs`: folds to train one after another; the one of `run` is measured. `file`: for the forecast as JSON.
    `limit_s`: see `measure_stages`; None: a minute on a CPU.
    """
    budget_s = parse_duration(budget) if budget else None
    began = time.perf_counter() - process_age_s()  # why: a run's time includes starting Python and loading torch
    with scratch_run(run.folder.parent, ranks) as folder:
        text = run.recipe_text()
        with session(dataclasses.replace(run, folder=folder, recipe=text), ranks) as opened:
            limit_s = limit_s or default_limit_s(opened.learner)
            announce(opened.plan, limit_s)
            with opened.ready(limit_s=limit_s) as loader:
                ready = time.perf_counter()
                left_s = None if limit_s is None else limit_s - opened.warm_up_s
                result, lines = opened.forecast(loader, began=began, folds=runs, limit_s=left_s), list[str]()
                if budget_s:
                    too_long = result.total_s() > budget_s
                    is_late = left_s is not None and time.perf_counter() - ready > left_s
                    doubled = None
                    if too_long and not is_late:
                        doubled = _with_doubled_batches(result, opened.plan, opened.learner)
                    lines = advice(result, budget_s, fitting_scale(text, result, budget_s), doubled)
                    if too_long and is_late:
                        lines.append("- larger batches: not measured, to keep within --limit")
                print(table(result))
                print(_sampling_lines(opened.plan), end="")
                if patience := opened.recipe.stop.patience:
                    print(f"at most: a stage ends after {counted(patience, 'validation')} without improvement")
                print("".join(f"{line}\n" for line in lines), end="", flush=True)
    if file is not None and ranks.is_main:
        with output_file(file) as opened:
            opened.write((json.dumps(to_json(result, budget_s, lines), indent=1) + "\n").encode())
    return 0


def default_limit_s(learner: Learner) -> float | None:
    """The limit of time for measuring on the learner's device, s; None: none."""
    return _CPU_LIMIT_S if learner.device.type == "cpu" else None


def announce(plan: Plan, limit_s: float | None) -> None:
    """Print how long measuring the stages of `plan` takes."""
    about_s = sum(expected_s(plan, stage) for stage in range(len(plan.stages)))
    line = f"measuring {counted(len(plan.stages), 'stage')}: about {about_s:.0f} s after the warm-up"
    if limit_s is not None:
        line += f"; what would take longer than --limit, {limit_s:.0f} s, is estimated"
    print(line, flush=True)


def fitting_scale(text: RecipeText, result: Forecast, budget_s: float) -> tuple[float, list[int]] | None:
    """The largest `scale_epochs` of `_SCALES` that fits into `budget_s`, and the epochs of each stage; None: none."""
    base = Recipe.from_text(text.with_values(["scale_epochs=1.0"]))
    for factor in reversed(_SCALES):
        with contextlib.suppress(ResoluteError):  # too few epochs for a ramp, for example
            recipe = base if factor == 1.0 else scaled(dataclasses.replace(base, scale_epochs=factor))
            epochs = [stage.epochs for stage in recipe.stages]
            if result.total_s(epochs) <= budget_s:
                return factor, epochs
    return None


def _sampling_lines(plan: Plan) -> str:
    """Uses per full epoch of the samples of the most and least frequent classes; empty for uniform sampling."""
    if plan.sampling == "uniform":
        return ""
    rows = class_rows(plan.shards.classes, plan.class_samples, plan.mean_class_counts(), ends=_CLASSES)
    heads = [head.rstrip("#") for head in HEADS]
    width = max(len(row[0]) for row in rows)
    lines = [f"{row[0]:{width}}  {row[1]:>11}  {row[2]:>15}  {row[3]:>22}" for row in (heads, *rows)]
    return "\n".join([f"sampling {plan.sampling}, in an epoch of all samples:", *lines, ""])


@contextlib.contextmanager
def scratch_run(runs: Path, ranks: Ranks) -> Iterator[Path]:
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
        yield Path(folder)


def _with_doubled_batches(result: Forecast, plan: Plan, learner: Learner, *, about_s: float = 1.0) -> Forecast | None:
    """The forecast with doubled batch sizes in the stages where they fit; None if there are none."""
    # why: a rank that is out of memory would leave the others waiting, and compiling new shapes takes minutes
    if learner.ranks.world_size > 1 or learner.recipe.precision.compile:
        return None
    models: list[float | None] = []
    for stage in result.stages:
        try:
            batch = itertools.repeat(synthetic_batch(learner, plan, plan.largest_batch(stage.stage), times=2)).__next__
            enough = 2 * stage.batch_size <= stage.images
            models.append(Stopwatch.of(learner).rate(batch, learner.train_step, about_s=about_s)[0] if enough else None)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            models.append(None)
    return with_doubled_batches(result, models, shared=learner.device.type == "cpu") if any(models) else None
