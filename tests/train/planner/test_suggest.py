"""The proposal of `make plan SUGGEST=FILE`: its epochs by the rule, and the recipe that it writes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from resolute.cli import main
from resolute.errors import ResoluteError
from resolute.train.planner.estimate import Forecast, StageForecast
from resolute.train.planner.suggest import Candidates, choose, proposal, reasons
from resolute.train.recipe.schema import Recipe
from tests import ROOT
from tests.train.planner.test_estimate import pace

RECIPES = sorted((ROOT / "train" / "recipes").glob("*.toml"))


def machine(*images_per_s: float, res: tuple[int, ...] = (64, 96, 128, 160), every: int = 1) -> Forecast:
    """Stages of 1 000 images that train at `images_per_s` and validate 100 images three times as fast."""
    stages = (StageForecast(stage=i, res=res[i], batch_size=10, epochs=5, images=1000, eval_images=100,
                            pace=pace(9e9, rate, rate, 3 * rate)) for i, rate in enumerate(images_per_s))  # fmt: skip
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


def test_time_is_shared_in_proportion_to_resolution_whatever_the_speeds() -> None:
    for rates in ((4000.0, 1700.0, 1000.0), (900.0, 1100.0, 300.0)):
        result = machine(*rates, every=10)
        costs = [stage.epoch_s + stage.eval_s / 10 + result.save_s for stage in result.stages]
        shares = [count * cost / 2000 for count, cost in zip(chosen(result, 2000), costs, strict=True)]
        assert shares == pytest.approx([64 / 288, 96 / 288, 128 / 288], abs=0.02)


def test_a_small_budget_leaves_out_stages_that_a_recipe_does_not_need_and_a_smaller_one_is_refused() -> None:
    result = machine(1000.0, 100.0, 100.0)
    assert [chosen(result, budget_s) for budget_s in (47, 45, 40)] == [[2, 2, 2], [0, 2, 2], [0, 0, 3]]
    with pytest.raises(ResoluteError, match=r"--budget: got 23\.0 s, expected at least 24s: the start plus the fewest"):
        chosen(result, 23.0)
    with pytest.raises(ResoluteError, match="expected at least 47s"):
        chosen(result, 40, is_valid=lambda kept: len(kept) == 3)


def test_a_proposal_leaves_out_stages_without_epochs() -> None:
    result = machine(1000.0, 1000.0, 100.0)
    kept = proposal(result, [0, 9, 2])
    assert [(stage.stage, stage.res, stage.epochs) for stage in kept.stages] == [(0, 96, 9), (1, 128, 2)]
    assert kept.total_s() == result.total_s([0, 9, 2])
    lines = "\n".join(reasons(result, [0, 9, 2], 45.0))
    assert "stage 0: 9 epochs at 96 px, 1 s each, 31 % of the training time" in lines
    assert "left out: 64 px: the budget is too small" in lines


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_written_recipe_is_the_base_with_other_epochs(path: Path, tmp_path: Path) -> None:
    base, candidates = Recipe.load(path), Candidates.load(path, stored=())
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


ONE = '[model]\nname = "test_resnet"\n[[stages]]\nres = 128\nepochs = 9\nbatch_size = 32\neval_res = 160\n'


def test_numbers_that_depend_on_epochs_and_on_other_stages_follow(tmp_path: Path) -> None:
    path = recipe(tmp_path / "a.toml", """
scale_epochs = 0.5
model = { name = "test_resnet", kwargs = { note = "ä \\"b\\" 🦊" } }
schedule = { kind = "cosine_restarts", period_epochs = 10 }
ema = { last_epochs = 9 }
loss = { class_weights = { "a b" = 2.0 } }
stages = [
    { res = 64, epochs = 20, batch_size = 40 },
    { res = 80, epochs = 10, batch_size = "constant_pixels", augment = { mixup_alpha = 0.2 } },
    { res = [96, 128], epochs = 10, batch_size = "constant_pixels", res_schedule = "step" },
]
""")
    base, candidates = Recipe.load(path), Candidates.load(path, stored=(64, 112, 160))
    assert candidates.recipe == dataclasses.replace(base, scale_epochs=1.0), "no stage is added beside a ramp"
    candidates.write(tmp_path / "new.toml", [0, 2, 3], [])
    got = Recipe.load(tmp_path / "new.toml")
    assert [stage.epochs for stage in got.stages] == [2, 3]
    shapes = [[stage.shapes for stage in each.stages] for each in (base, got)]
    assert shapes[1] == shapes[0][1:], "as many pixels as in the stage that is left out"
    assert got.schedule.period_epochs == round(5 * 5 / 20)
    assert got.ema.last_epochs == 5
    assert (got.model, got.loss) == (base.model, base.loss)
    assert [stage.augment for stage in got.stages] == [stage.augment for stage in base.stages[1:]]
    assert candidates.weights() == [64, 80, 112]
    assert candidates.least() == [2, 2, 2]


def test_stored_resolutions_become_stages_from_half_the_last_one_on(tmp_path: Path) -> None:
    path = recipe(tmp_path / "one.toml", ONE)
    candidates = Candidates.load(path, stored=(32, 64, 96, 128, 160))
    assert [(stage.res, stage.validation_res) for stage in candidates.recipe.stages] == [(64, 64), (96, 96), (128, 160)]
    measured = Recipe.parse(tomllib.loads(candidates.text), name="x")
    assert measured.eval.every_epochs == 1
    assert measured.stages == candidates.recipe.stages


def test_stages_that_depend_on_each_other_all_stay(tmp_path: Path) -> None:
    frozen = '[freeze]\nmode = "unfreeze"\n' + ONE + 'unfreeze_to = "layer4"\n' + ONE.split("\n", 2)[2]
    two = ONE + '[[stages]]\nres = 160\nepochs = 2\nbatch_size = 16\n[schedule]\nbatch_rule = "linear"\n'
    for text, can_leave_out in ((frozen, False), (two, False), (two + "base_batch = 64\n", True)):
        candidates = Candidates.load(recipe(tmp_path / "r.toml", text), stored=())
        assert candidates.is_valid([0, 1])
        assert candidates.is_valid([1]) == can_leave_out
    half = ONE + 'fraction = 0.5\n[[stages]]\nres = 160\nepochs = 2\nbatch_size = 16\n[data]\nfraction_mode = "fixed"\n'
    candidates = Candidates.load(recipe(tmp_path / "r.toml", half), stored=())
    assert not candidates.is_valid([1]), "fraction_mode would be without effect"


@pytest.mark.usefixtures("quick")
def test_the_command_writes_a_recipe_that_fits_and_nothing_else(
    words: Callable[[Path], list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = recipe(tmp_path / "base.toml", '[model]\nname = "test_resnet"\n[precision]\namp = "off"\n[eval]\n'
                  "every_epochs = 2\n[[stages]]\nres = 64\nepochs = 1\nbatch_size = 12\n")  # fmt: skip
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
