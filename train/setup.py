"""Builds a run from its command line options: recipe, shard set, plan and learner."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from resolute import cuda
from resolute.console import say
from resolute.errors import ResoluteError, strip_credentials
from resolute.pipeline.dataset.shard_set import ShardSet, stored_resolutions
from resolute.pipeline.plan.plan import Plan
from resolute.settings import definitions
from resolute.train.devices.device import pick_device
from resolute.train.devices.distributed import Ranks
from resolute.train.devices.hardware import bf16_is_emulated
from resolute.train.devices.memory import keep_freed_memory
from resolute.train.loss.class_weights import class_weights
from resolute.train.model.outputs import Outputs
from resolute.train.model.regularization import with_largest_strengths
from resolute.train.options import PlanOptions, RunOptions, TrainOptions
from resolute.train.planner.batch_size import Probe, cap_memory, real_steps, with_batch_sizes
from resolute.train.recipe import RECIPE_FILE
from resolute.train.recipe.schema import Recipe
from resolute.train.recipe.starter import STARTER, chosen_recipe
from resolute.train.recipe.text import RecipeText
from resolute.urls import is_url

from . import checkpoint
from .learner import Learner
from .more_epochs import continuation
from .run_folder import default_run, new_run

__all__ = ["Run", "set_up"]


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run reads and writes, and the options of its command, which do not change its results."""

    options: TrainOptions
    shards: str | Path  # a folder, or a URL (read through a cache)
    folder: Path
    recipe: RecipeText | None = None  # complete, instead of the recipe of `options`, if the folder has none yet
    fold: tuple[int, int] | None = None  # (fold, number of folds), instead of the recipe's `data.fold`

    @classmethod
    def of(cls, options: PlanOptions | TrainOptions) -> Run:
        """The run of `resolute train`, or `plan`. Raises `ResoluteError` for an invalid run name."""
        if isinstance(options, PlanOptions):
            shared = {key.name: getattr(options, key.name) for key in definitions(RunOptions)}
            options = TrainOptions(shards=options.shards, **shared)
        if options.more_epochs is not None:
            more = continuation(options.run or "", options.more_epochs, runs=options.runs)
            recipe, shards = more.recipe.with_values(options.set_), options.shards or more.shards
            if not shards:
                raise ResoluteError(
                    f"--more-epochs: {options.run} does not say on which set it was trained, expected one; name it "
                    "with --shards"
                )
            return cls(options=options, shards=shards, folder=more.folder, recipe=recipe)
        shards = options.shards or ""
        name = default_run(options.recipe or Path(STARTER), shards) if options.run is None else options.run
        return cls(options=options, shards=shards, folder=new_run(name, runs=options.runs))

    @property
    def set_path(self) -> str:
        """The path or URL of the set from any working directory; without credentials."""
        here = str(self.shards)
        return strip_credentials(here if is_url(here) else str(Path(here).absolute()))

    def recipe_text(self) -> RecipeText:
        """The recipe of the run. Raises `ResoluteError` as `chosen_recipe` does."""
        folder, options = self.recipe_folder, self.options
        if self.recipe is not None and not (folder / RECIPE_FILE).is_file():
            return self.recipe
        gpu = options.device != "cpu" and cuda.available()
        return chosen_recipe(options.recipe, options.set_, shards=self.shards, gpu=gpu, run=folder)

    @property
    def recipe_folder(self) -> Path:
        """The folder that holds the run's recipe; folds have one recipe."""
        return self.folder if self.fold is None else self.folder.parent

    @property
    def newest(self) -> Path:
        return checkpoint.newest(self.folder, self.options.from_)


def set_up(run: Run, text: RecipeText, ranks: Ranks) -> tuple[Recipe, ShardSet, Plan, Learner]:
    """Build all parts of `run` with the recipe `text`; in the returned recipe, batch sizes of "auto" are numbers.

    Raises `ResoluteError` for anything in the options, recipe or shards that cannot be used.
    """
    recipe = Recipe.from_text(text)
    if run.fold is not None:
        fold, folds = run.fold
        if recipe.data.folds not in (None, folds):
            raise ResoluteError(
                f"--folds: got {folds} folds, expected data.folds of the recipe, {recipe.data.folds}; omit one of them"
            )
        recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, fold=fold, folds=folds))
    device = pick_device(run.options.device, ranks, threads=run.options.threads)
    cap_memory(device, run.options.gpu_memory_gib)
    if device.type == "cpu" and run.options.decode == "gpu":
        raise ResoluteError("--decode: got gpu with device cpu, expected cpu; omit --decode")
    if ranks.is_main and recipe.precision.amp == "bf16" and bf16_is_emulated(device):
        say(
            f"precision.amp: got bf16 on a {device.type.upper().replace('CUDA', 'GPU')} without bf16 "
            'instructions, where it is many times slower than float32, expected "auto"; change the recipe'
        )
    # why from the checkpoint: a run reads the same stored resolutions to its end, even if others were added to the set
    read = stored_resolutions(ranks.broadcast(_saved(run, "data")) or {})
    shards = ShardSet.open(
        run.shards,
        resolutions=read if max(read, default=0) >= max(recipe.resolutions) else recipe.resolutions,
        fold=recipe.data.fold,
        folds=recipe.data.folds,
        generation=ranks.broadcast(_saved(run, "generation")),
    )
    if shards.generation + 1 < shards.generations and ranks.is_main:
        print(
            f"{shards.root}: photos were added since this run began; it continues without them, on generation "
            f"{shards.generation}",
            flush=True,
        )
    # why from the checkpoint: a run keeps its order even if its shards have moved to other storage
    auto_order = ranks.broadcast(checkpoint.peek(run.newest, "order")) if recipe.data.order == "auto" else None
    if device.type == "cpu":
        keep_freed_memory()
    else:
        torch.backends.cudnn.benchmark = True  # each shape is autotuned once, in the warm-up

    head = Outputs.of(shards, with_largest_strengths(recipe).loss, recipe.distill)

    def build(recipe: Recipe, ranks: Ranks) -> tuple[Plan, Learner]:
        plan = recipe.plan(shards, auto_order=auto_order)
        learner = Learner(
            recipe,
            classes=len(head.target),
            head=head,
            total_steps=plan.total_steps,
            device=device,
            ranks=ranks,
            epoch_steps=[phase.batches for phase in plan.phases if phase.split == "train"],
            epoch_samples=[phase.samples for phase in plan.phases if phase.split == "train"],
            class_weights=class_weights(recipe.loss, plan),
        )
        return plan, learner

    def probe(recipe: Recipe) -> tuple[Plan, Probe]:
        # why on single ranks: one that is out of memory would leave the others waiting in a collective operation;
        # why not compiled: each probe is a new shape
        norm = "batch" if recipe.model.norm == "sync" else recipe.model.norm
        simple = dataclasses.replace(
            recipe,
            model=dataclasses.replace(recipe.model, norm=norm),
            precision=dataclasses.replace(recipe.precision, compile=False),
        )
        plan, learner = build(simple, Ranks())
        return plan, real_steps(plan, learner, world_size=ranks.world_size)

    recipe = with_batch_sizes(
        recipe,
        device=device,
        saved_recipe=lambda: ranks.broadcast(_saved(run, "recipe")),
        probe=probe,
        world_size=ranks.world_size,
        min_over_ranks=lambda size: -ranks.max(-size),
    )
    plan, learner = build(recipe, ranks)
    return recipe, shards, plan, learner


def _saved(run: Run, key: str) -> Any:
    """A value from the run's checkpoint, of a run of folds from that of any fold: which data it reads, for example.

    None if there is no checkpoint.
    """
    folders = [run.folder]
    if run.fold is not None:
        folders += sorted(run.folder.parent.glob("fold-*"))
    values = (checkpoint.peek(checkpoint.newest(folder, run.options.from_), key) for folder in folders)
    return next((value for value in values if value is not None), None)
