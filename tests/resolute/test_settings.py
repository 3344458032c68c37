"""Settings and arguments are checked once, in the same words, and converted to their types."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from pydantic import Field

from resolute.errors import ResoluteError
from resolute.pipeline.plan.stage import Augment, Stage
from resolute.settings import checked, described, setting, settings
from resolute.train.recipe.schema import Optim, Recipe
from resolute.train.recipe.sections import AutoLoss, OneCycleSchedule

Half = Annotated[float, Field(ge=0, lt=0.5)]


@settings("inner")
class Inner:
    size: int = setting(1, "its size", ge=1)


@settings("outer")
class Outer:
    steps: Annotated[int, described("how many", ge=0, le=10)]
    rate: Half | tuple[Half, Half] | None = setting(None, "one, or a pair")
    kind: Literal["a", "b"] = setting("a", "which")
    path: str = setting("", "a file")
    options: dict[str, Any] = setting({}, "anything")
    inner: Inner = setting(Inner(), "a group")


def test_a_group_takes_what_json_takes_for_its_types() -> None:
    outer = Outer(steps=np.int64(3), rate=[0, np.float32(0.25)], path=Path("x/y"), inner=Inner(size=2))  # type: ignore[arg-type]
    assert outer == Outer(steps=3, rate=(0.0, 0.25), path="x/y", inner={"size": 2})  # type: ignore[arg-type]
    assert isinstance(outer.rate, tuple)
    assert [type(value) for value in (outer.steps, outer.rate, *outer.rate)] == [int, tuple, float, float]
    assert repr(outer) == "Outer(steps=3, rate=(0.0, 0.25), path='x/y', inner=Inner(size=2))"
    assert pickle.loads(pickle.dumps(outer)) == outer
    with pytest.raises(dataclasses.FrozenInstanceError):
        outer.steps = 3  # type: ignore[misc]


def test_arguments_of_a_function_are_checked_and_converted_in_the_same_words() -> None:
    @checked("area")
    def area(shape: object, *, sides: tuple[Half, Half] = (0.0, 0.0), times: int = 1, box: Path | None = None) -> Any:
        return shape, sides, times, box

    got = area(3, sides=[0, 0.25], times=np.int8(2), box=Path("a"))  # type: ignore[arg-type]
    assert got == (3, (0.0, 0.25), 2, Path("a"))
    assert area(shape=None) == (None, (0.0, 0.0), 1, None)
    for values, message in (
        ({"times": 1.5}, "area.times: got 1.5, expected integer; correct it"),
        ({"sides": [0.1]}, "area.sides: got [0.1], expected 2 numbers, at least 0, below 0.5; correct it"),
        ({"side": 1}, "area.side: no such argument; did you mean sides?"),
    ):
        with pytest.raises(ResoluteError) as error:
            area(3, **values)
        assert str(error.value) == message


@pytest.mark.parametrize(
    ("cls", "name", "advice"),
    [
        (Augment, "mixup", "did you mean mixup_alpha? (or mixup_prob, mixup_switch_prob, mixup_mode)"),
        (Augment, "cutmix", "did you mean cutmix_alpha?"),
        (Augment, "erasing", "did you mean random_erasing_prob? (or "),
        (Augment, "color_jitter", "did you mean jitter?"),
        (Augment, "randaugment", 'did you mean policy = "randaugment"?'),
        (Augment, "rand_augment", 'did you mean policy = "randaugment"?'),
        (Augment, "horizontal_flip", "did you mean flip_prob?"),
        (Augment, "brightness", "did you mean jitter?"),
        (Augment, "random_resized_crop", "did you mean scale?"),
        (Augment, "zzz_prob", "known: scale, ratio, "),
        (Augment, "mixup_alfa", "did you mean mixup_alpha?"),
        (Stage, "num_epochs", "did you mean epochs?"),
        (Stage, "mixup", "did you mean augment.mixup_alpha? (or "),
        (Stage, "epoch", "did you mean epochs?"),
        (Stage, "batch", "did you mean batch_size? (or base_batch_size)"),
        (AutoLoss, "smoothing", "did you mean label_smoothing?"),
        (Optim, "lrr", "did you mean lr?"),
        (Optim, "base_lr", "did you mean lr?"),
        (Optim, "optimizer", "did you mean name?"),
        (Optim, "clip", "did you mean clip_norm? (or clip_value, clip_agc)"),
        (OneCycleSchedule, "warmup", "did you mean warmup_epochs?"),
        (OneCycleSchedule, "xyz", "known: batch_rule, "),
    ],
)
def test_an_unknown_setting_is_answered_with_those_that_may_be_meant(cls: Any, name: str, advice: str) -> None:
    stage = {"res": 1, "epochs": 1, "batch_size": 1} if cls is Stage else {}
    with pytest.raises(ResoluteError) as error:
        cls(**stage, **{name: 1})
    assert f"{name}: no such setting; {advice}" in str(error.value)


@pytest.mark.parametrize(
    ("table", "line"),
    [
        ({"lr": 0.1}, "lr: no such setting; did you mean optim.lr?"),
        ({"epochs": 3}, "epochs: no such setting; did you mean stages.epochs? (or scale_epochs)"),
        ({"model_name": "resnet18"}, "model_name: no such setting; did you mean model.name?"),
        ({"img_size": 128}, "img_size: no such setting; did you mean stages.res?"),
        ({"augments": {}}, "augments: no such setting, expected augment; rename it"),
        ({"data": {"batch_size": 8}}, "data.batch_size: no such setting; did you mean stages.batch_size? (or eval."),
        ({"data": {"seed": 8}}, "data.seed: no such setting; did you mean seed, at the top of the file?"),
        ({"augment": {"crop_pct": 1}}, "stages.augment.crop_pct: no such setting; did you mean eval.crop_pct?"),
        ({"augment": {"reprob": 1}}, "stages.augment.reprob: no such setting, expected augment.random_erasing_prob; "),
        (
            {"augment": {"re_prob": 1}},
            "stages.augment.re_prob: no such setting, expected augment.random_erasing_prob; ",
        ),
        ({"loss": {"bce": True}}, 'loss.bce: no such setting; did you mean kind = "bce"?'),
        ({"schedule": {"warmup": 3}}, "schedule.warmup: no such setting; did you mean warmup_epochs? (or ema.warmup)"),
    ],
)
def test_a_key_in_the_wrong_place_of_a_recipe_is_answered_with_its_place(table: dict[str, Any], line: str) -> None:
    with pytest.raises(ResoluteError) as error:
        Recipe.parse({"stages": [{"res": 1, "epochs": 1, "batch_size": 1}], **table}, name="x")
    assert str(error.value).startswith(f"recipe: {line}")
