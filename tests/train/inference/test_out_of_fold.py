"""Out-of-fold predictions, and notes on photos that were seen in training."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest

from resolute.cli import main
from resolute.pipeline.dataset.shard_set import ShardSet
from tests.support.cli import prep
from tests.train.conftest import train_words

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cv(folded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The set s; the set t of the same photos, with a validation split; the runs runs/cv of 3 folds of s."""
    folder = tmp_path_factory.mktemp("cv")
    (folder / "s").symlink_to(folded / "s")
    words = ["--src", str(folded / "photos"), "--workers", "1"]
    assert prep([*words, "--out", str(folder / "t"), "--res", "32", "--val-frac", "0.3"]) == 0
    assert main(train_words(folded / "s", folded / "cv.toml", folder / "runs", "--folds", "3")) == 0
    return folder


def predicted(cv: Path, out: Path, *more: str, runs: str = "runs/cv") -> list[dict[str, str]]:
    words = ["predict", cv / runs, "--src", cv / "s", "--out", out / "pred.csv"]
    assert main([*map(str, words), "--device", "cpu", "--threads", "1", *more]) == 0
    with (out / "pred.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_photo_is_predicted_by_the_fold_that_did_not_train_on_it(
    cv: Path, folded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = predicted(cv, tmp_path)
    out = capsys.readouterr().out
    assert "out of fold: each photo of fold 0, 1, 2 by the run that held it out" in out
    right = sum(row["label"] == row["class1"] for row in rows)
    assert f"30 images, top-1 {100 * right / 30:.3f} %" in out
    photos = [str(path.relative_to(folded / "photos")) for path in (folded / "photos").rglob("*.jpg")]
    assert sorted(row["image"] for row in rows) == sorted(photos)
    for k in range(3):
        held_out = set(ShardSet.open(cv / "s").with_fold(k, 3).photo_names("val"))
        alone = predicted(cv, tmp_path, runs=f"runs/cv/fold-{k}")
        assert alone == [row for row in rows if row["image"] in held_out]
        assert len(alone) == len(held_out) == 10
        log = (cv / "runs" / "cv" / f"fold-{k}" / "run.jsonl").read_text().splitlines()
        (top1,) = {record["top1"] for record in map(json.loads, log) if record["kind"] == "epoch"}
        assert sum(row["label"] == row["class1"] for row in alone) / len(alone) == pytest.approx(top1)
    assert alone == predicted(cv, tmp_path, "--fold", "2")


def test_eval_notes_that_photos_may_be_training_photos(cv: Path, folded: Path, tmp_path: Path) -> None:
    added = ["--src", folded / "photos", "--out", tmp_path / "s", "--workers", "1", "--res", "32,48", "--val-frac", "0"]
    shutil.copytree(folded / "s", tmp_path / "s")
    assert prep([*map(str, added)]) == 0
    for source, words, note in (
        (cv / "s", [], None),
        (tmp_path / "s", [], None),  # the same photos, with one more resolution
        (cv / "s", ["--fold", "0"], "held out fold 2; it was trained on photos of fold 0"),
        (cv / "s", ["--split", "train"], "was trained on these photos"),
        (cv / "t", [], "was not trained on"),
    ):
        command = ["eval", cv / "runs/cv/fold-2", "--shards", source, "--device", "cpu", "--json", tmp_path / "e.json"]
        assert main([*map(str, command), *words]) == 0
        printed = json.loads((tmp_path / "e.json").read_text())["note"]
        assert printed is None if note is None else note in printed
