"""`scale_epochs`: all epochs of a recipe times a factor, rounded halves up, at least 1."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Any

import pytest

from resolute.errors import ResoluteError
from resolute.train.recipe.schema import Recipe


def _recipe(*epochs: int, **top: Any) -> Recipe:
    stages = [{"res": 32, "epochs": count, "batch_size": 8} for count in epochs]
    return Recipe.parse({"stages": stages, **top}, name="x")


@pytest.mark.parametrize("scale", [0.5, 0.29, 0.01, 1.5, 2.0, 0.35])
def test_every_stage_is_scaled_and_rounded_halves_up_to_at_least_one_epoch(scale: float) -> None:
    epochs = (1, 2, 3, 10, 50, 18)
    scaled = _recipe(*epochs, scale_epochs=scale)
    exact = [Fraction(str(scale)) * count for count in epochs]
    assert [stage.epochs for stage in scaled.stages] == [max(1, math.floor(x + Fraction(1, 2))) for x in exact]


def test_the_scaled_recipe_equals_one_written_with_those_epochs() -> None:
    schedule = {"kind": "step", "milestone_epochs": [3, 8], "gamma": 0.2}
    scaled = _recipe(6, 4, scale_epochs=0.5, schedule=schedule)
    written = _recipe(3, 2, schedule={**schedule, "milestone_epochs": [2, 4]})
    assert dataclasses.replace(scaled, scale_epochs=1.0) == written
    warm = _recipe(6, 4, scale_epochs=0.5, schedule={"warmup_epochs": 1.5})
    assert warm.schedule.warmup_epochs == 0.75
    averaged = [_recipe(6, 4, scale_epochs=0.5, ema={"last_epochs": last}).ema.last_epochs for last in (1, 3, 10)]
    assert averaged == [1, 2, 5]
    assert _recipe(5, 5, 5, scale_epochs=0.26, ema={"last_epochs": 15}).ema.last_epochs == 3  # of 3 x 1 epochs, not 4
    restarts = _recipe(6, 4, scale_epochs=0.5, schedule={"kind": "cosine_restarts", "period_epochs": 5})
    assert restarts.schedule.period_epochs == 3


def test_a_recipe_read_from_a_checkpoint_is_not_scaled_again() -> None:
    recipe = _recipe(6, 4, scale_epochs=0.5)
    again = Recipe.from_values(recipe.values(), name="x")
    assert again == recipe
    assert [stage.epochs for stage in again.stages] == [3, 2]


@pytest.mark.parametrize(("table", "message"), [
    ({"scale_epochs": 1.01}, "scale_epochs: without effect, 1.01 changes no stage's epochs when rounded; remove it"),
    ({"scale_epochs": 0}, "scale_epochs: got 0, expected number, above 0"),
    ({"scale_epochs": 1e9}, "scale_epochs: got 1000000000.0, expected number, above 0, at most 100000"),
    ({"scale_epochs": 0.3, "schedule": {"kind": "step", "milestone_epochs": [3, 4]}}, "expected rising epochs"),
    ({"scale_epochs": 0.2, "schedule": {"kind": "step", "milestone_epochs": [9]}}, "below the run's 2 epochs"),
])  # fmt: skip
def test_a_factor_that_has_no_effect_or_does_not_fit_is_refused(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ResoluteError) as error:
        _recipe(6, 4, **table)
    assert message in str(error.value)
