"""`RecipeStage` and `Regularization`: what a recipe's stages have beyond what the stream of batches needs."""

from __future__ import annotations

import dataclasses
import functools
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import Field

from resolute.errors import check
from resolute.pipeline.plan.stage import BINS, OTHER_STAGE_NAMES, Augment, Probability, Stage
from resolute.settings import setting, settings

__all__ = ["AUGMENT_STRENGTHS", "RecipeStage", "Regularization"]

T = TypeVar("T")
_Rate = Annotated[float, Field(ge=0, lt=1)]
_Alpha = Annotated[float, Field(ge=0, le=4)]
_Strength: TypeAlias = T | tuple[T, T] | None  # a pair: at the smallest and the largest resolution

AUGMENT_STRENGTHS = ("magnitude", "mixup_alpha", "cutmix_alpha", "random_erasing_prob")  # also keys of `Augment`


@settings("regularization")
class Regularization:
    """Strengths of regularisation: `[regularization]`, with single keys overridden per stage.

    Each key replaces the one of the same name in another section. A pair is interpolated linearly in the resolution:
    in a recipe between the smallest and the largest training resolution of the run, in a `RecipeStage` between its own.

    Source: Tan and Le, EfficientNetV2, arXiv 2104.00298, algorithm 1, which is linear in the stage's number. Both rules
    are the same for evenly spaced resolutions, as the algorithm has them.
    """

    drop_rate: _Strength[_Rate] = setting(
        None, "instead of `model.drop_rate`; a pair, here and below: at the smallest and the largest resolution"
    )
    drop_path_rate: _Strength[_Rate] = setting(None, "instead of `model.drop_path_rate`")
    label_smoothing: _Strength[_Rate] = setting(None, "instead of `loss.label_smoothing`")
    weight_decay: _Strength[Annotated[float, Field(ge=0)]] = setting(None, "instead of `optim.weight_decay`")
    magnitude: _Strength[Annotated[float, Field(ge=0, le=BINS - 1)]] = setting(
        None, "instead of `augment.magnitude`; rounded to an integer"
    )
    mixup_alpha: _Strength[_Alpha] = setting(None, "instead of `augment.mixup_alpha`")
    cutmix_alpha: _Strength[_Alpha] = setting(None, "instead of `augment.cutmix_alpha`")
    random_erasing_prob: _Strength[Probability] = setting(None, "instead of `augment.random_erasing_prob`")

    @property
    def strengths(self) -> dict[str, float | tuple[float, float]]:
        """The keys that are set."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    def at(self, res: int, *, smallest: int, largest: int) -> dict[str, float]:
        """Values of the keys that are set, at `res` px, if pairs hold at `smallest` and `largest` px."""
        done = (res - smallest) / ((largest - smallest) or 1)
        return {
            name: value[0] * (1 - done) + value[1] * done if isinstance(value, tuple) else value
            for name, value in self.strengths.items()
        }


@settings("stages", other_names=OTHER_STAGE_NAMES)
class RecipeStage(Stage):
    """A stage of a recipe: `[[stages]]`. What it adds to `Stage` changes the training, not the stream of batches, but
    for the strengths of augmentation in `regularization`.
    """

    lr_scale: float = setting(1.0, "factor on the learning rate of the schedule", gt=0)
    unfreeze_to: str | None = setting(
        None, 'freeze.mode unfreeze: train this layer and those above; "none": only the head'
    )
    freeze_to: str | None = setting(
        None, 'freeze.mode freeze: freeze all layers below this one; "all": all but the head'
    )
    regularization: Regularization = setting(
        Regularization(), "overrides keys of [regularization] in this stage: { drop_rate = 0.2 }"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in self.regularization.strengths.items():
            if isinstance(value, tuple):
                check(
                    len(self.resolutions) > 1,
                    f"stages.regularization.{name}",
                    list(value),
                    "a number, since res is one",
                )

    def regularization_at(self, res: int) -> dict[str, float]:
        """Values of the keys of `regularization` that are set, at `res` px."""
        return self.regularization.at(res, smallest=min(self.resolutions), largest=self.max_res)

    @functools.cached_property
    def augments(self) -> dict[int, Augment]:
        """The augmentation at each of its resolutions, with the strengths of `regularization`."""
        augments = {}
        for res in self.resolutions:
            values: dict[str, Any] = {
                name: value for name, value in self.regularization_at(res).items() if name in AUGMENT_STRENGTHS
            }
            if "magnitude" in values:
                values["magnitude"] = round(values["magnitude"])
            augments[res] = dataclasses.replace(self.augment or Augment(), **values)
        return augments
