"""Recipes of earlier versions: refused with the command that translates them, and read from checkpoints."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from resolute.cli import main
from resolute.errors import ResoluteError
from resolute.train.plot_lr import Curve
from resolute.train.recipe.schema import Recipe
from resolute.train.recipe.upgrade import old_key, upgraded

# The values of a recipe in a checkpoint, written by the code before stages overrode keys of the run
VALUES = Path(__file__).with_name("old_values.json")
STAGE: dict[str, Any] = {"res": 32, "epochs": 4, "batch_size": 8}
OLD = """\
#:schema recipe.schema.json
# A recipe of ours.

[model]
name = "test_resnet"  # small

[freeze]
mode = "unfreeze"

[regularization]
drop_rate = [0.1, 0.3]
label_smoothing = 0.1

[schedule]
kind = "warmup_cosine"
div_factor = 20.0
final_div_factor = 50.0

[optim]
lr = 0.8

[[stages]]
res = 32
epochs = 1
batch_size = 8
unfreeze_to = "none"
regularization = { magnitude = 4.6 }
augment = { policy = "randaugment" }

[[stages]]
res = 48
epochs = 1
batch_size = 8
unfreeze_to = "layer3"
lr_scale = 0.5

[[stages]]
res = 64
epochs = 1
batch_size = 8
unfreeze_to = "all"
"""
NEW = """
[model]
name = "test_resnet"

[schedule]
kind = "cosine"
pct_start = 0.25
first_lr = 0.04
last_lr = 8e-4

[optim]
lr = 0.8

[[stages]]
res = 32
epochs = 1
batch_size = 8
train_from = "head"
model.drop_rate = 0.1
loss.label_smoothing = 0.1
augment = { policy = "randaugment", magnitude = 5 }

[[stages]]
res = 48
epochs = 1
batch_size = 8
train_from = "layer3"
model.drop_rate = 0.2
loss.label_smoothing = 0.1
optim.lr_scale = 0.5

[[stages]]
res = 64
epochs = 1
batch_size = 8
model.drop_rate = 0.3
loss.label_smoothing = 0.1
"""


def test_an_old_recipe_is_refused_with_the_command_that_translates_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a recipe.toml"
    path.write_text(OLD)
    assert main(["lr", "--recipe", str(path), "--samples", "40"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(
        f"which only earlier versions have; translate the file with `resolute recipe --upgrade '{path}'`"
    )
    assert main(["recipe", "--upgrade", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"{path}: translated; {path}.old is the old text"
    assert Path(f"{path}.old").read_text() == OLD
    assert path.read_text().startswith("#:schema recipe.schema.json\n# A recipe of ours.\n\n[model]\n")
    got, expected = Recipe.load(path), Recipe.parse(tomllib.loads(NEW), name=path.stem)
    assert json.dumps(got.values()) == json.dumps(expected.values())
    # neither overwrites what is there, nor translates twice
    assert main(["recipe", "--upgrade", str(path)]) == 2
    assert main(["recipe", str(tmp_path / "b.toml"), "--upgrade", str(path)]) == 2
    assert "has the format of this version" in capsys.readouterr().err
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a recipe.toml", "a recipe.toml.old"]


@pytest.mark.parametrize(
    ("old", "expected"),
    [
        ({"kind": "onecycle_stage"}, {"kind": "onecycle", "restart_each_stage": True}),
        ({"kind": "cosine_stage"}, {"kind": "cosine", "restart_each_stage": True}),
        ({"kind": "warmup_linear"}, {"kind": "linear", "pct_start": 0.25}),
        ({"kind": "warmup_linear", "warmup_epochs": 1}, {"kind": "linear", "warmup_epochs": 1}),
        ({"kind": "step", "milestone_epochs": [2], "gamma": 0.3}, None),
        ({"kind": "flat_cosine", "final_div_factor": 20}, {"kind": "flat_cosine", "last_lr": 0.04}),
        ({"div_factor": 4}, {"kind": "onecycle", "first_lr": 0.2}),
        ({"div_factor": 4, "final_div_factor": 2}, {"kind": "onecycle", "first_lr": 0.2, "last_lr": 0.1}),
        ({"final_div_factor": 2}, {"kind": "onecycle", "last_lr": 0.04}),
    ],
)
def test_every_old_schedule_has_its_counterpart(old: dict[str, Any], expected: dict[str, Any] | None) -> None:
    table = {"optim": {"lr": 0.8}, "schedule": old, "stages": [STAGE, STAGE]}
    assert upgraded(table, exact=True)["schedule"] == (expected or old)
    recipe = Recipe.parse(upgraded(table, exact=True), name="x")
    assert Curve(recipe, 40).at(0, 3)[0] > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"schedule": {"kind": "cosine_restarts"}},
            "schedule.kind: got cosine_restarts, which this version does not have",
        ),
        (
            {"stages": [{**STAGE, "res": [32, 48]}], "regularization": {"drop_rate": [0.1, 0.2]}},
            "stages[0]: a ramp with strengths that change within it",
        ),
    ],
)
def test_what_has_no_counterpart_is_refused_for_training_and_read_for_inference(
    change: dict[str, Any], message: str
) -> None:
    table = {"stages": [STAGE], **change}
    with pytest.raises(ResoluteError, match=message.replace("[", r"\[")):
        upgraded(table, exact=True)
    assert old_key(upgraded(table)) is None
    Recipe.from_values(upgraded(table), name="x")


def test_values_of_an_old_checkpoint_are_those_of_the_translated_recipe() -> None:
    values = json.loads(VALUES.read_text())
    recipe = Recipe.from_values(values, name="x")
    assert (recipe.schedule.kind, recipe.loss.kind, recipe.data.mean) == ("cosine", "ce", (0.485, 0.456, 0.406))
    assert [stage.train_from for stage in recipe.stages] == ["head", None, None]
    last = recipe.in_stage(2)
    assert (last.model.drop_rate, last.augment.magnitude, last.augment.blur_prob) == (0.3, 15, 0.1)
    assert old_key(recipe.values()) is None
    assert Recipe.from_values(recipe.values(), name="x") == recipe


def test_a_run_of_an_earlier_version_is_not_continued(
    tmp_path: Path, shard_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.toml").write_text(OLD)
    assert main(["train", str(shard_root), "--run", str(tmp_path / "run"), "--device", "cpu"]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "earlier version" in line]
    assert line.endswith("finish it with that version, or use another RUN")
    assert (tmp_path / "run" / "recipe.toml").read_text() == OLD


@pytest.mark.parametrize(
    ("old", "message"),
    [
        ("[regularization]\nfoo = 0.1", "not a valid recipe of an earlier version (KeyError: 'foo')"),
        ("[regularization]\ndrop_rate = [0.1]", "not a valid recipe of an earlier version (IndexError"),
        ("[schedule]\ndiv_factor = 0", "not a valid recipe of an earlier version (ZeroDivisionError"),
        ('[freeze]\nmode = "odd"', "not a valid recipe of an earlier version (KeyError: 'odd')"),
        (
            '[schedule]\nkind = "cosine_stage"\npct_start = 0.3',
            "schedule.pct_start: without effect, schedule.kind is cos",
        ),
        ('[schedule]\nkind = "step"\nmilestone_epochs = [1]\ndiv_factor = 3', "schedule.div_factor: without effect"),
        ('[schedule]\nkind = "warmup_cosine"\ngamma = 0.3', "schedule.gamma: without effect, schedule.kind is warmup"),
        ('[freeze]\n[loss]\nkind = "ce"\ndelta = 2.0', "loss.delta: without effect, loss.kind is ce"),
        ("regularization = 3", "regularization: got 3, expected a table"),
        ('[freeze]\nmode = "freeze"\n[loss]\nlabel_smoothing = 2.0', "loss.label_smoothing: got 2.0, expected number"),
    ],
)
def test_a_wrong_recipe_is_refused_in_one_line_and_left_as_it_is(
    old: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.toml"
    path.write_text(text := f"{old}\n[[stages]]\nres = 32\nepochs = 1\nbatch_size = 8\n")
    assert main(["recipe", "--upgrade", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{path}: {message}" in line
    assert path.read_text() == text
    assert [file.name for file in tmp_path.iterdir()] == ["x.toml"]


def test_a_frozen_layer_of_the_other_mode_is_refused() -> None:
    table = {"freeze": {"mode": "freeze"}, "stages": [{**STAGE, "unfreeze_to": "layer3"}]}
    with pytest.raises(ResoluteError, match=r"stages\[0\]\.unfreeze_to: without effect, freeze\.mode is freeze"):
        upgraded(table, exact=True)
