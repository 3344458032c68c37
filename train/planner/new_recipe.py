"""`resolute recipe`: write the starter recipe of a shard set to a file, with `--budget` with the epochs that fit.

With `--upgrade`, it translates a recipe of an earlier version instead (see `translate`).
"""

from __future__ import annotations

import math
import os
import time

from resolute import cuda
from resolute.errors import ResoluteError
from resolute.files import check_output, output_file
from resolute.train.devices.distributed import Ranks
from resolute.train.devices.hardware import process_age_s
from resolute.train.logs.run_log import format_duration
from resolute.train.options import RecipeOptions, TrainOptions
from resolute.train.recipe.schema import Recipe
from resolute.train.recipe.starter import SetFacts, split_epochs, starter_recipe
from resolute.train.recipe.text import RecipeText
from resolute.train.run_folder import RUNS
from resolute.train.setup import Run
from resolute.train.trainer import session
from resolute.train.translate import translate

from .estimate import Forecast, parse_duration
from .plan import announce, default_limit_s, scratch_run

__all__ = ["main", "most_epochs"]


def main(args: RecipeOptions) -> None:
    """Run the command."""
    if args.upgrade is not None:
        translate(args.upgrade, args.out)
        return
    assert args.out is not None  # checked by `RecipeOptions`
    assert args.shards is not None
    if os.path.lexists(args.out):
        raise ResoluteError(f"{args.out}: exists already, expected a new file; choose another name")
    check_output(args.out, setting="OUT", suffixes=(".toml",))
    budget_s = parse_duration(args.budget) if args.budget else None
    facts, gpu = SetFacts.of(args.shards), args.device != "cpu" and cuda.available()
    text = starter_recipe(facts, gpu=gpu, model=args.model)
    if budget_s:
        result = _measured(args, args.shards, text)
        epochs = most_epochs(result, budget_s)
        text = starter_recipe(facts, gpu=gpu, model=args.model, epochs=epochs)
        took = format_duration(result.total_s(split_epochs(epochs, len(result.stages))))
        print(f"{epochs} epochs take about {took} of the {format_duration(budget_s)}")
    recipe = Recipe.from_text(text)
    with output_file(args.out) as file:
        file.write(text.toml.encode())
    stages = ", ".join(f"{stage.epochs} at {stage.res_text}" for stage in recipe.stages)
    print(f"{args.out}: {recipe.model.name}, epochs: {stages}")


def most_epochs(result: Forecast, budget_s: float) -> int:
    """The most epochs, divided among the stages of the starter recipe, that fit into `budget_s` seconds.

    Raises `ResoluteError` if not even one epoch of every stage fits.
    """
    stages = len(result.stages)

    def takes_s(epochs: int) -> float:
        return result.total_s(split_epochs(epochs, stages))

    if takes_s(stages) > budget_s:
        raise ResoluteError(
            f"--budget: got {format_duration(budget_s)}, but one epoch of every stage and the start take "
            f"{math.ceil(takes_s(stages))}s; raise it, or name a smaller --model"
        )
    epochs = stages
    while takes_s(epochs + 1) <= budget_s:
        epochs += 1
    return epochs


def _measured(args: RecipeOptions, shards: str, text: RecipeText) -> Forecast:
    """The forecast of a run with the recipe `text`, from a few measured steps of every stage."""
    began = time.perf_counter() - process_age_s()  # why: a run's time includes starting Python and loading torch
    options = TrainOptions(shards=shards, device=args.device, threads=args.threads)
    ranks = Ranks()
    with (
        scratch_run(RUNS, ranks) as folder,
        session(Run(options=options, shards=shards, folder=folder, recipe=text), ranks) as run,
    ):
        limit_s = default_limit_s(run.learner)
        announce(run.plan, limit_s)
        with run.ready(limit_s=limit_s) as loader:
            return run.forecast(loader, began=began, limit_s=limit_s and limit_s - run.warm_up_s)
