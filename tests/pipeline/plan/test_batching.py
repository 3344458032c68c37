"""Resolutions and sizes of batches: every sample once, equal shares, no tiny batch, the same on any rank."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import numpy as np
import pytest

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.plan.batching import each_epoch, epoch_batches
from resolute.pipeline.plan.plan import Plan
from resolute.pipeline.plan.stage import Stage

RAMP = (32, 40, 48, 56, 64)


def _stage(**changes: Any) -> Stage:
    return Stage(**{"res": RAMP, "epochs": 7, "batch_size": 8, "res_schedule": "step", **changes})


@pytest.mark.parametrize(
    ("schedule", "sizes", "samples"),
    [
        ("epoch", 8, 61),
        ("step", (40, 26, 18, 13, 10), 200),
        ("step", (3, 9, 1, 30, 5), 61),
        ("random", (3, 9, 1, 30, 5), 1003),
        ("random", 8, 200),
    ],
)
def test_every_sample_is_in_one_batch_and_no_batch_is_tiny_or_too_large(
    schedule: Any, sizes: Any, samples: int
) -> None:
    stage = _stage(res_schedule=schedule, batch_size=sizes)
    for epoch in range(stage.epochs):
        at = first = 0
        for run in epoch_batches(stage, samples=samples, epoch=epoch, seed=5, run_epoch=epoch):
            assert (run.start, run.first) == (at, first)
            for k in range(run.batches):
                shape, start, end = run.at(k)
                assert shape in stage.shapes
                assert start == at
                assert 1 <= end - start <= shape.batch_size
                # what is left is shared by the last two batches; a part of an epoch begins with at least half a batch
                if k < run.batches - 2:
                    assert end - start == shape.batch_size
                at = end
            first += run.batches
        assert at == samples


def test_a_ramp_by_epoch_gives_each_resolution_an_equal_number_of_epochs_in_order() -> None:
    res = [
        [shape.res for run in runs for shape in run.shapes]
        for _, _, runs in each_epoch([_stage(res_schedule=None, epochs=12)], samples=100)
    ]
    assert [len(each) for each in res] == [1] * 12
    assert res == sorted(res)
    counts = Counter(each[0] for each in res)
    assert set(counts) == set(RAMP)
    assert max(counts.values()) - min(counts.values()) <= 1


def test_a_ramp_by_step_gives_each_resolution_an_equal_number_of_samples_in_order() -> None:
    stage = _stage(batch_size=(41, 26, 18, 13, 10), epochs=3)
    runs = [run for _, _, runs in each_epoch([stage], samples=1000) for run in runs]
    batches = [run.at(k) for run in runs for k in range(run.batches)]
    assert [shape.res for shape, _, _ in batches] == sorted(shape.res for shape, _, _ in batches)
    samples = Counter[int]()
    for shape, start, end in batches:
        samples[shape.res] += end - start
    for shape in stage.shapes:
        assert abs(samples[shape.res] - 600) <= max(each.batch_size for each in stage.shapes)


def test_drawn_resolutions_are_used_equally_often_in_a_random_order() -> None:
    (run,) = epoch_batches(_stage(res_schedule="random"), samples=8 * 5 * 200, epoch=0, seed=1)
    drawn = np.array([run.at(k)[0].res for k in range(run.batches)]).reshape(-1, 5)
    assert (np.sort(drawn, axis=1) == RAMP).all()  # each group of five batches has all five
    (other,) = epoch_batches(_stage(res_schedule="random"), samples=8 * 5 * 200, epoch=0, seed=2)
    assert other.batches == run.batches
    assert [other.at(k)[0].res for k in range(run.batches)] != drawn.ravel().tolist()
    orders = Counter(map(tuple, drawn[:-2].tolist()))
    assert len(orders) > 80  # of 120


def test_a_batch_reads_the_smallest_stored_size_with_its_detail_and_crops_the_same_part(shard_set: ShardSet) -> None:
    stages = [Stage(res=res, epochs=1, batch_size=16) for res in (1, 31, 32, 33, 47, 48, 49, 64)]
    plan = Plan(shard_set, stages, eval_batch_size=5)
    for index in range(plan.total_batches):
        spec = plan.batch(index)
        assert spec.stored_res == min(size for size in (32, 48, 64) if size >= spec.res)
        assert (spec.res, spec.stored_res) == plan.res_at(index)
    crops = {}
    for res in (40, 64):
        spec = Plan(shard_set, [Stage(res=res, epochs=1, batch_size=75)], eval_batch_size=None).batch(0)
        records = shard_set.splits["train"].stored[spec.stored_res][spec.ids]
        crops[res] = spec.crops / np.stack([records["width"], records["height"]] * 2, axis=1)
    assert np.abs(crops[40] - crops[64]).max() < 2 / 55  # rounding, of images of 55 px and more


def test_a_resolution_above_all_stored_ones_is_refused_before_the_run(shard_set: ShardSet) -> None:
    message = "too small to train at 65 px, got images for 32,48,64 px, expected 65 px or more; choose a lower"
    with pytest.raises(ResoluteError, match=message):
        Plan(shard_set, [Stage(res=(32, 65), epochs=2, batch_size=8)])
    with pytest.raises(ResoluteError, match=r"stages\[0\]\.res: its steps are too few for 5 resolutions, got none at"):
        Plan(shard_set, [_stage(epochs=1, batch_size=60)])


def test_constant_pixels_keeps_the_pixels_of_a_step() -> None:
    stage = Stage(res=(128, 224), res_step=32, epochs=4, batch_size="constant_pixels", base_batch_size=64)
    assert stage.resolutions == (128, 160, 192, 224)
    assert [shape.batch_size for shape in stage.shapes] == [196, 125, 87, 64]
    for shape in stage.shapes:
        assert abs(shape.batch_size * shape.res**2 / (64 * 224**2) - 1) < 0.01
    down = dataclasses.replace(stage, res=(224, 128))
    assert down.shapes == stage.shapes[::-1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"res_step": 7, "res": [32, 64]},
            "stages.res_step: got 7, expected a divisor of 32, the difference of the two in res, such as 4",
        ),
        ({"res_schedule": None, "epochs": 4}, "stages.epochs: got 4, expected at least 5, one for each resolution, or"),
        ({"base_batch_size": 8}, "stages.base_batch_size: got 8, expected none, since it has an effect only with"),
    ],
)
def test_settings_of_several_resolutions_without_effect_or_sense_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ResoluteError) as error:
        _stage(**changes)
    assert str(error.value).startswith(message)
