"""`RecipeStage`: a stage of a recipe, with the keys of the run that it overrides."""

from __future__ import annotations

from typing import Any

from resolute.errors import ResoluteError
from resolute.pipeline.plan.stage import OTHER_STAGE_NAMES, Augment, Stage
from resolute.settings import closest, definitions, setting, settings

__all__ = ["STAGE_KEYS", "RecipeStage"]

# Sections of the run, and the keys of each that a stage may override.
STAGE_KEYS: dict[str, tuple[str, ...]] = {
    "augment": tuple(key.name for key in definitions(Augment)),
    "loss": ("label_smoothing",),
    "model": ("drop_rate", "drop_path_rate"),
    "optim": ("lr_scale", "weight_decay"),
}
_OTHER_NAMES = {
    **OTHER_STAGE_NAMES,
    "lr_scale": "stages.optim.lr_scale",
    **dict.fromkeys(("freeze_to", "unfreeze_to"), "stages.train_from"),
}


@settings("stages", other_names=_OTHER_NAMES)
class RecipeStage(Stage):
    """A stage of a recipe: `[[stages]]`. What it adds to `Stage` changes the training, not the stream of batches.

    `loss`, `model` and `optim` hold the keys of `STAGE_KEYS` that have another value than in the run; see
    `Recipe.in_stage`. `augment` is complete: `Recipe.parse` has merged it with that of the run.
    """

    train_from: str | None = setting(
        None,
        'train this layer and those above it, freeze those below; "head": the classifier alone; none: train all',
    )
    loss: dict[str, Any] = setting({}, "overrides [loss] in this stage: { label_smoothing = 0.0 }")
    model: dict[str, Any] = setting({}, "overrides [model] in this stage: drop_rate, drop_path_rate")
    optim: dict[str, Any] = setting({}, "overrides [optim] in this stage: lr_scale, weight_decay")

    def __post_init__(self) -> None:
        super().__post_init__()
        for section in ("loss", "model", "optim"):
            for name in getattr(self, section):
                if name not in STAGE_KEYS[section]:
                    known = closest(name, dict.fromkeys(STAGE_KEYS[section]))
                    raise ResoluteError(f"stages.{section}.{name}: not a key that a stage overrides; {known}")
