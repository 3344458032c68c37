"""Evaluation is exact: equal to the run's own validation and to a count by hand."""

from __future__ import annotations

import csv
import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch

from resolute.cli import main
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.loader.loader import Loader
from resolute.pipeline.plan.plan import Plan
from resolute.pipeline.plan.stage import Stage
from resolute.train.inference.evaluate import evaluate
from resolute.train.inference.saved_run import open_saved_run
from resolute.train.recipe.schema import Recipe
from tests.train.conftest import SMALL, epochs_of

CPU = torch.device("cpu")


def test_an_evaluation_equals_the_validation_of_the_run(trained: Path, shard_root: Path, tmp_path: Path) -> None:
    assert open_saved_run(trained).recipe == Recipe.load(trained.parent / "small.toml")
    assert (
        main(
            [
                "eval",
                str(trained / "last.pt"),
                "--shards",
                str(shard_root),
                "--device",
                "cpu",
                "--threads",
                "1",
                "--json",
                str(tmp_path / "e.json"),
            ]
        )
        == 0
    )
    result = json.loads((tmp_path / "e.json").read_text())
    epoch = epochs_of(trained)[-1]
    assert result["flip"]  # the recipe's
    assert [(row["res"], row["samples"]) for row in result["rows"]] == [(48, 15)] * 2
    rows = {row["weights"]: (row["top1"], row["top5"]) for row in result["rows"]}
    assert rows["raw"] == (epoch["top1"], epoch["top5"])
    assert rows["ema"] == (epoch["ema_top1"], epoch["ema_top5"])


def test_every_resolution_and_split_equals_a_count_by_hand(trained: Path, shard_set: ShardSet) -> None:
    saved = open_saved_run(trained)
    rows = evaluate(saved, shard_set, [40, 64], device=CPU, threads=1, split="train")
    assert [(row["res"], row["weights"]) for row in rows] == [(r, w) for r in (40, 64) for w in ("raw", "ema")]
    assert {row["samples"] for row in rows} == {75}
    assert any(row["top1"] < 1 for row in rows)
    network = saved.network("ema", CPU)
    # the training images as validation sees them: the splits swapped
    swapped = dataclasses.replace(
        shard_set, splits={"train": shard_set.splits["val"], "val": shard_set.splits["train"]}
    )
    for res, stored in ((40, 48), (64, 64)):
        stage, right = Stage(res=stored, epochs=1, batch_size=15, eval_res=res), 0
        with Loader(Plan(swapped, [stage], eval_batch_size=8), num_threads=1, start=1) as loader, torch.no_grad():
            for batch in loader:
                assert (batch.spec.split, batch.spec.res) == ("val", res)
                right += int((network(batch.images).argmax(1) == batch.labels).sum())
        (row,) = (row for row in rows if (row["res"], row["weights"]) == (res, "ema"))
        assert row["top1"] == right / 75


@pytest.mark.slow
def test_a_run_remembers_its_set_from_any_working_directory(
    shard_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(shard_root, tmp_path / "s")
    (tmp_path / "small.toml").write_text(SMALL.replace("epochs = 2", "epochs = 1"))
    monkeypatch.chdir(tmp_path)
    assert (
        main(
            ["train", "--shards", "s", "--recipe", "small.toml", "--run", "small", "--device", "cpu", "--threads", "1"]
        )
        == 0
    )
    monkeypatch.chdir("/")
    evaluation = ["eval", str(tmp_path / "runs" / "small"), "--device", "cpu"]
    prediction = ["predict", *evaluation[1:], "--out", str(tmp_path / "p.csv")]
    assert main(evaluation) == main(prediction) == 0
    assert f"15 samples of {tmp_path / 's'}, val, flip on" in capsys.readouterr().out
    with (tmp_path / "p.csv").open(newline="") as file:
        assert len([*csv.DictReader(file)]) == 15
    (tmp_path / "s").rename(tmp_path / "moved")
    for command in (evaluation, prediction):
        assert main(command) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert f"{tmp_path / 's'}/manifest.json: not found" in err
        assert "best.pt; if it is elsewhere now, name it with SHARDS, of predict SRC)" in err
    assert main([*prediction, "--src", str(tmp_path / "moved")]) == 0
