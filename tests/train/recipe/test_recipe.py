"""A recipe is checked completely before anything starts."""

from __future__ import annotations

import dataclasses
import datetime
import math
from pathlib import Path
from typing import Any

import pytest

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.plan.order import Order
from resolute.pipeline.storage.local import Folder
from resolute.train.recipe.keys import keys
from resolute.train.recipe.schema import Augment, Distill, Eval, Model, Optim, Recipe
from resolute.train.recipe.sections import OneCycleSchedule

STAGE = {"res": 32, "epochs": 1, "batch_size": 8}
ONE_STAGE = {"stages": [STAGE]}


def of_stages(*changes: dict[str, Any], **tables: Any) -> Recipe:
    return Recipe.parse({"stages": [{**STAGE, **change} for change in changes], **tables}, name="x")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optim": {"momentun": 0.9}}, "optim.momentun: no such setting; did you mean momentum?"),
        ({"stages": []}, "stages: got none, expected at least one"),
        ({"stages": [{"res": 32, "epochs": 1}]}, "stages.batch_size: missing"),
        ({"stages": [{**STAGE, "res": "32"}]}, "stages.res: got '32', expected integer or list of numbers, 1 to 16384"),
        ({"optim": {"name": "adamm"}}, "optim.name: got 'adamm', expected an optimizer of timm.optim (near: adam"),
        ({"optim": {"lr": math.nan}}, "optim.lr: got nan, expected number, above 0"),
        ({"seed": datetime.date(2026, 1, 1)}, "got datetime.date(2026, 1, 1), expected a number, text"),
        ({"stages": [{**STAGE, "epochs": 60_000}] * 2}, "stages.epochs: got 120000, expected at most 100000 over all"),
        (
            {"optim": {"grad_accum_steps": 100}},
            "optim.grad_accum_steps: got 100, expected at most the smallest batch_size",
        ),
        ({"optim": {"name": "adamw", "momentum": 0.9}}, "optim.momentum: without effect, adamw uses optim.betas"),
        ({"augment": {"cutmix_alpha": 1.0, "mixup_switch_prob": 0.3}}, "augment.mixup_switch_prob: without effect"),
        ({"eval": 3}, "eval: got 3, expected table"),
        ({"data": {"fold": 0}}, "data: got only one of fold and folds, expected both"),
        ({"data": {"fold": 3, "folds": 3}}, "data.fold: got 3, expected 0 to 2"),
        ({"stages": [{**STAGE, "order": "auto"}]}, 'order: got \'auto\', expected "shuffled", "windowed"; correct it'),
        (
            {"stages": [{**STAGE, "order": "shuffled"}], "data": {"order": "windowed"}},
            "without effect, every stage has",
        ),
    ],
)
def test_mistakes_are_reported_with_the_expected_value(change: dict[str, object], message: str) -> None:
    with pytest.raises(ResoluteError) as caught:
        Recipe.parse({**ONE_STAGE, **change}, name="x", where="x.toml")
    assert str(caught.value).startswith("x.toml: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (f"{section}.{old}", new)
        for section, cls in {
            "augment": Augment,
            "distill": Distill,
            "eval": Eval,
            "model": Model,
            "optim": Optim,
            "schedule": OneCycleSchedule,
        }.items()
        for old, new in vars(cls)["__settings_other_names__"].items()
    ],
)
def test_an_old_name_of_a_key_is_refused_with_its_current_name(old: str, new: str) -> None:
    section, key = old.split(".")
    with pytest.raises(ResoluteError, match=f"{old}: no such setting, expected {new}; rename it"):
        Recipe.parse({**ONE_STAGE, section: {key: 1}}, name="x")
    assert new in {f"{key.section}.{key.name}" for key in keys()}


def test_a_file_is_read_with_or_without_byte_order_mark_or_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ResoluteError, match=r"none\.toml: no readable recipe.*included are demo, dogs"):
        Recipe.load(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[[stages]\nres = 3")
    with pytest.raises(ResoluteError, match=r"bad\.toml: not TOML"):
        Recipe.load(tmp_path / "bad.toml")
    for encoding in ("utf-8", "utf-8-sig"):
        (tmp_path / f"{encoding}.toml").write_text("[[stages]]\nres = 32\nepochs = 1\nbatch_size = 8\n", encoding)
        assert Recipe.load(tmp_path / f"{encoding}.toml").hash == Recipe.parse(ONE_STAGE, name="x").hash


def test_a_stage_overrides_single_augmentations() -> None:
    recipe = of_stages({"augment": {"mixup_alpha": 0.0}}, {}, augment={"mixup_alpha": 0.2, "flip_prob": 0.25})
    augments = [stage.augment for stage in recipe.stages if stage.augment is not None]
    assert [(augment.mixup_alpha, augment.flip_prob) for augment in augments] == [(0.0, 0.25), (0.2, 0.25)]


@pytest.mark.parametrize(
    ("order", "remote", "saved", "planned"),
    [
        ("auto", False, None, "shuffled"),
        ("auto", True, None, "windowed"),
        ("auto", True, "shuffled", "shuffled"),
        ("shuffled", True, None, "shuffled"),
    ],
)
def test_order_auto_means_block_for_remote_sets_unless_a_checkpoint_has_an_order(
    shard_set: ShardSet, monkeypatch: pytest.MonkeyPatch, order: str, remote: bool, saved: Order | None, planned: str
) -> None:
    monkeypatch.setattr(Folder, "remote", remote)
    plan = of_stages({}, data={"order": order}).plan(shard_set, auto_order=saved)
    assert (plan.order, {phase.order for phase in plan.phases}) == (planned, {planned})


def test_the_hash_depends_on_every_value_but_not_on_the_name() -> None:
    recipe = Recipe.parse(ONE_STAGE, name="x")
    assert recipe.hash == dataclasses.replace(recipe, name="y").hash
    assert recipe.hash != dataclasses.replace(recipe, seed=1).hash


# ---- scale_epochs: all epochs times a factor, rounded halves up, at least 1 ------------------------------------------


def of_epochs(*epochs: int, **top: Any) -> Recipe:
    return of_stages(*({"epochs": count} for count in epochs), **top)


@pytest.mark.parametrize(
    ("scale", "expected"), [(0.5, [1, 1, 2, 5, 25, 9]), (0.35, [1, 1, 1, 4, 18, 6]), (1.5, [2, 3, 5, 15, 75, 27])]
)
def test_every_stage_is_scaled_and_rounded_halves_up_to_at_least_one_epoch(scale: float, expected: list[int]) -> None:
    assert [stage.epochs for stage in of_epochs(1, 2, 3, 10, 50, 18, scale_epochs=scale).stages] == expected


def test_a_scaled_recipe_equals_one_written_with_those_epochs() -> None:
    schedule = {"kind": "step", "milestone_epochs": [3, 8], "gamma": 0.2}
    scaled = of_epochs(6, 4, scale_epochs=0.5, schedule=schedule)
    assert Recipe.from_values(scaled.values(), name="x") == scaled, "read from a checkpoint, it is not scaled again"
    written = of_epochs(3, 2, schedule={**schedule, "milestone_epochs": [2, 4]})
    assert dataclasses.replace(scaled, scale_epochs=1.0) == written
    warm = of_epochs(6, 4, scale_epochs=0.5, schedule={"warmup_epochs": 1.5}).schedule
    assert isinstance(warm, OneCycleSchedule)
    assert warm.warmup_epochs == 0.75
    averaged = [of_epochs(6, 4, scale_epochs=0.5, ema={"last_epochs": last}).ema.last_epochs for last in (1, 3, 10)]
    assert averaged == [1, 2, 5]
    assert of_epochs(5, 5, 5, scale_epochs=0.26, ema={"last_epochs": 15}).ema.last_epochs == 3  # of 3 x 1 epochs, not 4
