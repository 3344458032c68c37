"""What does a run consist of? Recipe, shards, plan and learner, from the options of a command line."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from pipeline.dataset.open_dataset import open_dataset
from pipeline.dataset.shard_set import ShardSet
from pipeline.errors import ResoluteError
from pipeline.loader.probe import choose_order
from pipeline.plan.order import Order
from pipeline.plan.plan import Plan
from train.logs.tensorboard import check_installed
from train.planner.batch_size import Probe, cap_memory, real_steps, with_batch_sizes
from train.recipe.schema import Recipe

from . import checkpoint
from .device import pick_device
from .distributed import Ranks
from .loop import Learner
from .memory import keep_freed_memory

__all__ = ["Options", "prepare"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What does not change results: paths, device, threads, how often to save."""

    shards: str | Path  # a folder, a URL that is read through a cache, or a WebDataset that others made
    recipe: Path
    folder: Path
    device: str = "auto"
    threads: int = 2
    decode: Literal["auto", "cpu", "gpu"] = "auto"  # on a GPU: where JPEGs are decoded; auto times real steps
    save_every_s: float = 300.0
    save_every_steps: int = 0  # 0 = by time alone
    keep: int = 2  # checkpoints, beside the best one
    from_: str = "last.pt"  # the checkpoint in the run's folder to go on from
    val: str | None = None  # of a WebDataset: which tars validate, or which part of its samples
    classes: str | None = None  # of a WebDataset: a file with the classes' names
    fold: int | None = None  # in place of the recipe's data.fold
    gpu_memory_gib: float = 0.0  # that tensors may take, as on a smaller GPU; 0 = all
    tensorboard: bool = False  # event files in the folder's tb
    calibrate: bool = False  # measure first what loader and model can do, for the log and the report

    def __post_init__(self) -> None:
        if self.tensorboard:
            check_installed()
        if self.keep < 1:
            raise ResoluteError(f"--keep: got {self.keep}, expected at least 1; choose another")
        if Path(self.from_).name != self.from_:
            raise ResoluteError(f"--from: got {self.from_}, expected a file's name in {self.folder}; give that alone")

    @property
    def newest(self) -> Path:
        return checkpoint.newest(self.folder, self.from_)


def prepare(options: Options, ranks: Ranks) -> tuple[Recipe, ShardSet, Plan, Learner]:
    """All of them as the run needs them; in the recipe, every "auto" that concerns the batches is a value."""
    recipe = Recipe.load(options.recipe)
    if options.fold is not None:
        if recipe.data.fold not in (None, options.fold):
            raise ResoluteError(f"--folds: got fold {options.fold} and data.fold {recipe.data.fold}; leave out one")
        recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, fold=options.fold))
    device = pick_device(options.device, ranks)
    cap_memory(device, options.gpu_memory_gib)
    shards = open_dataset(
        options.shards, resolutions=recipe.resolutions, fold=recipe.data.fold, val=options.val, classes=options.classes
    )
    order = _order(recipe, shards, options.newest, ranks)
    if device.type == "cpu":
        keep_freed_memory()
        torch.set_num_threads(options.threads)
    else:
        torch.backends.cudnn.benchmark = True  # each shape is tuned once, in the warm-up

    def build(recipe: Recipe, ranks: Ranks) -> tuple[Plan, Learner]:
        plan = Plan(
            shards, recipe.stages, seed=recipe.seed, order=order, fraction_mode=recipe.data.fraction_mode,
            eval_batch_size=recipe.eval.batch_size, eval_every_epochs=recipe.eval.every_epochs,
            eval_crop_frac=recipe.eval.crop_frac,
        )  # fmt: skip
        learner = Learner(
            recipe, classes=len(shards.classes), total_steps=plan.total_steps, device=device, ranks=ranks,
            epoch_steps=[segment.batches for segment in plan.passes if segment.split == "train"],
            epoch_samples=[segment.samples for segment in plan.passes if segment.split == "train"],
        )  # fmt: skip
        return plan, learner

    def probe(recipe: Recipe) -> tuple[Plan, Probe]:
        # why alone: a rank that is out of memory leaves the others waiting; why not compiled: each probe is a new shape
        norm = "batch" if recipe.model.norm == "sync" else recipe.model.norm
        simple = dataclasses.replace(
            recipe, model=dataclasses.replace(recipe.model, norm=norm),
            precision=dataclasses.replace(recipe.precision, compile=False),
        )  # fmt: skip
        plan, learner = build(simple, Ranks())
        return plan, real_steps(plan, learner, world=ranks.world)

    def least(found: int) -> int:
        return min(int(each) for each in ranks.collect({ranks.rank: str(found)}).values())

    recipe = with_batch_sizes(
        recipe, device=device, kept=lambda: ranks.agree(checkpoint.peek(options.newest, "recipe")), probe=probe,
        world=ranks.world, agree=least,
    )  # fmt: skip
    plan, learner = build(recipe, ranks)
    return recipe, shards, plan, learner


def _order(recipe: Recipe, shards: ShardSet, newest: Path, ranks: Ranks) -> Order:
    """The order to read in. "auto" is measured once: a run that goes on keeps what its checkpoint says."""
    if recipe.data.order != "auto":
        return recipe.data.order
    kept = ranks.agree(checkpoint.peek(newest, "order"))
    if kept is not None:
        return typing.cast(Order, kept)
    found = choose_order(shards, recipe.stages[0].res) if ranks.first else None
    print(found)
    return ranks.agree(found.order if found else "full")
