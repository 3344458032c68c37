"""The plan is a pure function: every sample exactly once, equal to slow oracles."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import pytest

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.plan.augment_params import CUTMIX, MIXUP, UNMIXED
from resolute.pipeline.plan.crops import centre_crop, random_crop
from resolute.pipeline.plan.order import Order
from resolute.pipeline.plan.plan import Plan
from resolute.pipeline.plan.rng import uniforms
from resolute.pipeline.plan.stage import Augment, Stage
from resolute.train.recipe.stages import RecipeStage
from tests.support.commands import Ended
from tests.support.reference import crop_window

MIXED = Augment(mixup_alpha=0.4, cutmix_alpha=1.0, mixup_prob=0.7)
STAGES = (
    Stage(res=32, epochs=4, batch_size=16, fraction=0.5, augment=MIXED),
    Stage(res=48, epochs=4, batch_size=8, fraction=0.75),
    Stage(res=64, epochs=2, batch_size=12),
)


def _plan(
    shards: ShardSet,
    *,
    mode: Literal["rotate", "fixed"] = "rotate",
    stages: Sequence[Stage] = STAGES,
    seed: int = 3,
    order: Order = "shuffled",
    eval_batch_size: int = 4,
) -> Plan:
    return Plan(
        shards, stages, seed=seed, order=order, fraction_mode=mode, eval_batch_size=eval_batch_size, eval_every_epochs=2
    )


def _ids(plan: Plan, epoch: int, split: str = "train") -> list[int]:
    specs = (plan.batch(i) for i in range(plan.total_batches))
    return [int(i) for spec in specs if (spec.epoch, spec.split) == (epoch, split) for i in spec.ids]


@pytest.mark.parametrize("order", ["shuffled", "windowed"])
def test_every_epoch_sees_its_fraction_exactly_once(shard_set: ShardSet, order: Order) -> None:
    plan = _plan(shard_set, order=order)
    for epoch in range(10):
        ids = _ids(plan, epoch)
        assert len(ids) == len(set(ids)) == round(75 * STAGES[min(epoch // 4, 2)].fraction)
    assert sorted(_ids(plan, 9)) == list(range(75))
    assert sorted(_ids(plan, 9, "val")) == list(range(15))


def test_rotating_fractions_see_every_sample_equally_often(shard_set: ShardSet) -> None:
    halves = Plan(shard_set, [Stage(res=32, epochs=75, batch_size=16, fraction=0.5)], eval_batch_size=None)
    seen = Counter(i for spec in map(halves.batch, range(halves.total_batches)) for i in spec.ids.tolist())
    assert set(seen) == set(range(75))
    assert max(seen.values()) - min(seen.values()) <= 1
    assert len(set(_ids(_plan(shard_set), 0)) & set(_ids(_plan(shard_set), 1))) <= 1


def test_a_stage_may_have_its_own_order(shard_set: ShardSet) -> None:
    mixed = _plan(shard_set, stages=[dataclasses.replace(STAGES[0], order="windowed"), *STAGES[1:]])
    full, block = _plan(shard_set), _plan(shard_set, order="windowed")
    assert _ids(full, 0) != _ids(block, 0)
    for epoch in range(10):
        assert sorted(_ids(mixed, epoch)) == sorted(_ids(block, epoch))  # one ring for all stages
        assert (_ids(mixed, epoch) == _ids(block, epoch)) == (epoch < 4)
        assert _ids(mixed, epoch, "val") == _ids(full, epoch, "val") == _ids(block, epoch, "val")


def test_order_and_augmentation_equal_the_golden_value(shard_set: ShardSet) -> None:
    """Changing this value changes the batches of every run in progress."""
    plan, digest = _plan(shard_set), hashlib.sha256()
    for index in range(plan.total_batches):
        spec = plan.batch(index)
        digest.update(spec.ids.tobytes() + spec.flips.tobytes() + spec.modes.tobytes() + spec.boxes.tobytes())
    assert digest.hexdigest()[:16] == "c50e2b8276bd1b5c"


def test_too_many_ranks_for_a_batch_are_refused_before_the_run(shard_set: ShardSet) -> None:
    plan = Plan(shard_set, [Stage(res=32, epochs=1, batch_size=8)], eval_batch_size=4)
    plan.check_ranks(3)  # the smallest training batch has 5 samples, the smallest of validation 3
    with pytest.raises(ResoluteError, match="0, train: a batch of 5 samples cannot feed 4 ranks, expected 2 per rank"):
        plan.check_ranks(4)
    with pytest.raises(ResoluteError, match="cannot feed 8 ranks"):
        plan.batch(0, rank=0, world_size=8)
    few = Plan(shard_set, [Stage(res=32, epochs=1, batch_size=75)], eval_batch_size=4)
    with pytest.raises(ResoluteError, match=r"0, val: a batch of 3 .* 5 ranks, expected 1 per rank.*eval\.batch_size"):
        few.check_ranks(5)


def test_crops_equal_the_slow_oracle() -> None:
    rng = np.random.default_rng(0)
    sizes = np.concatenate(
        [
            rng.integers(20, 600, (4000, 2)),
            rng.integers(1, 9, (400, 1)) * [[60, 1]],
            rng.integers(1, 9, (400, 1)) * [[1, 60]],
            [[400, 3]],
        ]
    )
    u = uniforms(5, np.arange(len(sizes)), 22)
    for augment in (Augment(), Augment(scale=(0.08, 1.0)), Augment(ratio=(1.0, 1.0))):
        bounds = *augment.scale, *augment.ratio
        got = np.array([random_crop(u[i], w, h, *bounds) for i, (w, h) in enumerate(sizes.tolist())])
        expected = [crop_window(int(w), int(h), u[i], augment.scale, augment.ratio) for i, (w, h) in enumerate(sizes)]
        np.testing.assert_array_equal(got, expected)
        assert (got[:, :2] >= 0).all()
        assert (got[:, :2] + got[:, 2:] <= sizes).all()


def test_centre_crops_are_exact_at_full_size_and_proportional_in_smaller_images() -> None:
    sizes = np.asarray([[341, 256], [256, 300], [256, 256], [100, 80]])
    got = np.array([centre_crop(w, h, 224 / 256) for w, h in sizes.tolist()])
    np.testing.assert_array_equal(got[:3], [[58, 16, 224, 224], [16, 38, 224, 224], [16, 16, 224, 224]])
    np.testing.assert_array_equal(got[3], [15, 5, 70, 70])


@pytest.mark.parametrize("split", ["train", "val"])
def test_an_evaluation_plan_equals_the_validation_of_a_run(shard_set: ShardSet, split: str) -> None:
    plan = Plan.evaluation(shard_set, [32, 40], split=split, batch_size=7, crop_pct=0.8)
    as_val = dataclasses.replace(shard_set, splits={"train": shard_set.splits["val"], "val": shard_set.splits[split]})
    stages = [Stage(res=32, epochs=1, batch_size=8), Stage(res=48, eval_res=40, epochs=1, batch_size=8)]
    run = Plan(as_val, stages, eval_batch_size=7, eval_crop_pct=0.8)
    validations = [spec for spec in map(run.batch, range(run.total_batches)) if spec.split == "val"]
    assert plan.total_batches == len(validations)
    for spec, expected in zip(map(plan.batch, range(plan.total_batches)), validations, strict=True):
        assert (spec.split, spec.stage, spec.res, spec.stored_res, spec.last, spec.global_size) == (
            "val",
            expected.stage,
            expected.res,
            expected.stored_res,
            expected.last,
            expected.global_size,
        )
        np.testing.assert_array_equal(spec.ids, expected.ids)
        np.testing.assert_array_equal(spec.crops, expected.crops)


def test_flips_and_mixing_of_batches_follow_their_probabilities(shard_set: ShardSet) -> None:
    augment = Augment(mixup_alpha=1.0, cutmix_alpha=1.0, mixup_prob=0.6, mixup_switch_prob=0.25, flip_prob=0.25)
    plan = Plan(shard_set, [Stage(res=64, epochs=80, batch_size=4, augment=augment)], eval_batch_size=None)
    specs = [plan.batch(i) for i in range(plan.total_batches)]
    kinds = Counter(int(spec.modes[0]) for spec in specs)
    flips = np.concatenate([spec.flips for spec in specs])
    assert abs(flips.mean() - 0.25) < 4 * np.sqrt(0.25 * 0.75 / len(flips))
    n = len(specs)
    for mode, part in ((UNMIXED, 0.4), (MIXUP, 0.45), (CUTMIX, 0.15)):
        assert abs(kinds[mode] / n - part) < 4 * np.sqrt(part * (1 - part) / n)
    assert all(len(np.unique(spec.modes)) == 1 for spec in specs)


@pytest.mark.slow
def test_the_fingerprint_changes_if_and_only_if_batches_change(
    shard_set: ShardSet, forked: Callable[..., Ended]
) -> None:
    """Equal in another process and for settings that change no batch; different for all others."""
    plan = _plan(shard_set)
    values = [{field.name: getattr(stage, field.name) for field in dataclasses.fields(stage)} for stage in STAGES]
    same = [RecipeStage(**each | {"order": "shuffled"}, optim={"lr_scale": 2.0}, train_from="head") for each in values]
    assert _plan(shard_set, stages=same).fingerprint == plan.fingerprint == _plan(shard_set).fingerprint
    first, *rest = STAGES
    changes: list[dict[str, Any]] = [
        {"res": 64},
        {"epochs": 3},
        {"batch_size": 15},
        {"fraction": 0.25},
        {"order": "windowed"},
        {"eval_res": 48},
        {"augment": Augment(flip_prob=0.4)},
        {"res": (32, 48)},
        {"res": (32, 48), "res_schedule": "step"},
    ]
    changed = [
        _plan(shard_set, mode="fixed"),
        _plan(shard_set, seed=4),
        _plan(shard_set, order="windowed"),
        _plan(shard_set, eval_batch_size=5),
        _plan(shard_set, stages=STAGES[:2]),
        Plan(shard_set, STAGES, seed=3, eval_batch_size=4, eval_every_epochs=1),
        Plan(shard_set, STAGES, seed=3, eval_batch_size=4, eval_every_epochs=2, eval_crop_pct=0.9),
        *(_plan(shard_set, stages=[dataclasses.replace(first, **change), *rest]) for change in changes),
    ]
    fingerprints = [plan.fingerprint, *(other.fingerprint for other in changed)]
    assert len(set(fingerprints)) == len(fingerprints)
    code = (
        "import sys; from tests.pipeline.plan.test_plan import _plan, ShardSet; print(_plan(ShardSet.open(sys.argv[1]))"
        ".fingerprint)"
    )
    assert forked("tests.support.execute", code, shard_set.root).out.strip() == plan.fingerprint


def test_stages_without_augmentation_have_that_of_the_plan(shard_set: ShardSet) -> None:
    mixed, plain = Augment(mixup_alpha=0.3, mixup_mode="elem"), Augment()
    stages = [Stage(res=32, epochs=1, batch_size=16), Stage(res=48, epochs=1, batch_size=16, augment=plain)]
    plan = Plan(shard_set, stages, augment=mixed, seed=3)
    spelt = Plan(shard_set, [dataclasses.replace(stages[0], augment=mixed), stages[1]], seed=3)
    assert plan.fingerprint == spelt.fingerprint != Plan(shard_set, stages, seed=3).fingerprint
    assert Plan(shard_set, stages, seed=3).fingerprint == Plan(shard_set, stages, augment=plain, seed=3).fingerprint
    specs = [plan.batch(index) for index in range(plan.total_batches)]
    assert {spec.stage for spec in specs if spec.modes.any()} == {0}


def test_fixed_fractions_are_nested_subsets(shard_set: ShardSet) -> None:
    plan = _plan(shard_set, mode="fixed", order="windowed")
    parts = [set(_ids(plan, epoch)) for epoch in (0, 3, 4, 7)]
    assert parts[0] == parts[1] < parts[2] == parts[3]


@pytest.mark.parametrize(
    ("augment", "more", "message"),
    [
        (Augment(magnitude=5), {}, "augment.magnitude: without effect, policy is not randaugment; remove it"),
        (Augment(mixup_mode="elem"), {}, "augment.mixup_mode: without effect, no mixing is on; remove it"),
        (Augment(jitter_prob=0.5), {}, "augment.jitter_prob: without effect, jitter is off"),
        (Augment(random_erasing_fill="noise"), {}, "augment.random_erasing_fill: without effect"),
        (Augment(crop_mode="simple", scale=(0.5, 1.0)), {}, "augment.scale: without effect, crop_mode is simple"),
        (Augment(), {"fraction_mode": "fixed"}, "Plan.fraction_mode: without effect, every fraction is 1"),
        (Augment(), {"eval_every_epochs": 2, "eval_batch_size": None}, "Plan.eval_every_epochs: without effect, eval"),
        (Augment(), {"eval_crop_pct": 0.9, "eval_batch_size": None}, "Plan.eval_crop_pct: without effect, eval_batch"),
    ],
)
def test_a_setting_without_effect_is_refused_as_in_a_recipe(
    shard_set: ShardSet, augment: Augment, more: dict[str, Any], message: str
) -> None:
    stages = [Stage(res=32, epochs=1, batch_size=8), Stage(res=48, epochs=1, batch_size=8)]
    with pytest.raises(ResoluteError, match=re.escape(message)):
        Plan(shard_set, stages, augment=augment, **more)
    with pytest.raises(ResoluteError, match=re.escape(message)):
        Plan(shard_set, [dataclasses.replace(stage, augment=augment) for stage in stages], **more)


def test_a_setting_that_has_an_effect_in_one_stage_is_allowed(shard_set: ShardSet) -> None:
    stages = [
        Stage(res=32, epochs=1, batch_size=8, augment=Augment(magnitude=5)),
        Stage(res=48, epochs=1, batch_size=8, augment=Augment(policy="randaugment", magnitude=5)),
    ]
    assert Plan(shard_set, stages).total_steps > 0


@pytest.mark.parametrize("size", [0, -1, (8, 0), "automatic"])
def test_a_batch_size_that_is_none_is_refused_where_it_stands(size: Any) -> None:
    with pytest.raises(ResoluteError, match=r"stages\.batch_size: got .*, expected integer or list of numbers, 1 to "):
        Stage(res=(32, 64), epochs=2, batch_size=size)
