"""Cross-validation: folds are separate, resumable runs, and mean and deviation are reported."""

from __future__ import annotations

import json
import statistics
import weakref
from pathlib import Path
from typing import Any

import pytest

from resolute.cli import main
from resolute.errors import ResoluteError
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.train import trainer
from resolute.train.cross_validation import outcome
from resolute.train.learner import Learner
from tests.train.conftest import epochs_of, train_words, without_clocks


def train(folded: Path, out: Path, *more: str) -> int:
    return main(train_words(folded / "s", folded / "cv.toml", out, *more))


@pytest.mark.slow
def test_each_fold_equals_the_run_of_that_fold_and_is_resumed(
    folded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    after, build = trainer._Session._after, Learner.__init__
    networks: list[weakref.ref[Any]] = []

    def stopping(session: trainer._Session, spec: trainer.BatchSpec) -> bool:
        if session.run.fold == (2, 3) and spec.index == 1:
            session.stopped_by = 15
        return after(session, spec)

    def recording(learner: Learner, *args: Any, **keys: Any) -> None:
        assert [network() for network in networks] == [None] * len(networks)  # that of the fold before is freed
        build(learner, *args, **keys)
        networks.append(weakref.ref(learner.network))

    with monkeypatch.context() as patch:
        patch.setattr(trainer._Session, "_after", stopping)
        patch.setattr(Learner, "__init__", recording)
        assert train(folded, tmp_path, "--folds", "0,2/3") == 128 + 15
    assert len(networks) == 2
    assert not (tmp_path / "cv" / "folds.json").exists()
    capsys.readouterr()
    assert train(folded, tmp_path, "--folds", "0,2/3") == 0
    out = capsys.readouterr().out
    assert "fold-0: this run is finished" in out
    assert "fold-2: resuming at batch 2" in out
    assert sorted(path.name for path in (tmp_path / "cv").iterdir()) == [
        "fold-0",
        "fold-2",
        "folds.json",
        "recipe.toml",
    ]
    summary = json.loads((tmp_path / "cv" / "folds.json").read_text())
    top1 = []
    for k in (0, 2):
        (epoch,) = epochs_of(tmp_path / "cv" / f"fold-{k}")
        assert epoch["samples"] == 30 - len(ShardSet.open(folded / "s").with_fold(k, 3).splits["val"])
        assert summary["folds"][str(k)]["best_top1"] == epoch["top1"]
        top1.append(epoch["top1"])
    assert summary["best_top1"] == {"mean": statistics.mean(top1), "deviation": statistics.stdev(top1)}
    assert f"{100 * statistics.mean(top1):.2f} ± {100 * statistics.stdev(top1):.2f} %" in out
    (tmp_path / "two.toml").write_text(f"{(folded / 'cv.toml').read_text()}[data]\nfold = 2\nfolds = 3\n")
    assert train(folded, tmp_path, "--recipe", str(tmp_path / "two.toml"), "--run", "two") == 0
    alone, fold = (without_clocks(tmp_path / name / "run.jsonl") for name in ("two", "cv/fold-2"))
    assert [r["loss"] for r in alone if r["kind"] == "step"] == [r["loss"] for r in fold if r["kind"] == "step"]
    assert alone[0]["recipe_hash"] == fold[0]["recipe_hash"]


@pytest.mark.slow
def test_a_fold_is_not_resumed_as_another_one(folded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(folded, tmp_path, "--folds", "0/3") == 0
    capsys.readouterr()
    assert train(folded, tmp_path, "--folds", "0/2") == 2
    assert "data.folds" in capsys.readouterr().err
    (tmp_path / "cv" / "fold-0").rename(tmp_path / "cv" / "fold-2")
    assert train(folded, tmp_path, "--folds", "2/3") == 2
    assert "data.fold" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["--folds=0,2/3", "--from=best.pt"],
            "--from: got best.pt for 2 folds, expected one fold, such as --folds 0/3",
        ),
        (["--folds=3/3"], "--folds: got 3/3, expected the number of folds, such as 5 to train all 5"),
        (["--folds=31"], "got 31 folds, expected 2 to 30, the number of training samples"),
        (
            [],
            "split val has no samples, expected some; hold out a part with VAL_FRAC=0.1 (make shards), or a fold "
            "(FOLDS=",
        ),
    ],
)
def test_folds_that_cannot_be_are_refused_in_one_line(
    folded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    assert train(folded, tmp_path, *more) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not list(tmp_path.rglob("*.pt"))


def test_a_fold_without_a_finite_score_is_named(tmp_path: Path) -> None:
    records = [{"kind": "start"}, {"kind": "epoch", "epoch": 0, "r2": None, "ema_r2": None, "stage": 0}]
    (tmp_path / "run.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(ResoluteError, match="got no validation with a finite score"):
        outcome(tmp_path / "run.jsonl")
