"""A set whose validation photos have near copies in training is judged with and without them, exactly."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from resolute.cli import main
from resolute.pipeline.dataset.format import GROUP as GROUP_RECORD
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.plan.plan import Plan
from resolute.pipeline.plan.stage import Stage
from resolute.train.inference.evaluate import evaluate
from resolute.train.inference.saved_run import open_eval_set, open_saved_run, related_to_training
from resolute.train.logs.metrics import read_log
from resolute.train.validation import related_photos
from tests.support.groups import with_groups, write_groups
from tests.train.conftest import SMALL, assert_equal_runs, epochs_of, stop_at, train_words

NEAR, GROUP = [(3, 0), (9, 4), (40, 9)], [(5, 4), (6, 12)]
RELATED = [0, 4, 9, 12]
UNRELATED = "without a near copy or group-mate among the training photos"


@pytest.fixture(scope="module")
def related_run(shard_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the set s, in which 4 of 15 validation samples are related to training samples, and its run.

    printed.txt: what the run printed.
    """
    folder = tmp_path_factory.mktemp("related")
    with_groups(shard_root, folder / "s", near=NEAR, group=GROUP)
    (folder / "small.toml").write_text(SMALL)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(train_words(folder / "s", folder / "small.toml", folder)) == 0
    (folder / "printed.txt").write_text(printed.getvalue())
    return folder


def test_only_samples_with_a_partner_in_the_other_split_are_related(shard_root: Path, tmp_path: Path) -> None:
    with ShardSet.open(with_groups(shard_root, tmp_path / "s", near=NEAR, group=GROUP)) as shards:
        related = related_photos(shards)
        assert related is not None
        assert np.flatnonzero(related).tolist() == RELATED
    with ShardSet.open(shard_root) as shards:
        assert related_photos(shards) is None


@pytest.mark.slow
def test_eval_counts_the_samples_without_the_related_ones(
    related_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = open_saved_run(related_run / "small")
    with open_eval_set(None, saved) as shards:
        related = related_to_training(saved, shards, split="val", fold=None)
        assert related is not None
        assert np.flatnonzero(related).tolist() == RELATED
        chosen = shards.splits["val"].subset("val", ~related)
        device = torch.device("cpu")
        rows = evaluate(saved, shards, [48], device=device, threads=1, flip=True, related=related)
        object.__setattr__(shards, "splits", {**shards.splits, "val": chosen})
        alone = evaluate(saved, shards, [48], device=device, threads=1, flip=True)
    assert [row["samples_unrelated"] for row in rows] == [11, 11]
    assert [row["samples"] for row in rows] == [15, 15]
    assert [row["top1_unrelated"] for row in rows] == [row["top1"] for row in alone]
    capsys.readouterr()
    assert main(["eval", str(related_run / "small"), "--device", "cpu", "--threads", "1"]) == 0
    out = capsys.readouterr().out
    assert "top-1 unrelated" in out
    assert f"note: top-1 unrelated: of the 11 of 15 photos {UNRELATED} of the run" in out
    written = json.loads((related_run / "small" / "eval.json").read_text())["rows"]
    assert [row["top1_unrelated"] for row in written] == [row["top1_unrelated"] for row in rows]
    last = epochs_of(related_run / "small")[-1]
    assert {row["weights"]: row["top1_unrelated"] for row in rows}.keys() == {"raw", "ema"}
    assert {"top1_unrelated", "ema_top1_unrelated"} <= last.keys()


@pytest.mark.slow
def test_a_run_prints_and_draws_both_numbers(related_run: Path, trained: Path) -> None:
    out = (related_run / "printed.txt").read_text()
    line = "4 of 15 validation photos have a near copy or group-mate among the training photos; top-1 is reported"
    assert f"{line} with and without them (top-1 unrelated)\n" in out
    assert "top-1 unrelated %" in out
    assert f"on the 11 of 15 photos {UNRELATED}\n" in out
    page = (related_run / "small" / "report.html").read_text()
    assert f"top-1 on the 11 photos {UNRELATED}" in page
    assert "related" not in (trained / "report.html").read_text()


@pytest.mark.slow
def test_a_run_logs_both_numbers_and_is_trained_as_without_them(related_run: Path, trained: Path) -> None:
    start = read_log(related_run / "small" / "run.jsonl")[0]
    assert (start["val_samples"], start["val_related"]) == (15, 4)
    assert "val_related" not in read_log(trained / "run.jsonl")[0]
    for own, other in zip(epochs_of(related_run / "small"), epochs_of(trained), strict=True):
        assert {key for key in own if key not in other} == {"top1_unrelated", "ema_top1_unrelated"}
        assert own["top1"] == other["top1"]  # training does not change
        for name in ("top1_unrelated", "ema_top1_unrelated"):
            assert own[name] * 11 == pytest.approx(round(own[name] * 11), abs=1e-9)


@pytest.mark.slow
def test_comparisons_have_both_numbers_and_other_sets_one(
    related_run: Path, shard_root: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = str(related_run / "small"), ("--device", "cpu", "--json", str(tmp_path / "e.json"))
    assert main(["compare", run, str(trained), "--out", str(tmp_path / "c.html")]) == 0
    assert f"The same on the validation photos {UNRELATED}: " in capsys.readouterr().out
    assert main(["eval", run, "--shards", str(shard_root), *out]) == 0
    assert main(["eval", str(trained), *out]) == 0
    assert "unrelated" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_resumed_run_has_the_same_numbers(related_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small.toml").write_text(SMALL)
    words = train_words(related_run / "s", tmp_path / "small.toml", tmp_path)
    with monkeypatch.context() as patch:
        stop_at(patch, 6)
        assert main(words) == 128 + 15
    assert main(words) == 0
    assert_equal_runs(tmp_path / "small", related_run / "small")


@pytest.mark.slow
def test_folds_are_trained_weighted_and_predicted_from_samples_without_a_partner_elsewhere(
    folded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folded / "s", tmp_path / "s")
    with ShardSet.open(tmp_path / "s") as shards:
        keys = shards.splits["train"].samples["key"].tolist()
    rows = [(0, key, place % 10 + 1, 0) for place, key in enumerate(keys)]  # ten groups of three
    write_groups(tmp_path / "s", np.array(rows, GROUP_RECORD))
    assert main(train_words(tmp_path / "s", folded / "cv.toml", tmp_path, "--folds", "3")) == 0
    out = capsys.readouterr().out
    assert "related" not in out
    words = ["predict", tmp_path / "cv", "--out", tmp_path / "pred.csv", "--device", "cpu", "--threads", "1"]
    assert main([*map(str, words)]) == 0
    assert "out of fold: each photo of fold 0, 1, 2 by the run that held it out" in capsys.readouterr().out
    with (tmp_path / "pred.csv").open(newline="") as file:
        predicted = [row["image"] for row in csv.DictReader(file)]
    held_out = []
    for k in range(3):
        with ShardSet.open(tmp_path / "s", fold=k, folds=3) as shards:
            train, val = shards.splits["train"], shards.splits["val"]
            assert related_photos(shards) is None
            assert train.group is not None
            assert val.group is not None
            assert not set(train.group.tolist()) & set(val.group.tolist())
            held_out += shards.photo_names("val")
            stage = Stage(res=32, epochs=1, batch_size=4)
            plan = Plan(shards, [stage], sampling="balanced", eval_batch_size=8)
            labels = train.samples["label"]
            # class weights and samplers count the fold's own samples, and draw from these alone
            assert plan.class_samples.tolist() == np.bincount(labels, minlength=3).tolist()
            drawn = np.concatenate([plan.ids(index) for index in range(plan.phases[0].batches)])
            assert drawn.max() < len(train)
        assert not any("unrelated" in key for key in epochs_of(tmp_path / "cv" / f"fold-{k}")[0])
    assert predicted == held_out
    write_groups(tmp_path / "s", np.array([(*row[:2], row[2] // 2 + 1, 0) for row in rows], GROUP_RECORD))
    assert main(["eval", str(tmp_path / "cv" / "fold-0"), "--device", "cpu"]) == 2
    assert "belong together otherwise than when" in capsys.readouterr().err
