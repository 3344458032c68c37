"""`resolute plan --budget 11m --suggest FILE`: writes a recipe whose stages use a time budget well.

The rule: from the fewest epochs of every stage, at least two, each next epoch goes to the stage that gains most per
second, until none fits into the budget. The gain is that of resolution * log(1 + epochs), so that

- each stage gets a share of the training time in proportion to its resolution: the gain of a further epoch falls as
  1 / epochs, and the epochs of a fast stage cost less. `benchmarks/recipes/imagenette_old.toml`, tuned by accuracy, is
  close (64, 96, 128 px: 25, 35, 40 % of the pixels, here 22, 33, 44); later recipes give the last stages less;
- the first stages are left out if the budget is too small for the fewest epochs of all; the last stage, at the full
  resolution, always stays.

Neither samples nor pixels alone can be the measure: the most samples are all at the smallest resolution, and the most
pixels all at the one with the fastest pixels, which is often the largest.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resolute.errors import ResoluteError
from resolute.files import output_file
from resolute.pipeline.plan.stage import AUTO, Stage
from resolute.train.logs.run_log import format_duration
from resolute.train.recipe.schema import Recipe, scaled_schedule
from resolute.train.recipe.text import RecipeText
from resolute.train.recipe.toml import recipe_text

from .estimate import Forecast

__all__ = ["Candidates", "choose", "proposal", "reasons"]

_RULE = (
    "each next epoch goes to the stage in which resolution * log(1 + epochs) gains most per second, until none "
    "fits, so that a stage's time is roughly proportional to its resolution"
)
_MIN_EPOCHS = 2
# Source: the first resolutions of DAWNBench's 128 of 288 px, FFCV's 160 of 192, Composer's initial_scale = 0.5
_MIN_RES_FRAC = 0.5


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """A base recipe whose stages are all candidates: its own, and new ones at stored resolutions.

    `recipe`: parsed from `table`, the base's values with the added stages and with every epoch count resolved.
    """

    base: Recipe
    recipe: Recipe
    table: dict[str, Any]

    @classmethod
    def of(cls, text: RecipeText, stored: Sequence[int]) -> Candidates:
        """`stored`: the set's resolutions, px. Raises `ResoluteError` as `Recipe.from_text` does.

        A stored resolution below the last stage's becomes a stage, with the other values of the next larger stage, if
        it is at least half the last one's. Not in recipes with ramps, with resolutions that do not rise, or with
        stages that depend on each other (`_depend`).
        """
        base = Recipe.from_text(text)
        table = text.table()
        table.pop("scale_epochs", None)
        stages = [
            {**written, "epochs": stage.epochs} for written, stage in zip(table["stages"], base.stages, strict=True)
        ]
        own = [stage.max_res for stage in base.stages]
        rises = own == sorted({*own}) and all(len(stage.resolutions) == 1 for stage in base.stages)
        if rises and not _depend(base):
            for res in stored:
                if _MIN_RES_FRAC * own[-1] <= res < own[-1] and res not in own:
                    larger = next(stage for stage in stages if stage["res"] > res)
                    new = {name: value for name, value in larger.items() if name != "eval_res"}
                    stages.insert(stages.index(larger), new | {"res": res})
        table["stages"] = stages
        if base.ema.last_epochs:
            table["ema"] = {**table["ema"], "last_epochs": base.ema.last_epochs}  # scaled, as the stages
        recipe = Recipe.parse(_with_schedule(table, base, 1.0), name=base.name, where=text.where)
        return cls(base=base, recipe=recipe, table=table)

    @property
    def toml(self) -> str:
        """The recipe to measure: with all candidates, each of them validated."""
        measured = _with_schedule(self.table, self.base, 1.0)
        return recipe_text(measured | {"eval": {**measured.get("eval", {}), "every_epochs": 1}})

    def with_epochs(self, epochs: Sequence[int]) -> dict[str, Any]:
        """The table of the base recipe with `epochs` of each candidate (0: left out)."""
        stages = [
            written | {"epochs": count} | _batch_size(stage)
            for written, stage, count in zip(self.table["stages"], self.recipe.stages, epochs, strict=True)
            if count
        ]
        table = _with_schedule({**self.table, "stages": stages}, self.base, sum(epochs) / self.base.total_epochs)
        if self.base.ema.last_epochs:
            table["ema"] = {**table["ema"], "last_epochs": min(self.base.ema.last_epochs, sum(epochs))}
        return table

    def write(self, path: Path, epochs: Sequence[int], comments: Sequence[str]) -> None:
        """Write the recipe with `epochs` of each candidate, below the `comments`. Raises `ResoluteError`.

        It raises too if the epochs do not suit the rest of the recipe, such as milestones that become equal.
        """
        table = self.with_epochs(epochs)
        intended = Recipe.parse(table, name=path.stem, where=str(path))
        text = "".join(f"# {line}\n" for line in comments) + f"\n{recipe_text(table)}"
        if Recipe.parse(tomllib.loads(text), name=path.stem) != intended:
            raise ResoluteError(f"{path}: got kwargs that TOML cannot hold, expected plain values; simplify them")
        with output_file(path) as file:
            file.write(text.rstrip().encode() + b"\n")

    def weights(self) -> list[float]:
        """The stages' factors in the gain: their (mean) resolutions, px."""
        return [sum(stage.resolutions) / len(stage.resolutions) for stage in self.recipe.stages]

    def least(self) -> list[int]:
        """The stages' smallest numbers of epochs: two, or one for each resolution of a ramp by epoch."""
        return [max(_MIN_EPOCHS, stage.min_epochs) for stage in self.recipe.stages]

    def is_valid(self, kept: Sequence[int]) -> bool:
        """Whether a recipe of the stages `kept` alone is valid: it may set what only a stage left out has used."""
        if len(kept) < len(self.recipe.stages) and _depend(self.recipe):
            return False
        epochs = [stage.epochs * (number in kept) for number, stage in enumerate(self.recipe.stages)]
        try:
            Recipe.parse(self.with_epochs(epochs), name=self.base.name)
        except ResoluteError:
            return False
        return True


def _depend(recipe: Recipe) -> bool:
    """Whether stages depend on those before them: on what these have trained, or on the first one's batch size."""
    return recipe.freeze.mode != "none" or (recipe.schedule.batch_rule != "none" and recipe.schedule.base_batch is None)


def _batch_size(stage: Stage) -> dict[str, Any]:
    """The key that sets a stage's batch size, if the recipe's text derives it from the stages beside it."""
    if stage.batch_size == "constant_pixels":
        return {"base_batch_size": stage.base_batch_size}
    return {"batch_size": stage.batch_size} if isinstance(stage.batch_size, int) and stage.batch_size != AUTO else {}


def _with_schedule(table: dict[str, Any], base: Recipe, factor: float) -> dict[str, Any]:
    """A copy of the table, with the epoch counts of its schedule replaced by those of `base` times `factor`."""
    scaled = scaled_schedule(base.schedule, factor)
    counts = {
        "warmup_epochs": scaled.warmup_epochs,
        "period_epochs": scaled.period_epochs,
        "milestone_epochs": [*scaled.milestone_epochs],
    }
    written = table.get("schedule", {})
    return {**table, "schedule": {name: counts.get(name, value) for name, value in written.items()}}


def choose(
    result: Forecast,
    weights: Sequence[float],
    *,
    least: Sequence[int],
    budget_s: float,
    is_valid: Callable[[Sequence[int]], bool] = lambda kept: True,
) -> list[int]:
    """Epochs per stage of `result` within `budget_s` by the rule: 0 for the first stages, or at least `least`.

    `is_valid` takes the numbers of the stages that stay. Raises `ResoluteError`, with the smallest possible budget, if
    the fewest epochs do not fit.
    """
    count, shortest = len(least), math.inf
    for first in range(count):
        if not is_valid(range(first, count)):
            continue
        epochs = [0] * first + [*least[first:]]
        shortest = min(shortest, result.total_s(epochs))
        if result.total_s(epochs) <= budget_s:
            return _filled(result, weights, epochs, budget_s)
    raise ResoluteError(
        f"--budget: got {format_duration(budget_s)}, expected at least {math.ceil(shortest)}s: the start plus the "
        "fewest epochs of every stage that must stay; raise it"
    )


def _filled(result: Forecast, weights: Sequence[float], epochs: list[int], budget_s: float) -> list[int]:
    """`epochs`, which fit, and all that still fit, one after another, in the stages that have any."""
    costs = [stage.epoch_s + stage.eval_s / result.eval_every + result.save_s for stage in result.stages]
    open_ = {number for number, count in enumerate(epochs) if count}
    while open_:
        stage = max(open_, key=lambda i: weights[i] * math.log((2 + epochs[i]) / (1 + epochs[i])) / costs[i])
        epochs[stage] += 1
        if result.total_s(epochs) > budget_s:
            epochs[stage] -= 1
            open_.remove(stage)
    return epochs


def proposal(result: Forecast, epochs: Sequence[int]) -> Forecast:
    """The forecast of the stages with `epochs` (0: left out), numbered anew."""
    kept = [(stage, count) for stage, count in zip(result.stages, epochs, strict=True) if count]
    stages = tuple(
        dataclasses.replace(
            stage,
            stage=number,
            epochs=count,
            ramp_steps=None if stage.ramp_steps is None else round(stage.ramp_steps * count / stage.epochs),
        )
        for number, (stage, count) in enumerate(kept)
    )
    return dataclasses.replace(result, stages=stages)


def reasons(result: Forecast, epochs: Sequence[int], budget_s: float) -> list[str]:
    """Lines that say what was chosen and why; `result` is of all candidates."""
    chosen = proposal(result, epochs)
    trained_s = chosen.parts_s()["training"] / chosen.folds
    lines = [f"rule: {_RULE}"]
    for stage in chosen.stages:
        share = stage.epochs * stage.epoch_s / trained_s
        lines.append(
            f"stage {stage.stage}: {stage.epochs} epochs at {stage.res} px, {stage.epoch_s:.3g} s each, "
            f"{100 * share:.0f} % of the training time"
        )
    if left_out := [str(stage.res) for stage, count in zip(result.stages, epochs, strict=True) if not count]:
        lines.append(f"left out: {', '.join(left_out)} px: the budget is too small for their fewest epochs")
    parts = ", ".join(f"{name} {format_duration(value)}" for name, value in chosen.parts_s().items())
    runs = f" in {chosen.folds} folds" if chosen.folds > 1 else ""
    total = format_duration(chosen.total_s())
    return [*lines, f"forecast: {total}{runs} of the budget of {format_duration(budget_s)}: {parts}"]
