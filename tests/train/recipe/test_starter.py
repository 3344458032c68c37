"""The starter recipe: every set gets a valid recipe that fits its size, targets and resolutions, and trains on it."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest

from resolute.cli import main
from resolute.errors import ResoluteError
from resolute.pipeline.dataset.target import TargetKind
from resolute.train.recipe.schema import Recipe
from resolute.train.recipe.sections import smoothing_of
from resolute.train.recipe.starter import SetFacts, chosen_recipe, split_epochs, starter_recipe

OUTPUTS: list[tuple[TargetKind, int]] = [("class", 2), ("class", 1000), ("labels", 14), ("values", 1)]
SETS = [
    SetFacts(train=train, val=val, kind=kind, outputs=outputs, resolutions=resolutions)
    for (train, val), (kind, outputs), resolutions in itertools.product(
        [(16, 4), (300, 30), (2_700, 300), (50_000, 50_000), (1_281_167, 50_000), (14_000_000, 0)],
        OUTPUTS,
        [(24,), (224,), (32, 48), (128, 160, 224), (64, 96, 128, 160, 192, 224), (32, 448)],
    )
]


@pytest.mark.slow
@pytest.mark.parametrize("gpu", [False, True])
def test_every_set_gets_a_valid_recipe_that_fits_it(gpu: bool) -> None:
    for facts in SETS:
        text = starter_recipe(facts, gpu=gpu)
        recipe = Recipe.from_text(text)
        sizes = [stage.max_res for stage in recipe.stages]
        assert sizes == sorted({*sizes})
        assert sizes[-1] == max(facts.resolutions), facts
        assert min(sizes) >= min(24, *facts.resolutions)
        assert all(stage.epochs >= 1 for stage in recipe.stages)
        for stage in recipe.stages:
            assert isinstance(stage.batch_size, int)
            assert stage.batch_size <= facts.train
            assert stage.batch_size == 16 or facts.train / stage.batch_size >= 25
        assert recipe.eval.every_epochs <= recipe.total_epochs
        assert bool(smoothing_of(recipe.loss)) == (facts.kind == "class")
        assert starter_recipe(facts, gpu=gpu) == text


def test_more_photos_get_fewer_epochs_and_validations_that_take_long_are_rarer() -> None:
    small, large = (
        Recipe.from_text(starter_recipe(dataclasses.replace(SETS[3], train=count, val=100), gpu=False))
        for count in (1_000, 100_000)
    )
    assert small.total_epochs > large.total_epochs
    rare = Recipe.from_text(starter_recipe(dataclasses.replace(SETS[3], train=1_000, val=2_000), gpu=False))
    assert rare.eval.every_epochs == 8 > small.eval.every_epochs == 1


def test_stored_resolutions_are_used_and_a_single_one_gets_smaller_ones_before_it() -> None:
    def sizes(*stored: int) -> list[int]:
        facts = dataclasses.replace(SETS[0], resolutions=stored)
        return [stage.max_res for stage in Recipe.from_text(starter_recipe(facts, gpu=False)).stages]

    assert sizes(128, 160, 224) == [128, 160, 224]
    assert sizes(224) == [128, 160, 224]
    assert sizes(32, 64, 224) == [128, 160, 224]
    assert sizes(96, 128, 160, 192, 224) == [96, 160, 224]
    assert sizes(64, 96) == [64, 96]
    assert sizes(28) == [28]


def test_epochs_are_divided_with_at_least_one_for_each_stage() -> None:
    for epochs, stages in itertools.product(range(1, 40), (1, 2, 3)):
        counts = split_epochs(epochs, stages)
        assert len(counts) == stages
        assert min(counts) >= 1
        assert sum(counts) == epochs or counts[0] == 1  # few epochs: one for each stage
        assert sum(counts) <= max(epochs, stages) + 1


def test_a_named_model_has_no_arguments_of_another_one(shard_root: Path) -> None:
    chosen = chosen_recipe(None, ["model.name=test_vit"], shards=shard_root, gpu=False)
    recipe = Recipe.from_text(chosen)
    assert (recipe.model.name, recipe.model.kwargs) == ("test_vit", {})


@pytest.mark.slow
def test_a_run_without_a_recipe_keeps_its_own_and_resumes(
    shard_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", str(shard_root), "--runs", str(tmp_path), "--run", "r", "--device", "cpu", "--threads", "1"]
    few = ["--set", "scale_epochs=0.05", "--set", "model.name=test_resnet"]
    assert main([*words, *few]) == 0
    text = (tmp_path / "r" / "recipe.toml").read_text()
    assert 'name = "test_resnet"' in text
    capsys.readouterr()
    assert main(words) == 0  # its recipe is that of the run, also without the settings
    assert "this run is finished" in capsys.readouterr().out
    assert (tmp_path / "r" / "recipe.toml").read_text() == text
    assert main([*words, "--set", "optim.lr=0.5"]) == 2
    assert "optim.lr" in capsys.readouterr().err


def test_the_command_writes_a_recipe_that_trains_and_never_over_another_file(
    shard_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["recipe", "mine.toml", "--shards", str(shard_root), "--model", "test_resnet", "--device", "cpu"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "mine.toml: test_resnet, epochs: 30 at 32 px, 18 at 48 px, 12 at 64 px" in out
    assert f"next: `resolute train --shards={shard_root} --recipe=mine.toml`" in out
    assert Recipe.load("mine.toml").model.name == "test_resnet"
    assert main(words) == 2
    assert "mine.toml: exists already, expected a new file" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_with_a_budget_the_epochs_fit_into_it(
    shard_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--shards", str(shard_root), "--model", "test_resnet", "--device", "cpu", "--threads", "1"]
    for name, budget in (("short.toml", "20s"), ("long.toml", "60s")):
        assert main(["recipe", name, *words, "--budget", budget]) == 0
    short, long = Recipe.load("short.toml"), Recipe.load("long.toml")
    assert short.total_epochs < long.total_epochs
    assert {path.name for path in tmp_path.iterdir()} == {"short.toml", "long.toml"}
    capsys.readouterr()
    assert main(["recipe", "none.toml", *words, "--budget", "1s"]) == 2
    assert "--budget: got 1.0 s, but one epoch of every stage and the start take" in capsys.readouterr().err
    assert not (tmp_path / "none.toml").exists()


def test_a_starter_recipe_needs_a_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lr", "--samples", "100"]) == 2
    assert "--samples: got no --recipe, and a starter recipe needs a set" in capsys.readouterr().err
    assert main(["train"]) == 2
    assert "--shards: missing, expected a shard set" in capsys.readouterr().err
    with pytest.raises(ResoluteError, match="manifest"):
        chosen_recipe(None, (), shards="nowhere", gpu=False)
