"""Folds are runs of their own, one after another, that go on after a cut; their mean and deviation are told."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from pipeline.dataset.shard_set import ShardSet
from tests.train.conftest import without_clocks
from train import trainer as runs
from train.__main__ import main
from train.logs.metrics import read_log


def train(folded: Path, out: Path, *more: str) -> int:
    words = ["train", "--shards", folded / "s", "--recipe", folded / "cv.toml", "--runs", out, "--device", "cpu"]
    return main([*map(str, words), "--threads", "1", *more])


def test_each_fold_is_the_run_with_that_fold_and_a_cut_goes_on(
    folded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    after = runs._Session._after

    def stopping(session: runs._Session, spec: runs.BatchSpec) -> bool:
        if session.options.fold == 2 and spec.index == 1:
            session.stopped_by = 15
        return after(session, spec)

    with monkeypatch.context() as patch:
        patch.setattr(runs._Session, "_after", stopping)
        assert train(folded, tmp_path, "--folds", "0,2") == 128 + 15
    assert not (tmp_path / "cv" / "folds.json").exists()
    capsys.readouterr()
    assert train(folded, tmp_path, "--folds", "0,2") == 0
    out = capsys.readouterr().out
    assert "fold-0: this run is finished" in out
    assert "fold-2: resuming at batch 2" in out
    assert sorted(path.name for path in (tmp_path / "cv").iterdir()) == ["fold-0", "fold-2", "folds.json"]
    told = json.loads((tmp_path / "cv" / "folds.json").read_text())
    top1 = []
    for k in (0, 2):
        records = read_log(tmp_path / "cv" / f"fold-{k}" / "run.jsonl")
        (epoch,) = [record for record in records if record["kind"] == "epoch"]
        assert epoch["samples"] == 30 - len(ShardSet.open(folded / "s", fold=k).splits["val"])
        assert told["folds"][str(k)]["best_top1"] == epoch["top1"]
        top1.append(epoch["top1"])
    assert told["best_top1"] == {"mean": statistics.mean(top1), "deviation": statistics.stdev(top1)}
    assert f"{100 * statistics.mean(top1):.2f} ± {100 * statistics.stdev(top1):.2f} %" in out
    (tmp_path / "two.toml").write_text(f"{(folded / 'cv.toml').read_text()}[data]\nfold = 2\n")
    assert train(folded, tmp_path, "--recipe", str(tmp_path / "two.toml")) == 0
    alone, fold = (without_clocks(tmp_path / name / "run.jsonl") for name in ("two", "cv/fold-2"))
    assert [r["loss"] for r in alone if r["kind"] == "step"] == [r["loss"] for r in fold if r["kind"] == "step"]
    assert alone[0]["recipe_hash"] == fold[0]["recipe_hash"]


@pytest.mark.parametrize(
    ("folds", "message"),
    [
        ("3", "--folds: got 3, expected all, or numbers from 0 to 2"),
        ("0,0", "--folds: got 0,0"),
        ("x", "--folds: got x"),
        ("", "--folds: got"),
    ],
)
def test_a_wrong_fold_is_told(
    folded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], folds: str, message: str
) -> None:
    assert train(folded, tmp_path, "--folds", folds) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_set_or_a_recipe_that_does_not_go_with_folds_is_told(
    folded: Path, shard_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(folded, tmp_path, "--folds", "all", "--shards", str(shard_root)) == 2
    assert "the set has no folds, got --folds all" in capsys.readouterr().err
    (tmp_path / "one.toml").write_text(f"{(folded / 'cv.toml').read_text()}[data]\nfold = 1\n")
    assert train(folded, tmp_path, "--folds", "0", "--recipe", str(tmp_path / "one.toml")) == 2
    assert "got fold 0, but the recipe has data.fold 1" in capsys.readouterr().err
