"""Library users get the checks of a recipe: each wrong argument is one line."""

from __future__ import annotations

from typing import Any

import pytest

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.plan.plan import Plan
from resolute.pipeline.plan.stage import AUTO, Stage

STAGE: dict[str, Any] = {"res": 32, "epochs": 1, "batch_size": 8}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fraction_mode": "rotating"}, 'Plan.fraction_mode: got \'rotating\', expected "rotate", "fixed"; correct it'),
        ({"eval_batchsize": 8}, "Plan.eval_batchsize: no such argument; did you mean eval_batch_size?"),
        ({"shards": "shards"}, "Plan.shards: got 'shards', expected a ShardSet; open it with ShardSet.open"),
        ({"stages": []}, "Plan.stages: got [], expected a list of at least one Stage; correct it"),
        ({"stages": [Stage(**{**STAGE, "batch_size": AUTO})]}, "stages.batch_size: got auto, expected a number"),
        (
            {"stages": [Stage(**STAGE), Stage(**{**STAGE, "batch_size": 9999})]},
            "stages[1].batch_size: got 9999, expected at most 75, the training samples of an epoch; lower it",
        ),
        (
            {"stages": [Stage(**{**STAGE, "batch_size": 75, "fraction": 0.5})]},
            "stages[0].batch_size: got 75, expected at "
            "most 38, the training samples of an epoch; lower it, or raise its fraction",
        ),
    ],
)
def test_a_wrong_argument_of_a_plan_is_one_line(shard_set: ShardSet, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ResoluteError) as error:
        Plan(**{"shards": shard_set, "stages": [Stage(**STAGE)], **options})
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)
