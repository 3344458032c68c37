"""A recipe's keys, with help and range: their table, and docs/recipe.schema.json, by which editors know them."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator

from resolute.cli import main
from resolute.errors import ResoluteError
from resolute.pipeline.plan.stage import Augment
from resolute.settings import definitions, groups_by_kind
from resolute.train.recipe.keys import keys, schema
from resolute.train.recipe.schema import Data, Distill, Ema, Eval, Loss, Model, Optim, Recipe, Schedule, Stop
from resolute.train.recipe.sections import StepSchedule
from resolute.train.recipe.stages import RecipeStage
from tests import ROOT

SCHEMA_FILE = ROOT / "docs" / "recipe.schema.json"
VALIDATOR = Draft7Validator(schema())
LOSSES = tuple(groups_by_kind(Loss).values())
SCHEDULES = tuple(groups_by_kind(Schedule).values())
STAGE: dict[str, Any] = {"res": 32, "epochs": 1, "batch_size": 8}


def test_the_keys_are_exactly_those_of_a_recipe_each_with_help() -> None:
    assert [f"{key.section}.{key.name}" for key in keys() if not key.help] == []
    for key in keys():
        stage: dict[str, Any] = dict(STAGE)
        table: dict[str, Any] = {"stages": [stage]}
        where = {"": table, "stages": stage}.get(key.section)
        # a value of a type that no key has: a known key refuses the type, an unknown key its name
        (table.setdefault(key.section, {}) if where is None else where)[key.name] = [[]]
        kinds = {"loss": Loss, "schedule": Schedule}.get(key.section)
        for kind, cls in groups_by_kind(kinds).items() if kinds is not None and key.name != "kind" else ():
            if any(own.name == key.name for own in definitions(cls)):
                table[key.section]["kind"] = kind
        with pytest.raises(ResoluteError, match=rf"{key.name}: got \[.*\], expected "):
            Recipe.parse(table, name="x")
    recipe = Recipe(name="x", stages=(RecipeStage(**STAGE),))
    sections = {field.name: type(getattr(recipe, field.name)) for field in dataclasses.fields(Recipe)}
    sections = {name: cls for name, cls in sections.items() if dataclasses.is_dataclass(cls)}
    sections |= {"augment": Augment, "stages": RecipeStage}
    classes = [(name, cls) for name, cls in sections.items() if name not in ("loss", "schedule")]
    classes += [("loss", cls) for cls in LOSSES] + [("schedule", cls) for cls in SCHEDULES]
    fields = {(name, field.name) for name, cls in classes for field in dataclasses.fields(cls)}
    assert fields - {("stages", "augment")} <= {(key.section, key.name) for key in keys()}


def _kind(cls: Any) -> dict[str, str]:
    """The keyword of a class that is one kind of a section."""
    return next(({"kind": kind} for kind, own in (*_BY_KIND,) if own is cls), {})


_BY_KIND = (*groups_by_kind(Loss).items(), *groups_by_kind(Schedule).items())


def test_values_out_of_range_are_refused_with_the_range() -> None:
    outside = {"above": 0, "at least": -1, "below": 0, "at most": 1, "to": 1}  # added to the bound
    checked = 0
    for cls in (Augment, Data, Distill, Ema, Eval, *LOSSES, Model, Optim, *SCHEDULES, RecipeStage, Stop):
        required = {RecipeStage: STAGE, StepSchedule: {"milestone_epochs": [1]}}
        good: dict[str, Any] = {**required.get(cls, {}), **_kind(cls)}
        for key in definitions(cls):
            default: Any = key.default
            for words, more in outside.items():
                for bound in re.findall(rf"\b{words} (-?[\d.]+)", key.kind)[:1]:
                    value = float(bound) + more if "number" in key.kind else int(bound) + more
                    wrong = [value] * (len(default) or 1) if isinstance(default, tuple) else value
                    message = f"{key.name}: got {value}, expected {key.kind}; correct it".replace("`", "")
                    with pytest.raises(ResoluteError, match=re.escape(message)):
                        cls(**{**good, key.name: wrong})
                    checked += 1
    assert checked > 80


def test_the_command_prints_a_table_or_writes_the_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "| `label_smoothing` | number, at least 0, below 1 | `0.0` | auto, ce, bce: label smoothing |" in lines
    assert "| `channels_last` | `true`, `false` | `true` | memory format of images and weights |" in lines
    rows = [line for line in lines if line.startswith("| `")]
    assert len(rows) == len(list(keys()))
    assert all(line.replace("\\|", "").count("|") == 5 for line in rows)
    assert main(["keys", "--schema", str(tmp_path / "x.json")]) == 0
    assert (tmp_path / "x.json").read_bytes() == SCHEMA_FILE.read_bytes()


# ---- the schema ------------------------------------------------------------------------------------------------------


def test_the_file_is_up_to_date_and_has_every_key_with_its_help() -> None:
    made = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    assert made == schema(), "run: resolute keys --schema docs/recipe.schema.json"
    Draft7Validator.check_schema(schema())
    tables = {name: table["properties"] for name, table in schema()["$defs"].items()} | {"": schema()["properties"]}
    tables["Stages"] = tables["RecipeStage"]
    for section, classes in {"Loss": LOSSES, "Schedule": SCHEDULES}.items():
        tables[section] = {name: own for cls in classes for name, own in tables[cls.__name__].items()}
    for key in keys():
        description = tables[key.section.capitalize()][key.name]["description"]
        assert key.help.endswith(description)  # after the kinds that have the key
    assert "name" not in schema()["properties"]
    assert '"null"' not in json.dumps(schema())


def test_every_included_recipe_names_the_schema_and_fits_it() -> None:
    for path in (*(ROOT / "train" / "recipes").glob("*.toml"), *(ROOT / "benchmarks" / "recipes").glob("*.toml")):
        text = path.read_text(encoding="utf-8")
        directive, name = text.splitlines()[0].split()
        assert (directive, (path.parent / name).resolve()) == ("#:schema", SCHEMA_FILE), path
        VALIDATOR.validate(tomllib.loads(text))


@pytest.mark.parametrize(
    "change",
    [
        {"seeds": 1},
        {"optim": {"momentun": 0.9}},
        {"stages": [{**STAGE, "augment": {"mixup": 1.0}}]},
        {"stages": [{"res": 32, "epochs": 1}]},
        {"stages": STAGE},
        {"seed": "1"},
        {"optim": {"lr": 0}},
        {"stages": [{**STAGE, "batch_size": "largest"}]},
        {"stages": [{**STAGE, "batch_size": [8, 0]}]},
        {"model": []},
        {"augment": {"jitter": [0.4, 0.4, 0.4]}},
        {"augment": {"policy": "rand"}},
        {"loss": {"class_weights": {"cat": 0}}},
    ],
)
def test_an_unknown_key_or_a_wrong_value_fits_neither_the_schema_nor_the_program(change: dict[str, Any]) -> None:
    recipe = {"stages": [STAGE], **change}
    assert not VALIDATOR.is_valid(recipe)
    with pytest.raises(ResoluteError):
        Recipe.parse(copy.deepcopy(recipe), name="x")
