"""A run that ended before its last stage is used at the resolution of its weights, not at one that it never saw."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from resolute.cli import main
from resolute.train.inference.saved_run import open_saved_run
from tests.train.conftest import epochs_of, stages, stop_at, train_words

pytestmark = pytest.mark.slow

RECIPE = f"""
seed = 3
model = {{ name = "test_resnet" }}
optim = {{ lr = 1e-9 }}
precision = {{ amp = "off" }}
eval = {{ batch_size = 8, crop_pct = 0.7 }}
{stages((32, 3, 25), (48, 2, 25))}"""  # 3 steps and 2 batches of validation per epoch


@pytest.fixture(scope="module")
def early(shard_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs below this folder, interrupted: first (before any validation) and second (at the start of the second stage).
    Their set has 32, 48 and 64 px."""
    folder = tmp_path_factory.mktemp("early")
    for name, at in (("first", 1), ("second", 16)):
        (folder / f"{name}.toml").write_text(RECIPE)
        with pytest.MonkeyPatch.context() as patch:
            stop_at(patch, at)
            assert main(train_words(shard_root, folder / f"{name}.toml", folder)) == 128 + 15
    return folder


@pytest.mark.parametrize(
    ("name", "res"),
    [
        ("first", 32),
        ("first/last.pt", 32),
        ("second", 32),
        ("second/best.pt", 32),
        ("second/last.pt", 48),  # it has trained at 48 px since its last validation
    ],
)
def test_a_checkpoint_holds_the_resolution_of_its_weights(early: Path, name: str, res: int) -> None:
    assert open_saved_run(early / name).res == res


def test_evaluation_predictions_and_exports_have_the_resolution_of_the_best_weights(
    early: Path, shard_root: Path, tmp_path: Path
) -> None:
    words = ["--shards", str(shard_root), "--device", "cpu", "--json", str(tmp_path / "e.json")]
    assert main(["eval", str(early / "second"), *words]) == 0
    (row,) = json.loads((tmp_path / "e.json").read_text())["rows"]
    epochs = epochs_of(early / "second")
    best = max(epochs, key=lambda epoch: epoch["top1"])
    assert (row["res"], row["top1"], row["top5"]) == (32, best["top1"], best["top5"])
    words = ["--src", str(shard_root), "--out", str(tmp_path / "p.csv"), "--device", "cpu"]
    assert main(["predict", str(early / "second"), *words]) == 0
    with (tmp_path / "p.csv").open(newline="") as file:
        hits = [each["label"] == each["class1"] for each in csv.DictReader(file)]
    assert sum(hits) / len(hits) == row["top1"]
    assert main(["export", str(early / "second"), "--out", str(tmp_path / "folder")]) == 0
    config = json.loads((tmp_path / "folder" / "config.json").read_text())
    assert (config["pretrained_cfg"]["input_size"], config["pretrained_cfg"]["crop_pct"]) == ([3, 32, 32], 0.7)
    assert config["resolute"]["res"] == 32


def test_folds_validated_at_different_resolutions_are_averaged_at_a_chosen_one(
    early: Path, shard_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for k, file in enumerate(("second/best.pt", "second/last.pt")):
        (tmp_path / f"fold-{k}").mkdir()
        (tmp_path / f"fold-{k}" / "best.pt").hardlink_to(early / file)
    words = ["predict", tmp_path, "--src", shard_root, "--out", tmp_path / "p.csv", "--device", "cpu"]
    assert main([*map(str, words)]) == 2
    assert "validated at 48 px, expected 32 px as " in capsys.readouterr().err
    assert main([*map(str, words), "--res", "40"]) == 0
    assert "2 runs, 3 classes, 40 px, cpu" in capsys.readouterr().out
