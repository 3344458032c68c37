"""An exported file is what `timm.create_model` loads: the best weights to the bit, and what they mean."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import timm
import torch
from safetensors import safe_open

from pipeline.recipe import Recipe
from train import checkpoint
from train.export import export, main
from train.saved import open_saved


@pytest.mark.parametrize("which", ["raw", "ema"])
def test_timm_loads_the_best_weights_bit_for_bit(trained: Path, tmp_path: Path, which: str) -> None:
    state = torch.load(trained / "best.pt", weights_only=True)
    state["progress"]["best_weights"] = which
    checkpoint.save(tmp_path / "best.pt", state)
    saved = open_saved(tmp_path)
    line = export(saved, tmp_path / "model.safetensors")
    assert line.startswith("timm.create_model('test_resnet', num_classes=3, checkpoint_path=")
    theirs = eval(line, {"timm": timm}).eval()  # the very line that is printed
    ours = timm.create_model("test_resnet", num_classes=3).eval()
    ours.load_state_dict(state["model" if which == "raw" else "ema"])
    images = torch.randn(4, 3, 48, 48)
    assert torch.equal(theirs(images), ours(images))
    assert not torch.equal(state["model"]["fc.weight"], state["ema"]["fc.weight"])
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        about = file.metadata()
    assert json.loads(about["classes"]) == ["class0", "class1", "class2"]
    assert (about["weights"], about["recipe_hash"]) == (which, saved.recipe.hash)
    assert json.loads(about["recipe"])["stages"][1]["res"] == 48


def test_the_command_writes_beside_the_checkpoint_and_says_how_to_load_it(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(trained), "--out", str(tmp_path / "m.safetensors")]) == 0
    assert "timm.create_model('test_resnet', num_classes=3" in capsys.readouterr().out
    assert main([str(trained), "--out", str(tmp_path / "m.pth")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main([str(tmp_path)]) == 2
    assert "no checkpoint found, expected a run's folder" in capsys.readouterr().err


def test_the_recipe_of_a_checkpoint_is_the_one_it_was_trained_by(trained: Path) -> None:
    saved = open_saved(trained)
    assert saved.recipe == Recipe.load(trained.parent / "small.toml")
