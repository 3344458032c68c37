"""The table of keys is the dataclasses', and says something of each."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from pipeline.errors import ResoluteError
from pipeline.plan.stage import Augment, Stage
from train.__main__ import main
from train.recipe.keys import keys, table
from train.recipe.schema import Recipe


def test_every_key_has_a_comment() -> None:
    assert [f"{key.section}.{key.name}" for key in keys() if not key.comment] == []


def test_the_table_has_every_key_that_a_recipe_takes_and_no_other() -> None:
    for key in keys():
        stage: dict[str, Any] = {"res": 32, "epochs": 1, "batch_size": 8}
        table: dict[str, Any] = {"stages": [stage]}
        where = {"": table, "stages": stage}.get(key.section)
        # of no type that any key has: a known key complains of it, another of its name
        (table.setdefault(key.section, {}) if where is None else where)[key.name] = object()
        with pytest.raises(ResoluteError, match=rf"{key.name}: got <object") as told:
            Recipe.parse(table, name="x")
        assert "unknown key" not in str(told.value)
    recipe = Recipe(name="x", stages=(Stage(res=32, epochs=1, batch_size=8),))
    found = {(key.section, key.name) for key in keys()}
    for section in dataclasses.fields(Recipe):
        value = getattr(recipe, section.name)
        if dataclasses.is_dataclass(value):
            assert {(section.name, field.name) for field in dataclasses.fields(value)} <= found
    assert {("augment", field.name) for field in dataclasses.fields(Augment)} <= found
    assert {("stages", field.name) for field in dataclasses.fields(Stage)} - {("stages", "augment")} <= found


def test_a_row_has_kind_default_and_comment_and_its_bars_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == table().splitlines()
    assert "| `label_smoothing` | number | `0.0` | label smoothing of both kinds, 0 to below 1 |" in lines
    assert '| `amp` | `"bf16"`, `"fp16"`, `"off"` | `"bf16"` | autocast dtype |' in lines
    rows = [line for line in lines if line.startswith("| `")]
    assert len(rows) == len(list(keys()))
    assert all(line.replace("\\|", "").count("|") == 5 for line in rows)
