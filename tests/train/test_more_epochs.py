"""`--more-epochs`: a finished run goes on as a new run, from its weights and with its recipe."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path

import pytest
import torch

from resolute.cli import main
from resolute.train.checkpoint import load
from resolute.train.logs.metrics import read_log
from resolute.train.more_epochs import LR_FACTOR, continued_recipe
from resolute.train.recipe import RECIPES
from resolute.train.recipe.schema import Recipe
from resolute.train.recipe.toml import recipe_text
from tests.train.conftest import stop_at


@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("*.toml")))
def test_the_recipe_of_more_epochs_is_the_last_stage_and_is_read_back_from_its_file(name: str) -> None:
    recipe = Recipe.load(RECIPES / f"{name}.toml")
    more = continued_recipe(recipe, 3, weights=Path("runs/x/best.pt"))
    (stage,) = more.stages
    last = recipe.stages[-1]
    assert (stage.resolutions, stage.epochs) == ((last.max_res,), 3)
    assert stage.batch_size == last.batch_size_at(last.max_res)
    own = recipe.in_stage(len(recipe.stages) - 1)
    assert (more.model.name, more.model.kwargs, more.model.weights) == (
        recipe.model.name,
        recipe.model.kwargs,
        "runs/x/best.pt",
    )
    assert more.optim == dataclasses.replace(own.optim, lr=more.optim.lr)
    assert more.optim.lr == pytest.approx(LR_FACTOR * recipe.optim.lr, rel=0.02)
    assert (more.data, more.loss, more.distill, more.precision) == (
        recipe.data,
        own.loss,
        recipe.distill,
        recipe.precision,
    )
    parsed = Recipe.parse(tomllib.loads(recipe_text(more.written())), name=more.name)
    assert parsed.values() == more.values()


@pytest.mark.slow
def test_a_finished_run_goes_on_from_its_weights_resumes_and_says_how(
    trained: Path,
    shard_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "small").symlink_to(trained)
    words = ["train", "--run", "small", "--runs", str(tmp_path / "runs"), "--more-epochs", "2", "--device", "cpu"]
    with monkeypatch.context() as patch:
        stop_at(patch, 5)
        assert main(words) == 128 + 15
    assert main(words) == 0
    out = capsys.readouterr().out
    folder = tmp_path / "runs" / "small-plus-2"
    assert "starts from EMA weights of" in out or "starts from raw weights of" in out
    assert f"{folder}: resuming at batch" in out
    assert f"more epochs: `resolute train --run={folder} --more-epochs=2`" in out
    recipe = Recipe.load(folder / "recipe.toml")
    assert [(stage.res, stage.epochs) for stage in recipe.stages] == [(48, 2)]
    start, *_ = read_log(folder / "run.jsonl")
    assert start["recipe_hash"] == recipe.hash
    assert start["recipe_text"] == (folder / "recipe.toml").read_text()
    before, after = (load(path / "last.pt", expect={}) for path in (trained, folder))
    assert not torch.equal(before["model"]["conv1.0.weight"], after["model"]["conv1.0.weight"])
    assert after["set"] == before["set"]
    assert main(words) == 0
    assert "this run is finished" in capsys.readouterr().out


def test_what_cannot_be_continued_is_refused(
    trained: Path, shard_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*words: str) -> str:
        assert main(["train", "--runs", str(tmp_path), "--device", "cpu", "--more-epochs", "2", *words]) == 2
        return capsys.readouterr().err

    assert "--more-epochs: got no --run, expected the finished run to continue" in refused()
    assert "no run or checkpoint" in refused("--run", "none")
    assert "--more-epochs: got --recipe as well" in refused("--run", str(trained), "--recipe", "demo")
    assert "--more-epochs: got --folds as well" in refused("--run", str(trained), "--folds", "3")
    recipe = trained.parent / "small.toml"
    with monkeypatch.context() as patch:
        stop_at(patch, 3)
        words = ["train", str(shard_root), "--recipe", str(recipe), "--run", "half", "--runs", str(tmp_path)]
        assert main([*words, "--device", "cpu"]) == 128 + 15
    assert "half is not finished; run the command that began it again" in refused("--run", "half")
