"""The proposal of `make plan SUGGEST=FILE`: its epochs by the rule, and the recipe that it writes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from resolute.cli import main
from resolute.errors import ResoluteError
from resolute.train.planner.estimate import Forecast, StageForecast
from resolute.train.planner.suggest import Candidates, choose
from resolute.train.recipe.schema import Recipe
from resolute.train.recipe.text import RecipeText
from tests import ROOT
from tests.train.planner.test_estimate import pace

RECIPES = sorted((ROOT / "train" / "recipes").glob("*.toml"))


def machine(*images_per_s: float, res: tuple[int, ...] = (64, 96, 128, 160), every: int = 1) -> Forecast:
    """Stages of 1 000 images that train at `images_per_s` and validate 100 images three times as fast."""
    stages = (
        StageForecast(
            stage=i,
            res=res[i],
            batch_size=10,
            epochs=5,
            images=1000,
            eval_images=100,
            pace=pace(9e9, rate, rate, 3 * rate),
        )
        for i, rate in enumerate(images_per_s)
    )
    return Forecast(stages=tuple(stages), eval_every=every, start_s=3.0, save_s=0.1, save_every_s=300.0)


def chosen(result: Forecast, budget_s: float, **more: Any) -> list[int]:
    weights = [float(stage.res) for stage in result.stages]
    return choose(result, weights, least=[2] * len(weights), budget_s=budget_s, **more)


def score(epochs: Sequence[int], result: Forecast) -> float:
    return sum(stage.res * math.log1p(count) for stage, count in zip(result.stages, epochs, strict=True))


def test_the_budget_is_used_and_hardly_any_epochs_would_gain_more() -> None:
    rng = random.Random(0)
    for _ in range(8):
        rates = sorted((rng.uniform(100, 2000) for _ in range(rng.randint(1, 3))), reverse=True)
        result = machine(*rates, every=rng.choice([1, 2, 5]))
        budget_s = result.total_s([2] * len(rates)) + rng.uniform(0, 15) * 1000 / rates[-1]
        epochs = chosen(result, budget_s)
        assert result.total_s(epochs) <= budget_s
        assert min(epochs) >= 2
        for stage in range(len(rates)):
            assert result.total_s([count + (k == stage) for k, count in enumerate(epochs)]) > budget_s
        every = itertools.product(*(range(2, int(budget_s / stage.epoch_s) + 1) for stage in result.stages))
        best = max(score(other, result) for other in every if result.total_s(other) <= budget_s)
        assert score(epochs, result) >= 0.97 * best


def test_a_small_budget_leaves_out_stages_that_a_recipe_does_not_need_and_a_smaller_one_is_refused() -> None:
    result = machine(1000.0, 100.0, 100.0)
    assert [chosen(result, budget_s) for budget_s in (47, 45, 40)] == [[2, 2, 2], [0, 2, 2], [0, 0, 3]]
    with pytest.raises(ResoluteError, match=r"--budget: got 23\.0 s, expected at least 24s: the start plus the fewest"):
        chosen(result, 23.0)
    with pytest.raises(ResoluteError, match="expected at least 47s"):
        chosen(result, 40, is_valid=lambda kept: len(kept) == 3)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_written_recipe_is_the_base_with_other_epochs(path: Path, tmp_path: Path) -> None:
    base, candidates = Recipe.load(path), Candidates.of(RecipeText.read(path), stored=())
    assert candidates.recipe == base
    epochs = [stage.epochs + 2 + number for number, stage in enumerate(base.stages)]
    file = tmp_path / f"{path.stem}.toml"
    candidates.write(file, epochs, ["made by a test", "for a test"])
    stages = tuple(dataclasses.replace(stage, epochs=count) for stage, count in zip(base.stages, epochs, strict=True))
    factor = sum(epochs) / base.total_epochs
    warmup = base.schedule.warmup_epochs
    schedule = dataclasses.replace(base.schedule, warmup_epochs=warmup and warmup * factor)
    assert Recipe.load(file) == dataclasses.replace(base, stages=stages, schedule=schedule)
    assert file.read_text().startswith("# made by a test\n# for a test\n\n")


def recipe(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.usefixtures("quick")
def test_the_command_writes_a_recipe_that_fits_and_nothing_else(
    words: Callable[[Path], list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = recipe(
        tmp_path / "base.toml",
        '[model]\nname = "test_resnet"\n[precision]\namp = "off"\n[eval]\n'
        "every_epochs = 2\n[[stages]]\nres = 64\nepochs = 1\nbatch_size = 12\n",
    )
    new, file = tmp_path / "new.toml", tmp_path / "plan.json"
    line = ["plan", *words(tmp_path / "runs")[1:], "--recipe", str(base), "--suggest", str(new)]
    assert main([*line, "--budget", "5m", "--json", str(file)]) == 0
    out, got = capsys.readouterr().out, json.loads(file.read_text())
    written = Recipe.load(new)
    assert [stage.res for stage in written.stages] == [32, 48, 64], "the set stores the two smaller ones"
    assert [stage.epochs for stage in written.stages] == [stage["epochs"] for stage in got["stages"]]
    assert 270 < got["total_s"] <= got["budget_s"] == 300
    val_s, total = [stage["eval_s"] for stage in got["stages"]], sum(stage["epochs"] for stage in got["stages"])
    mean_s = got["parts_s"]["validation"] / ((total + 1) // 2)
    assert min(val_s) <= mean_s <= max(val_s), "every second epoch is validated, not each as in the measurement"
    assert f"{new}: written" in out
    comments = [row.removeprefix("# ") for row in new.read_text().splitlines() if row.startswith("# ")]
    assert f"from base ({Recipe.load(base).hash}) and the shard set" in comments[0]
    assert comments[1:] == got["advice"][:-1]
    assert written.eval.every_epochs == 2
    assert {path.name for path in tmp_path.iterdir()} == {"base.toml", "new.toml", "plan.json"}


def test_a_proposal_needs_a_budget_and_a_new_file(
    words: Callable[[Path], list[str]], recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["plan", *words(tmp_path / "runs")[1:], "--recipe", str(recipe_file)]
    new = tmp_path / "new.toml"
    for more, message in (
        (["--suggest", str(new)], "--suggest: got no --budget, expected a time to fill; add --budget 11m"),
        (["--suggest", str(recipe_file), "--budget", "9m"], "which exists, expected a new file; rename it"),
        (["--suggest", str(tmp_path / "new.txt"), "--budget", "9m"], "expected a name that ends in .toml"),
    ):
        assert main([*line, *more]) == 2
        error = capsys.readouterr().err.strip()
        assert message in error
        assert "\n" not in error
    assert not any(tmp_path.iterdir())
