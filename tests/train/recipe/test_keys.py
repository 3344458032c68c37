"""The table of keys lists every field of the recipe's dataclasses, with its help."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from resolute.cli import main
from resolute.errors import ResoluteError
from resolute.pipeline.plan.stage import Augment
from resolute.settings import definitions
from resolute.train.recipe.keys import keys, table
from resolute.train.recipe.schema import Data, Distill, Ema, Eval, Loss, Model, Optim, Recipe, Schedule, Stop
from resolute.train.recipe.stages import RecipeStage, Regularization


def test_every_key_has_help() -> None:
    assert [f"{key.section}.{key.name}" for key in keys() if not key.help] == []


def test_the_table_has_exactly_the_keys_of_a_recipe() -> None:
    for key in keys():
        stage: dict[str, Any] = {"res": 32, "epochs": 1, "batch_size": 8}
        table: dict[str, Any] = {"stages": [stage]}
        where = {"": table, "stages": stage}.get(key.section)
        # a value of a type that no key has: a known key refuses the type, an unknown key its name
        (table.setdefault(key.section, {}) if where is None else where)[key.name] = [[]]
        with pytest.raises(ResoluteError, match=rf"{key.name}: got \[.*\], expected "):
            Recipe.parse(table, name="x")
    recipe = Recipe(name="x", stages=(RecipeStage(res=32, epochs=1, batch_size=8),))
    listed_keys = {(key.section, key.name) for key in keys()}
    for section in dataclasses.fields(Recipe):
        value = getattr(recipe, section.name)
        if dataclasses.is_dataclass(value):
            assert {(section.name, field.name) for field in dataclasses.fields(value)} <= listed_keys
    for name, cls in (("augment", Augment), ("regularization", Regularization)):
        assert {(name, field.name) for field in dataclasses.fields(cls)} <= listed_keys
    of_a_stage = {("stages", field.name) for field in dataclasses.fields(RecipeStage)}
    assert of_a_stage - {("stages", "augment")} <= listed_keys


def test_values_out_of_range_are_refused_with_the_range() -> None:
    outside = {"gt": 0, "ge": -1, "lt": 0, "le": 1}  # added to the bound
    checked = 0
    for cls in (Augment, Data, Distill, Ema, Eval, Loss, Model, Optim, Regularization, Schedule, RecipeStage, Stop):
        good: dict[str, Any] = {"res": 32, "epochs": 1, "batch_size": 8} if cls is RecipeStage else {}
        for key in definitions(cls):
            default: Any = key.default
            for words, name in (("above", "gt"), ("at least", "ge"), ("below", "lt"), ("at most", "le"), ("to", "le")):
                for bound in re.findall(rf"\b{words} (-?[\d.]+)", key.kind)[:1]:
                    value = float(bound) + outside[name] if "number" in key.kind else int(bound) + outside[name]
                    wrong = [value] * (len(default) or 1) if isinstance(default, tuple) else value
                    message = f"{key.name}: got {value}, expected {key.kind}; correct it".replace("`", "")
                    with pytest.raises(ResoluteError, match=re.escape(message)):
                        cls(**{**good, key.name: wrong})
                    checked += 1
    assert checked > 80


def test_a_row_has_type_range_default_and_help_with_escaped_bars(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == table().splitlines()
    assert "| `label_smoothing` | number, at least 0, below 1 | `0.0` | ce, bce: label smoothing |" in lines
    assert '| `channels_last` | `true`, `false` | `true` | memory format of images and weights |' in lines
    assert any(line.startswith('| `amp` | `"auto"`, `"bf16"`, `"fp16"`, `"off"` | `"auto"` | ') for line in lines)
    rows = [line for line in lines if line.startswith("| `")]
    assert len(rows) == len(list(keys()))
    assert all(line.replace("\\|", "").count("|") == 5 for line in rows)
