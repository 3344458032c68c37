"""`resolute plan`: measures a few steps of every stage and prints the forecast of a run, without leaving any trace.

With --suggest it writes a recipe for the budget, and nothing else (see `suggest.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
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
from resolute.errors import ResoluteError, as_typed
from resolute.files import check_output, output_file, used_folder
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.plan.plan import Plan
from resolute.train.cross_validation import chosen_folds
from resolute.train.devices.distributed import Ranks, join
from resolute.train.devices.hardware import describe, process_age_s
from resolute.train.loop import Learner
from resolute.train.options import PlanOptions
from resolute.train.recipe.schema import Recipe
from resolute.train.report.classes import HEADS, class_rows
from resolute.train.setup import Options
from resolute.train.trainer import session

from .batch_size import out_of_memory
from .estimate import Forecast, advice, parse_duration, table, to_json, with_doubled_batches
from .measure import Stopwatch, expected_s, synthetic_batch
from .suggest import Candidates, choose, proposal, reasons

__all__ = ["announce", "default_limit_s", "main", "plan", "scratch_run"]

_CPU_LIMIT_S = 60.0  # of measuring
_CLASSES = 3  # most and least frequent ones shown


def main(args: PlanOptions) -> int:
    """`resolute plan`: print, and write to `--json`, the forecast of a run. Returns the exit status."""
    if args.json:
        check_output(args.json, setting="--json", suffixes=(".json",))
    if args.suggest:
        if not args.budget:
            raise ResoluteError("--suggest: got no --budget, expected a time to fill; add --budget 11m")
        if os.path.lexists(args.suggest):
            raise ResoluteError(f"--suggest: got {args.suggest}, which exists, expected a new file; rename it")
        check_output(args.suggest, setting="--suggest", suffixes=(".toml",))
    options = Options.parsed(args)
    with join(options.device) as ranks:
        chosen, folds = ([], 0) if args.folds is None else chosen_folds(args.folds)
        if chosen:
            options = dataclasses.replace(options, fold=(chosen[0], folds))
        return plan(
            options,
            ranks,
            budget=args.budget,
            runs=max(1, len(chosen)),
            file=args.json,
            suggest=args.suggest,
            limit_s=parse_duration(args.limit, setting="--limit") if args.limit else None,
        )


def plan(
    options: Options,
    ranks: Ranks,
    *,
    budget: str | None,
    runs: int = 1,
    file: Path | None = None,
    suggest: Path | None = None,
    limit_s: float | None = None,
) -> int:
    """Print the forecast of the run of `options` and, with a `budget` such as "11m", advice; returns 0.

    `runs`: folds to train one after another; the one of `options` is measured. `file`: for the forecast as JSON.
    `suggest`: for a recipe that fits the budget; its forecast is then printed. `limit_s`: see `measure_stages`; None: a
    minute on a CPU.
    """
    budget_s = parse_duration(budget) if budget else None
    began = time.perf_counter() - process_age_s()  # why: a run's time includes starting Python and loading torch
    with scratch_run(options.folder.parent, ranks) as folder:
        text = options.recipe_text()
        candidates, reading = None, time.perf_counter()
        if suggest:
            candidates = Candidates.of(text, ShardSet.open(options.shards).resolutions)
            text = dataclasses.replace(text, toml=candidates.toml)
            began += time.perf_counter() - reading  # why: a training does not do this
        options = dataclasses.replace(options, folder=folder, recipe=None, set_=(), first_recipe=text)
        with session(options, ranks) as run:
            limit_s = limit_s or default_limit_s(run.learner)
            announce(run.plan, limit_s)
            with run.ready(limit_s=limit_s) as loader:
                ready = time.perf_counter()
                left_s = None if limit_s is None else limit_s - run.warm_up_s
                result, lines = run.forecast(loader, began=began, folds=runs, limit_s=left_s), list[str]()
                if candidates and suggest and budget_s:
                    # why first: all ranks have to choose the same; the candidates were validated in every epoch
                    result = dataclasses.replace(ranks.broadcast(result), eval_every=candidates.base.eval.every_epochs)
                    epochs = choose(
                        result,
                        candidates.weights(),
                        least=candidates.least(),
                        budget_s=budget_s,
                        is_valid=candidates.is_valid,
                    )
                    lines, result = reasons(result, epochs, budget_s), proposal(result, epochs)
                    if ranks.is_main:
                        origin = _origin(candidates.base, run.plan, run.learner, options.threads)
                        candidates.write(suggest, epochs, [origin, *lines])
                    command = as_typed("train", {"shards": str(options.shards), "recipe": str(suggest)})
                    lines.append(f"{suggest}: written; {command} trains with it")
                elif budget_s:
                    too_long = result.total_s() > budget_s
                    is_late = left_s is not None and time.perf_counter() - ready > left_s
                    doubled = None
                    if too_long and not is_late:
                        doubled = _with_doubled_batches(result, run.plan, run.learner)
                    lines = advice(result, budget_s, doubled, least=[stage.min_epochs for stage in run.plan.stages])
                    if too_long and is_late:
                        lines.append("- larger batches: not measured, to keep within --limit")
                print(table(result))
                print(_sampling_lines(run.plan), end="")
                if patience := run.recipe.stop.patience:
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


def _origin(base: Recipe, plan: Plan, learner: Learner, threads: int) -> str:
    """The base, set and machine of a proposal, in one line."""
    machine = describe(learner.device, threads=threads)
    ranks = f", {learner.ranks.world_size} processes" if learner.ranks.world_size > 1 else ""
    return (
        f"Made by `resolute plan --suggest …` from {base.name} ({base.hash}) and the shard set {plan.shards.hash}, "
        f"measured on {datetime.date.today()}: {machine['gpu'] or machine['cpu']}, {threads} threads{ranks}"
    )


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
