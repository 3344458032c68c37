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


@pytest.fixture(scope="module")
def cv(folded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The set s; the set t of the same photos, with two resolutions and a validation split; the runs runs/cv of s."""
    folder = tmp_path_factory.mktemp("cv")
    (folder / "s").symlink_to(folded / "s")
    words = ["--src", str(folded / "photos"), "--workers", "1"]
    assert prep([*words, "--out", str(folder / "t"), "--res", "32,48", "--val-frac", "0.3"]) == 0
    words = ["train", "--shards", folded / "s", "--recipe", folded / "cv.toml",
             "--run", "cv", "--runs", folder / "runs"]  # fmt: skip
    assert main([*map(str, words), "--device", "cpu", "--threads", "1", "--folds", "3"]) == 0
    return folder


def predicted(cv: Path, out: Path, *more: str, runs: str = "runs/cv", source: str = "s") -> list[dict[str, str]]:
    words = ["predict", cv / runs, "--src", cv / source, "--out", out / "pred.csv"]
    assert main([*map(str, words), "--device", "cpu", "--threads", "1", *more]) == 0
    with (out / "pred.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_photo_is_predicted_by_the_fold_that_did_not_train_on_it(
    cv: Path, folded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = predicted(cv, tmp_path)
    out = capsys.readouterr().out
    assert "out of fold: each photo of fold 0, 1, 2 by the run that held it out" in out
    sets = [ShardSet.open(cv / "s").with_fold(k, 3) for k in range(3)]
    by_fold = [shards.photo_names("val") for shards in sets]
    assert f"{cv / 's'}: predicting 30 photos of the folds held out\n" in out
    assert {row["split"] for row in rows} == {"train"}  # of the set
    assert sorted(row["image"] for row in rows) == sorted(
        str(path.relative_to(folded / "photos")) for path in (folded / "photos").rglob("*.jpg")
    )
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


def test_a_single_fold_is_predicted_by_its_own_run(cv: Path, tmp_path: Path) -> None:
    assert predicted(cv, tmp_path, "--fold", "1") == predicted(cv, tmp_path, runs="runs/cv/fold-1")


def test_predict_notes_that_photos_are_training_photos(
    cv: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    predicted(cv, tmp_path, "--split", "train")
    assert "was trained on these photos" in capsys.readouterr().out


def test_the_accuracy_on_another_set_has_a_note(
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
def test_eval_notes_that_photos_may_be_training_photos(
    cv: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str, words: list[str], note: str | None
) -> None:
    out = tmp_path / "e.json"
    command = [str(cv / "runs/cv/fold-2"), "--shards", str(cv / source), "--device", "cpu", "--json", str(out)]
    assert main(["eval", *command, *words]) == 0
    assert ("note:" in capsys.readouterr().out) == (note is not None)
    printed_note = json.loads(out.read_text())["note"]
    assert printed_note is None if note is None else note in printed_note


def test_an_added_resolution_does_not_make_another_set(cv: Path, folded: Path, tmp_path: Path) -> None:
    shutil.copytree(folded / "s", tmp_path / "s")
    words = ["--src", folded / "photos", "--out", tmp_path / "s", "--workers", "1", "--res", "32,48", "--val-frac", "0"]
    assert prep([str(word) for word in words]) == 0
    assert main(["eval", str(cv / "runs/cv/fold-2"), "--shards", str(tmp_path / "s"), "--device", "cpu", "--json",
                          str(tmp_path / "e.json")]) == 0  # fmt: skip
    assert json.loads((tmp_path / "e.json").read_text())["note"] is None


@pytest.mark.parametrize(
    ("source", "fold", "message"),
    [("t", "1", "t, which the run was not trained on, expected none; omit it"),
     ("s", "3", "got fold 3 of 3, expected 0 to 2"), ("s", "-1", "--fold: got '-1'")],
)  # fmt: skip
def test_a_fold_that_is_none_of_the_runs_is_refused(
    cv: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str, fold: str, message: str
) -> None:
    run = str(cv / "runs/cv/fold-2")
    assert main(["eval", run, "--shards", str(cv / source), "--device", "cpu", f"--fold={fold}"]) == 2
    assert message in capsys.readouterr().err
    words = ["predict", run, "--src", str(cv / source), "--out", str(tmp_path / "p.csv"), f"--fold={fold}"]
    assert main(words) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "p.csv").exists()


def test_a_run_without_folds_takes_none(
    trained: Path, shard_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(trained), "--shards", str(shard_root), "--device", "cpu", "--fold", "1"]) == 2
    assert "--fold: got 1 for a run without folds, expected none; omit it" in capsys.readouterr().err


def test_runs_of_different_numbers_of_folds_are_not_averaged(
    cv: Path, folded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(cv / "runs" / "cv" / "fold-0", tmp_path / "cv" / "fold-0")
    words = ["train", "--shards", folded / "s", "--recipe", folded / "cv.toml",
             "--run", "cv", "--runs", tmp_path, "--device", "cpu"]  # fmt: skip
    assert main([*map(str, words), "--folds", "1/2"]) == 0
    capsys.readouterr()
    assert main(["predict", str(tmp_path / "cv"), "--src", str(folded / "s"), "--out", str(tmp_path / "p.csv")]) == 2
    assert "margin or folds differ" in capsys.readouterr().err
