"""A recipe is checked completely before anything starts."""

from __future__ import annotations

import dataclasses
import datetime
import math
from pathlib import Path

import pytest

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.plan.order import Order
from resolute.pipeline.storage.local import Folder
from resolute.train.recipe.keys import keys
from resolute.train.recipe.schema import AUTO, Augment, Distill, Eval, Model, Optim, Recipe, RecipeStage, Schedule

ONE_STAGE = {"stages": [{"res": 32, "epochs": 1, "batch_size": 8}]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optim": {"momentun": 0.9}}, "optim.momentun: no such setting; did you mean momentum?"),
        ({"stagez": []}, "stagez: no such setting; did you mean stages?"),
        ({"stages": []}, "stages: got none, expected at least one"),
        ({"stages": [{"res": 32, "epochs": 1}]}, "stages.batch_size: missing"),
        ({"stages": [{"res": "32", "epochs": 1, "batch_size": 8}]}, "stages.res: got '32', expected integer or list of "
         "numbers, 1 to 16384; correct it"),
        ({"stages": [{"res": 32, "epochs": 1, "batch_size": 8, "fraction": 1.5}]}, "stages.fraction: got 1.5"),
        ({"optim": {"name": "adamm"}}, "optim.name: got 'adamm', expected an optimizer of timm.optim (near: adam"),
        ({"optim": {"lr": True}}, "optim.lr: got True, expected number, above 0"),
        ({"optim": {"lr": math.inf}}, "optim.lr: got inf, expected number, above 0"),
        ({"optim": {"lr": math.nan}}, "optim.lr: got nan, expected number, above 0"),
        ({"augment": {"scale": [0.5, math.inf]}}, "augment.scale: got inf, expected 2 numbers, above 0, at most 1"),
        ({"optim": {"lr": 10**400}}, "0000…, expected number, above 0"),
        ({"seed": 10**30}, f"seed: got {10**30}, expected integer, 0 to 9223372036854775807"),
        ({"seed": -1}, "seed: got -1, expected integer, 0 to 9223372036854775807"),
        ({"data": {"std": [0.0, 0.0, 0.0]}}, "data.std: got 0.0, expected 3 numbers, above 0"),
        ({"stages": [{"res": 32, "epochs": 1, "batch_size": 10**9}]}, "stages.batch_size: got 1000000000, expected "
         'integer or list of numbers, 1 to 1048576 or "auto", "constant_pixels"; correct it'),
        ({"stages": [{"res": 32, "epochs": 1, "batch_size": 0}]}, 'stages.batch_size: got 0, expected 1 to 1048576'),
        ({"stages": [{"res": 32, "epochs": 10**15, "batch_size": 8}]}, "stages.epochs: got 1000000000000000, expected "
         "integer, 1 to 100000"),
        ({"stages": [{"res": 32, "epochs": 60_000, "batch_size": 8}] * 2}, "stages.epochs: got 120000, expected at "
         "most 100000 over all stages"),
        ({"stages": [{"res": 10**6, "epochs": 1, "batch_size": 8}]}, "stages.res: got 1000000"),
        ({"eval": {"batch_size": 10**9}}, "eval.batch_size: got 1000000000"),
        ({"optim": {"grad_accum_steps": 100}, "stages": [{"res": 32, "epochs": 1, "batch_size": 8}]},
         "optim.grad_accum_steps: got 100, expected at most the smallest batch_size, 8"),
        ({"augment": {"scale": [0.9, 0.1]}}, "augment.scale"),
        ({"ema": {"decay": 1.0}}, "ema.decay: got 1.0"),
        ({"optim": {"name": "adamw", "momentum": 0.9}}, "optim.momentum: without effect, adamw uses optim.betas"),
        ({"augment": {"cutmix_alpha": 1.0, "mixup_switch_prob": 0.3}}, "augment.mixup_switch_prob: without effect"),
        ({"ema": {"warmup": False}}, "ema.warmup: without effect, ema.decay is 0"),
        ({"eval": 3}, "eval: got 3, expected table"),
    ],
)
def test_mistakes_are_reported_with_the_expected_value(change: dict[str, object], message: str) -> None:
    with pytest.raises(ResoluteError) as caught:
        Recipe.parse({**ONE_STAGE, **change}, name="x", where="x.toml")
    assert str(caught.value).startswith("x.toml: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_and_damaged_files_are_reported_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ResoluteError, match=r"none\.toml: no readable recipe.*included recipes: cifar10, demo"):
        Recipe.load(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[[stages]\nres = 3")
    with pytest.raises(ResoluteError, match=r"bad\.toml: not TOML"):
        Recipe.load(tmp_path / "bad.toml")


def test_a_stage_overrides_single_augmentations() -> None:
    table = {
        "augment": {"mixup_alpha": 0.2, "flip_prob": 0.25},
        "stages": [{"res": 32, "epochs": 1, "batch_size": 8, "augment": {"mixup_alpha": 0.0}}, *ONE_STAGE["stages"]],
    }
    first, second = Recipe.parse(table, name="x").stages
    assert (first.augment.mixup_alpha, first.augment.flip_prob) == (0.0, 0.25)
    assert (second.augment.mixup_alpha, second.augment.flip_prob) == (0.2, 0.25)


@pytest.mark.parametrize(
    ("order", "remote", "saved", "planned"),
    [("auto", False, None, "full"), ("auto", True, None, "block"), ("auto", False, "block", "block"),
     ("auto", True, "full", "full"), ("block", False, None, "block"), ("full", True, None, "full")],
)  # fmt: skip
def test_order_auto_means_block_for_remote_sets_unless_a_checkpoint_has_an_order(
    shard_set: ShardSet, monkeypatch: pytest.MonkeyPatch, order: str, remote: bool, saved: Order | None, planned: str
) -> None:
    monkeypatch.setattr(Folder, "remote", remote)
    recipe = Recipe.parse({"stages": [{"res": 32, "epochs": 1, "batch_size": 8}], "data": {"order": order}}, name="a")
    plan = recipe.plan(shard_set, auto_order=saved)
    assert (plan.order, {phase.order for phase in plan.phases}) == (planned, {planned})


def test_orders_are_validated_and_one_without_effect_is_refused() -> None:
    stage = {"res": 160, "epochs": 1, "batch_size": 8}
    recipe = Recipe.parse({"stages": [{**stage, "order": "block"}, stage], "data": {"order": "auto"}}, name="a")
    assert (recipe.data.order, [s.order for s in recipe.stages]) == ("auto", ["block", None])
    assert Recipe.parse({"stages": [stage]}, name="a").data.order == "full"
    for table, message in (
        ({"stages": [{**stage, "order": "auto"}]}, "order: got 'auto', expected \"full\", \"block\"; correct it"),
        ({"stages": [stage], "data": {"order": "random"}}, 'expected "full", "block", "auto"; correct it'),
        ({"stages": [{**stage, "order": "full"}], "data": {"order": "block"}}, "without effect, every stage has"),
    ):
        with pytest.raises(ResoluteError, match=message):
            Recipe.parse(table, name="a")


def test_the_hash_depends_on_every_value_but_not_on_the_name() -> None:
    recipe = Recipe.parse(ONE_STAGE, name="x")
    assert recipe.hash == dataclasses.replace(recipe, name="y").hash
    assert recipe.hash != dataclasses.replace(recipe, seed=1).hash


def test_the_resolutions_to_open_are_those_of_the_stages() -> None:
    stage = {"res": 160, "epochs": 1, "batch_size": 8}
    small = {**stage, "res": 128}
    assert Recipe.parse({"stages": [stage, small, stage]}, name="a").resolutions == (128, 160)
    assert Recipe.parse({"stages": [{**stage, "eval_res": 160}]}, name="a").resolutions == (160,)
    assert Recipe.parse({"stages": [{**stage, "eval_res": 208}]}, name="a").resolutions == (160, 208)


def test_optional_values_are_checked_if_present() -> None:
    stage = {"res": 160, "epochs": 1, "batch_size": 8}
    assert Recipe.parse({"stages": [stage], "eval": {"crop_pct": 1}}, name="a").eval.crop_pct == 1.0
    for table, message in (
        ({"stages": [stage], "eval": {"crop_pct": 1.5}}, "eval.crop_pct: got 1.5, expected number, above 0, at most 1"),
        ({"stages": [{**stage, "eval_res": "208"}]}, "eval_res: got '208', expected integer, 1 to"),
        ({"stages": [stage], "data": {"fold": 1.5}}, "data.fold: got 1.5, expected integer, at least 0"),
        ({"stages": [stage], "data": {"fold": 0}}, "data: got only one of fold and folds, expected both"),
        ({"stages": [stage], "data": {"folds": 3}}, "data: got only one of fold and folds, expected both"),
        ({"stages": [stage], "data": {"fold": 0, "folds": 1}}, "data.folds: got 1, expected integer, at least 2"),
        ({"stages": [stage], "data": {"fold": 3, "folds": 3}}, "data.fold: got 3, expected 0 to 2"),
    ):
        with pytest.raises(ResoluteError, match=message):
            Recipe.parse(table, name="a")


@pytest.mark.parametrize(
    ("old", "new"),
    [(f"{cls.__name__.lower()}.{old}", new) for cls in (Augment, Distill, Eval, Model, Optim, Schedule)
     for old, new in cls.__settings_renamed__.items()],
)  # fmt: skip
def test_an_old_name_of_a_key_is_refused_with_its_current_name(old: str, new: str) -> None:
    section, key = old.split(".")
    with pytest.raises(ResoluteError, match=f"{old}: no such setting, expected {new}, its current name; rename it"):
        Recipe.parse({**ONE_STAGE, section: {key: 1}}, name="x")
    assert new in {f"{key.section}.{key.name}" for key in keys()}


def test_a_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    text = "seed = 7\n[[stages]]\nres = 32\nepochs = 1\nbatch_size = 8\n"
    for encoding in ("utf-8", "utf-8-sig"):
        (tmp_path / f"{encoding}.toml").write_text(text, encoding=encoding)
    first, second = (Recipe.load(tmp_path / f"{encoding}.toml") for encoding in ("utf-8", "utf-8-sig"))
    assert first.hash == second.hash


@pytest.mark.parametrize("value", [datetime.date(2026, 1, 1), [[]]])
def test_a_value_of_no_known_type_is_refused_in_one_line(value: object) -> None:
    for table in ({"model": {"weights": value}}, {"seed": value}):
        with pytest.raises(ResoluteError, match=r"^x: .*got (datetime\.date\(|\[\[\]\]).*, expected [^\n]*$"):
            Recipe.parse({**ONE_STAGE, **table}, name="x", where="x")


def test_batch_size_auto_is_the_same_in_a_file_in_code_and_in_a_checkpoint() -> None:
    recipe = Recipe.parse({"stages": [{"res": 32, "epochs": 1, "batch_size": "auto"}]}, name="x")
    stages = [RecipeStage(res=32, epochs=1, batch_size=size, augment=Augment()) for size in ("auto", AUTO)]
    assert recipe.stages == (stages[0],) == (stages[1],)
    assert Recipe.from_values(recipe.values(), name="x") == recipe
