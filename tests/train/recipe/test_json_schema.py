"""Editors know a recipe's keys from docs/recipe.schema.json, which says what a recipe file may hold."""

from __future__ import annotations

import copy
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator

from resolute.cli import main
from resolute.errors import ResoluteError
from resolute.train.recipe.keys import keys, schema
from resolute.train.recipe.schema import Recipe
from tests import ROOT

FILE = ROOT / "docs" / "recipe.schema.json"
RECIPES = sorted((*(ROOT / "train" / "recipes").glob("*.toml"), *(ROOT / "benchmarks" / "recipes").glob("*.toml")))
VALIDATOR = Draft7Validator(schema())
STAGE = {"res": 32, "epochs": 1, "batch_size": 8}


def test_the_file_is_up_to_date() -> None:
    made = json.loads(FILE.read_text(encoding="utf-8"))
    assert made == schema(), "run: resolute keys --schema docs/recipe.schema.json"


def test_one_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "--schema", str(tmp_path / "x.json")]) == 0
    assert (tmp_path / "x.json").read_bytes() == FILE.read_bytes()
    assert main(["keys", "--schema", str(tmp_path / "no" / "x.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_it_is_a_schema_with_every_key_and_its_help() -> None:
    Draft7Validator.check_schema(schema())
    tables = {name: table["properties"] for name, table in schema()["$defs"].items()} | {"": schema()["properties"]}
    tables["Stages"] = tables["RecipeStage"]
    for key in keys():
        assert tables[key.section.capitalize()][key.name]["description"] == key.help
    assert "name" not in schema()["properties"]
    assert '"null"' not in json.dumps(schema())


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_included_recipe_names_the_schema_and_fits_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    directive, name = text.splitlines()[0].split()
    assert (directive, (path.parent / name).resolve()) == ("#:schema", FILE)
    VALIDATOR.validate(tomllib.loads(text))


@pytest.mark.parametrize("change", [
    {}, {"stages": [{**STAGE, "batch_size": "auto"}]}, {"augment": {"scale": [0.5, 1], "policy": "3-augment"}},
    {"stages": [{**STAGE, "res": [32, 64], "res_schedule": "step", "batch_size": "constant_pixels"}, STAGE]},
    {"stages": [{**STAGE, "res": [32, 64], "epochs": 2, "batch_size": [8, 4]}]},
    {"stages": [STAGE, {**STAGE, "res": 64, "augment": {"flip_prob": 0.1}, "regularization": {"drop_rate": 0.1}}]},
    {"stages": [STAGE, {**STAGE, "res": 64}], "regularization": {"drop_rate": [0.1, 0.2]}},
    {"loss": {"class_weights": {"cat": 2}}}, {"model": {"kwargs": {"channels": [1, 2], "x": {"y": "z"}}}},
    {"optim": {"lr": 1, "betas": [0.9, 0.99], "name": "adamw"}}, {"eval": {"crop_pct": 1}},
])  # fmt: skip
def test_what_a_recipe_may_hold_fits(change: dict[str, Any]) -> None:
    recipe = {"stages": [STAGE], **change}
    VALIDATOR.validate(recipe)
    Recipe.parse(copy.deepcopy(recipe), name="x")


@pytest.mark.parametrize("change", [
    {"seeds": 1}, {"optim": {"momentun": 0.9}}, {"augment": {"crop_area": [0.2, 1.0]}}, {"stage": [STAGE]},
    {"stages": [{**STAGE, "augment": {"mixup": 1.0}}]}, {"stages": [{"res": 32, "epochs": 1}]}, {"stages": STAGE},
    {"seed": "1"}, {"optim": {"lr": "0.1"}}, {"optim": {"lr": 0}}, {"ema": {"decay": 1.0}}, {"eval": {"flip": 1}},
    {"stages": [{**STAGE, "batch_size": 0}]}, {"stages": [{**STAGE, "batch_size": "largest"}]},
    {"stages": [{**STAGE, "batch_size": [8, 0]}]}, {"stages": [{**STAGE, "res": "32"}]}, {"model": []},
    {"augment": {"jitter": [0.4, 0.4, 0.4]}}, {"augment": {"scale": [0.0, 1.0]}}, {"augment": {"policy": "rand"}},
    {"loss": {"class_weights": {"cat": 0}}}, {"loss": {"class_weights": "balance"}}, {"augment": 3},
])  # fmt: skip
def test_an_unknown_key_or_a_wrong_value_fits_neither_the_schema_nor_the_program(change: dict[str, Any]) -> None:
    recipe = {"stages": [STAGE], **change}
    assert not VALIDATOR.is_valid(recipe)
    with pytest.raises(ResoluteError):
        Recipe.parse(copy.deepcopy(recipe), name="x")
