"""Library users get the checks of a recipe: each wrong argument is one line, and none is silently something else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.plan.plan import Plan
from resolute.pipeline.plan.stage import AUTO, Augment, Stage
from resolute.train.recipe.stages import Regularization

STAGE: dict[str, Any] = {"res": 32, "epochs": 1, "batch_size": 8}


@pytest.mark.parametrize(("cls", "values", "message"), [
    (Augment, {"mixup_mode": "sample"}, 'augment.mixup_mode: got \'sample\', expected "batch", "elem"; correct it'),
    (Augment, {"jitter": (0.4, 0.4, 0.4)}, "augment.jitter: got [0.4, 0.4, 0.4], expected 4 numbers, 0 to 1"),
    (Augment, {"scale": (0.9, 0.1)}, "augment.scale: got [0.9, 0.1], expected low <= high; correct it"),
    (Augment, {"mixup": 0.2}, "augment.mixup: no such setting; did you mean mixup_prob?"),
    (Augment, {"crop_area": (0.2, 1)}, "augment.crop_area: no such setting, expected augment.scale, its current name"),
    (Regularization, {"drop_rate": (0.1, 0.2, 0.3)}, "regularization.drop_rate: got [0.1, 0.2, 0.3], expected number"),
    (Stage, {**STAGE, "batch_size": 64.0}, "stages.batch_size: got 64.0, expected integer or list of numbers, 1 to"),
    (Stage, {**STAGE, "fraction": 1.5}, "stages.fraction: got 1.5, expected number, above 0, at most 1"),
    (Stage, {**STAGE, "augment": {"flip_prob": 3}}, "stages.augment.flip_prob: got 3, expected number, 0 to 1"),
    (Stage, {"res": 32, "epochs": 1, "batch": 32}, "stages.batch: no such setting; did you mean batch_size?"),
    (Stage, {"res": 32, "epochs": 1}, "stages.batch_size: missing, expected integer or list of numbers, 1 to 1048576"),
])  # fmt: skip
def test_a_wrong_setting_is_refused_as_in_a_recipe(cls: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ResoluteError) as error:
        cls(**values)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("options", "message"), [
    ({"fraction_mode": "rotating"}, 'Plan.fraction_mode: got \'rotating\', expected "rotate", "fixed"; correct it'),
    ({"order": "auto"}, 'Plan.order: got \'auto\', expected "full", "block"; correct it'),
    ({"sampling": "rare"}, 'Plan.sampling: got \'rare\', expected "uniform", "balanced", "sqrt"; correct it'),
    ({"eval_every_epochs": 0}, "Plan.eval_every_epochs: got 0, expected integer, at least 1; correct it"),
    ({"eval_crop_pct": 1.5}, "Plan.eval_crop_pct: got 1.5, expected number, above 0, at most 1; correct it"),
    ({"seed": 0.5}, "Plan.seed: got 0.5, expected integer, 0 to 9223372036854775807; correct it"),
    ({"eval_batchsize": 8}, "Plan.eval_batchsize: no such argument; did you mean eval_batch_size?"),
    ({"stages": []}, "Plan.stages: got [], expected a list of at least one Stage; correct it"),
    ({"stages": [Stage(**{**STAGE, "batch_size": AUTO})]}, "stages.batch_size: got auto, expected a number"),
    ({"stages": [Stage(**STAGE), Stage(**{**STAGE, "batch_size": 9999})]},
     "stages[1].batch_size: got 9999, expected at most 75, the training samples of an epoch; lower it"),
    ({"stages": [Stage(**{**STAGE, "batch_size": 75, "fraction": 0.5})]}, "stages[0].batch_size: got 75, expected at "
     "most 38, the training samples of an epoch; lower it, or raise its fraction"),
])  # fmt: skip
def test_a_wrong_argument_of_a_plan_is_one_line(shard_set: ShardSet, options: dict[str, Any], message: str) -> None:
    arguments = {"stages": [Stage(**STAGE)], **options}
    with pytest.raises(ResoluteError) as error:
        Plan(shard_set, arguments.pop("stages"), **arguments)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_an_evaluation_is_checked_too(shard_set: ShardSet) -> None:
    with pytest.raises(ResoluteError, match=r"^Plan\.evaluation\.batch_size: got 0, expected integer, 1 to 1048576"):
        Plan.evaluation(shard_set, [32], batch_size=0)
    assert Plan.evaluation(shard_set, [32], batch_size=np.int64(4), split="train").total_batches == 19


def test_numpy_numbers_and_lists_are_the_same_as_python_s(shard_set: ShardSet) -> None:
    written = Stage(res=[32, 64], epochs=2, batch_size=[8, 4], augment=Augment(scale=[0.5, 1], flip_prob=np.float64(1)))
    stage = Stage(res=(np.int64(32), np.int32(64)), epochs=np.int64(2), batch_size=np.array([8, 4]),
                  augment=Augment(scale=(0.5, 1.0), flip_prob=1))  # fmt: skip
    assert written == stage
    assert {type(value) for value in (*stage.res, *stage.batch_size, stage.epochs)} == {int}
    plans = [Plan(shard_set, [each], seed=seed, eval_batch_size=np.int64(7), eval_crop_pct=1) for each, seed in (
        (written, 3), (stage, np.int64(3)))]  # fmt: skip
    assert plans[0].fingerprint == plans[1].fingerprint
