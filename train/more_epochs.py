"""`resolute train --run NAME --more-epochs N`: a finished run continued as a new one, from its weights.

The new run has the recipe of the finished one with N epochs of its last stage, a OneCycle of its own and, since its
weights are trained already, a lower learning rate. It is a run like any other: it has a recipe, logs and resumes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from resolute.errors import ResoluteError
from resolute.train import checkpoint
from resolute.train.logs.run_log import RunLogReader
from resolute.train.recipe.schema import Recipe
from resolute.train.recipe.sections import OneCycleSchedule
from resolute.train.recipe.stages import RecipeStage
from resolute.train.recipe.text import RecipeText
from resolute.train.recipe.toml import recipe_text

from .run_folder import existing_run

__all__ = ["LR_FACTOR", "Continuation", "continuation", "continued_recipe"]

LR_FACTOR = 0.3  # of the finished run's peak learning rate


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """A run that continues another one: its folder, its recipe, and the set of the finished run ("" if unknown)."""

    folder: Path
    recipe: RecipeText
    shards: str


def continuation(run: str, epochs: int, *, runs: Path) -> Continuation:
    """The run that continues `run`, a name or folder, by `epochs`; `runs`: the parent of all run folders.

    Raises `ResoluteError` if there is no such run, or it is not finished.
    """
    folder = existing_run(run, runs=runs)
    if not (folder / "run.jsonl").is_file():
        raise ResoluteError(f"--more-epochs: got --run {run}, expected one finished run; name its folder or one fold")
    log = RunLogReader(folder / "run.jsonl")
    log.read()
    if not log.kind("end"):
        raise ResoluteError(
            f"--more-epochs: {folder} is not finished; run the command that began it again, which resumes it, first"
        )
    weights = folder / ("best.pt" if (folder / "best.pt").exists() else checkpoint.LAST)
    state = checkpoint.load(weights, expect={})
    recipe = continued_recipe(Recipe.from_values(state["recipe"], name=state["name"]), epochs, weights=weights)
    name = f"{folder.name}-plus-{epochs}"
    text = f"# {epochs} more epochs of {folder}, from its weights.\n\n{recipe_text(recipe.written())}"
    return Continuation(
        folder=folder.with_name(name),
        recipe=RecipeText(name=name, toml=f"{text.rstrip()}\n", where=f"{folder} with --more-epochs {epochs}"),
        shards=state.get("set", {}).get("source", ""),  # runs of 0.1.0 do not say it
    )


def continued_recipe(recipe: Recipe, epochs: int, *, weights: Path) -> Recipe:
    """The recipe of `epochs` more epochs of the last stage of `recipe`, from the file `weights` of its run.

    Of several resolutions, the stage keeps the largest, with its batch size. What it overrides becomes the run's.
    """
    last, own = recipe.stages[-1], recipe.in_stage(len(recipe.stages) - 1)
    res = last.max_res
    stage = RecipeStage(
        res=res,
        epochs=epochs,
        batch_size=last.batch_size_at(res),
        fraction=last.fraction,
        order=last.order,
        eval_res=last.eval_res,
        augment=last.augment,
        train_from=last.train_from,
    )
    base = recipe.schedule.base_batch or recipe.stages[0].shapes[0].batch_size
    has_rule = recipe.schedule.batch_rule != "none" and base != stage.batch_size
    schedule = OneCycleSchedule()
    if has_rule:
        schedule = OneCycleSchedule(batch_rule=recipe.schedule.batch_rule, base_batch=base)
    return dataclasses.replace(
        recipe,
        stages=(stage,),
        scale_epochs=1.0,
        model=dataclasses.replace(own.model, weights=str(weights), weights_kind="best"),
        optim=dataclasses.replace(own.optim, lr=float(f"{LR_FACTOR * recipe.optim.lr:.2g}")),
        loss=own.loss,
        schedule=schedule,
        ema=dataclasses.replace(recipe.ema, last_epochs=min(recipe.ema.last_epochs, epochs)),
    )
