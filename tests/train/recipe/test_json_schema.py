"""Editors know a recipe's keys from docs/recipe.schema.json, which says what a recipe file may hold."""

from __future__ import annotations

import copy
import json
import tomllib
from typing import Any

import pytest
from jsonschema import Draft7Validator

from resolute.errors import ResoluteError
from resolute.train.recipe.keys import keys, schema
from resolute.train.recipe.schema import Recipe
from tests import ROOT

FILE = ROOT / "docs" / "recipe.schema.json"
VALIDATOR = Draft7Validator(schema())
STAGE = {"res": 32, "epochs": 1, "batch_size": 8}


def test_the_file_is_up_to_date_and_has_every_key_with_its_help() -> None:
    assert json.loads(FILE.read_text(encoding="utf-8")) == schema(), "run: resolute keys --schema " + str(FILE)
    Draft7Validator.check_schema(schema())
    tables = {name: table["properties"] for name, table in schema()["$defs"].items()} | {"": schema()["properties"]}
    tables["Stages"] = tables["RecipeStage"]
    for key in keys():
        assert tables[key.section.capitalize()][key.name]["description"] == key.help
    assert "name" not in schema()["properties"]
    assert '"null"' not in json.dumps(schema())


def test_every_included_recipe_names_the_schema_and_fits_it() -> None:
    for path in (*(ROOT / "train" / "recipes").glob("*.toml"), *(ROOT / "benchmarks" / "recipes").glob("*.toml")):
        text = path.read_text(encoding="utf-8")
        directive, name = text.splitlines()[0].split()
        assert (directive, (path.parent / name).resolve()) == ("#:schema", FILE), path
        VALIDATOR.validate(tomllib.loads(text))


@pytest.mark.parametrize("change", [
    {"stages": [{**STAGE, "batch_size": "auto"}]}, {"augment": {"scale": [0.5, 1], "policy": "3-augment"}},
    {"stages": [{**STAGE, "res": [32, 64], "res_schedule": "step", "batch_size": "constant_pixels"}, STAGE]},
    {"stages": [{**STAGE, "res": [32, 64], "epochs": 2, "batch_size": [8, 4]}]},
    {"stages": [STAGE, {**STAGE, "res": 64, "augment": {"flip_prob": 0.1}, "regularization": {"drop_rate": 0.1}}]},
    {"stages": [STAGE, {**STAGE, "res": 64}], "regularization": {"drop_rate": [0.1, 0.2]}},
    {"loss": {"class_weights": {"cat": 2}}}, {"model": {"kwargs": {"channels": [1, 2], "x": {"y": "z"}}}},
])  # fmt: skip
def test_what_a_recipe_may_hold_fits(change: dict[str, Any]) -> None:
    recipe = {"stages": [STAGE], **change}
    VALIDATOR.validate(recipe)
    Recipe.parse(copy.deepcopy(recipe), name="x")


@pytest.mark.parametrize("change", [
    {"seeds": 1}, {"optim": {"momentun": 0.9}}, {"stages": [{**STAGE, "augment": {"mixup": 1.0}}]},
    {"stages": [{"res": 32, "epochs": 1}]}, {"stages": STAGE}, {"seed": "1"}, {"optim": {"lr": 0}},
    {"stages": [{**STAGE, "batch_size": "largest"}]}, {"stages": [{**STAGE, "batch_size": [8, 0]}]}, {"model": []},
    {"augment": {"jitter": [0.4, 0.4, 0.4]}}, {"augment": {"policy": "rand"}}, {"loss": {"class_weights": {"cat": 0}}},
])  # fmt: skip
def test_an_unknown_key_or_a_wrong_value_fits_neither_the_schema_nor_the_program(change: dict[str, Any]) -> None:
    recipe = {"stages": [STAGE], **change}
    assert not VALIDATOR.is_valid(recipe)
    with pytest.raises(ResoluteError):
        Recipe.parse(copy.deepcopy(recipe), name="x")
