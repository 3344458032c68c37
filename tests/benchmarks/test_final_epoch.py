"""Two trainings take turns, and only epochs at the same resolution are compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.final_epoch import main, paired


def test_each_epoch_is_compared_with_the_one_beside_it_and_the_smaller_ones_with_none() -> None:
    stepped = [{"res": res, "train_s": s, "wait_s": 0.1, "eval_s": 1.0} for res, s in ((32, 1.0), (48, 4.0), (48, 6.0))]
    fixed = [{"res": 48, "train_s": s, "wait_s": 0.2, "eval_s": 1.0} for s in (9.0, 2.0, 4.0)]
    got = paired(stepped, fixed)
    assert got["pairs"] == 2
    assert got["ratio"] == {"raw": [2.0, 1.5], "median": 1.75}
    assert got["seconds"]["wait_s"] == {"stepped": [0.1, 0.1], "fixed": [0.2, 0.2]}


@pytest.mark.slow
def test_turns_are_taken_to_the_end(shard_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    words = ["--shards", shard_root, "--res", "32,48", "--epochs", "2", "--batch-size", "16", "--device", "cpu"]
    assert main([*map(str, words), "--threads", "1", "--out", str(out)]) == 0
    assert "after 32 px it takes" in capsys.readouterr().out
    got = json.loads(out.read_text())
    assert got["pairs"] == len(got["ratio"]["raw"]) == 2
    assert all(value > 0 for name in ("stepped", "fixed") for value in got["seconds"]["train_s"][name])


@pytest.mark.slow
def test_a_training_that_fails_is_told(shard_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--shards", shard_root, "--res", "32,48", "--model", "no_such_net", "--out", tmp_path / "out.json"]
    assert main([*map(str, words), "--device", "cpu"]) == 2
    assert "stepped: ended with status 2, expected 0: error: model: timm cannot build" in capsys.readouterr().err
