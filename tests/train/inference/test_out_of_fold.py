"""Folds predict the photos of their own set out of fold; an accuracy on photos seen in training is never printed."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest

from pipeline.dataset.shard_set import ShardSet, key_name
from prep.__main__ import main as prep
from train.__main__ import main


@pytest.fixture(scope="module")
def cv(folded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The set s of 3 folds; t, of the same photos with two resolutions and no folds; the folds' runs, runs/cv."""
    folder = tmp_path_factory.mktemp("cv")
    (folder / "s").symlink_to(folded / "s")
    words = ["--src", str(folded / "photos"), "--workers", "1"]
    assert prep([*words, "--out", str(folder / "t"), "--res", "32,48", "--val-frac", "0.3"]) == 0
    words = ["train", "--shards", folded / "s", "--recipe", folded / "cv.toml", "--runs", folder / "runs"]
    assert main([*map(str, words), "--device", "cpu", "--threads", "1", "--folds", "all"]) == 0
    return folder


def predicted(cv: Path, out: Path, *more: str, runs: str = "runs/cv", source: str = "s") -> list[dict[str, str]]:
    words = ["predict", cv / runs, "--src", cv / source, "--out", out / "pred.csv"]
    assert main([*map(str, words), "--device", "cpu", "--threads", "1", *more]) == 0
    with (out / "pred.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_photo_is_predicted_once_by_the_fold_that_held_it_out(
    cv: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = predicted(cv, tmp_path)
    out = capsys.readouterr().out
    assert "out of fold: each photo of fold 0, 1, 2 by the run that held it out" in out
    sets = [ShardSet.open(cv / "s", fold=k) for k in range(3)]
    by_fold = [[key_name(key) for key in shards.splits["val"].samples[:]["key"].tolist()] for shards in sets]
    assert sorted(row["image"] for row in rows) == sorted(key for keys in by_fold for key in keys)
    assert len(rows) == 30
    for k, keys in enumerate(by_fold):
        alone = predicted(cv, tmp_path, runs=f"runs/cv/fold-{k}")
        assert alone == [row for row in rows if row["image"] in keys]
        log = (cv / "runs" / "cv" / f"fold-{k}" / "run.jsonl").read_text().splitlines()
        (top1,) = {record["top1"] for record in map(json.loads, log) if record["kind"] == "epoch"}
        assert sum(row["label"] == row["class1"] for row in alone) / len(alone) == pytest.approx(top1)
    right = sum(row["label"] == row["class1"] for row in rows)
    assert f"30 images, top-1 {100 * right / 30:.3f} %" in out


def test_one_fold_of_the_set_is_predicted_by_its_own_run(cv: Path, tmp_path: Path) -> None:
    assert predicted(cv, tmp_path, "--fold", "1") == predicted(cv, tmp_path, runs="runs/cv/fold-1")


def test_there_is_no_accuracy_on_photos_that_the_folds_were_trained_on(
    cv: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    predicted(cv, tmp_path, "--split", "train")
    out = capsys.readouterr().out
    assert "no accuracy: " in out
    assert "top-1" not in out


def test_of_another_set_the_mean_is_told_with_a_warning(
    cv: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(predicted(cv, tmp_path, source="t")) == 9
    out = capsys.readouterr().out
    assert "top-1" in out
    assert "note: " in out
    assert "was not trained on" in out


@pytest.mark.parametrize(
    ("source", "words", "note"),
    [
        ("s", [], None),
        ("s", ["--fold", "0"], "held out fold 2; it was trained on photos of fold 0"),
        ("s", ["--split", "train"], "was trained on these photos"),
        ("t", [], "was not trained on"),
    ],
)
def test_eval_tells_when_the_photos_may_be_those_of_training(
    cv: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str, words: list[str], note: str | None
) -> None:
    out = tmp_path / "e.json"
    command = [str(cv / "runs/cv/fold-2"), "--shards", str(cv / source), "--device", "cpu", "--json", str(out)]
    assert main(["eval", *command, *words]) == 0
    assert ("note:" in capsys.readouterr().out) == (note is not None)
    told = json.loads(out.read_text())["note"]
    assert told is None if note is None else note in told


def test_a_resolution_added_later_leaves_it_the_same_set(cv: Path, folded: Path, tmp_path: Path) -> None:
    shutil.copytree(folded / "s", tmp_path / "s")
    words = ["--src", folded / "photos", "--out", tmp_path / "s", "--workers", "1", "--res", "32,48", "--folds", "3"]
    assert prep([str(word) for word in words]) == 0
    assert main(["eval", str(cv / "runs/cv/fold-2"), "--shards", str(tmp_path / "s"), "--device", "cpu", "--json",
                          str(tmp_path / "e.json")]) == 0  # fmt: skip
    assert json.loads((tmp_path / "e.json").read_text())["note"] is None


@pytest.mark.parametrize(
    ("source", "fold", "message"),
    [("t", "1", "t, which has no folds, expected none; omit it"), ("s", "3", "expected 0 to 2: "),
     ("s", "-1", "expected 0 to 2: ")],
)  # fmt: skip
def test_a_fold_that_the_set_has_not_is_refused(
    cv: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str, fold: str, message: str
) -> None:
    run = str(cv / "runs/cv/fold-2")
    assert main(["eval", run, "--shards", str(cv / source), "--device", "cpu", f"--fold={fold}"]) == 2
    assert message in capsys.readouterr().err
    words = ["predict", run, "--src", str(cv / source), "--out", str(tmp_path / "p.csv"), f"--fold={fold}"]
    assert main(words) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "p.csv").exists()


def test_a_set_with_folds_asks_a_run_without_one_for_the_fold(
    cv: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(trained), "--shards", str(cv / "s"), "--device", "cpu", "--res", "32"]) == 2
    assert "--fold: got none, expected 0 to 2" in capsys.readouterr().err
