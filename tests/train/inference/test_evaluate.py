"""An evaluation is exact: what the run itself said at its end, and what counting by hand says."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from pipeline.dataset.shard_set import ShardSet
from pipeline.loader.loader import Loader
from pipeline.plan.plan import Plan
from pipeline.plan.stage import Stage
from train.__main__ import main
from train.inference.evaluate import evaluate
from train.inference.saved_run import open_saved_run
from train.logs.metrics import read_log

CPU = torch.device("cpu")


def test_it_says_what_the_run_said(trained: Path, shard_root: Path, tmp_path: Path) -> None:
    assert main(["eval", str(trained / "last.pt"), "--shards", str(shard_root), "--device", "cpu", "--threads", "1",
                 "--json", str(tmp_path / "e.json")]) == 0  # fmt: skip
    told = json.loads((tmp_path / "e.json").read_text())
    epoch = [record for record in read_log(trained / "run.jsonl") if record["kind"] == "epoch"][-1]
    rows = {row["weights"]: row for row in told["rows"]}
    assert told["flip"]  # the recipe's
    assert [row["res"] for row in told["rows"]] == [48, 48]
    assert {row["samples"] for row in told["rows"]} == {15}
    assert (rows["raw"]["top1"], rows["raw"]["top5"]) == (epoch["top1"], epoch["top5"])
    assert (rows["ema"]["top1"], rows["ema"]["top5"]) == (epoch["ema_top1"], epoch["ema_top5"])


def test_every_resolution_and_split_is_counted_as_by_hand(trained: Path, shard_set: ShardSet) -> None:
    saved = open_saved_run(trained)
    rows = evaluate(saved, shard_set, [32, 40, 64], device=CPU, threads=1, split="train")
    assert [(row["res"], row["weights"]) for row in rows] == [(r, w) for r in (32, 40, 64) for w in ("raw", "ema")]
    assert {row["samples"] for row in rows} == {75}
    assert any(row["top1"] < 1 for row in rows)
    for res, stored in ((32, 32), (40, 48), (64, 64)):
        network = saved.network("ema", CPU)
        val = shard_set.splits["val"]
        stage = Stage(res=stored, epochs=1, batch_size=75, eval_res=res)
        right = 0
        # the training images as validation sees them: the splits swapped
        swapped = dataclasses.replace(shard_set, splits={"train": val, "val": shard_set.splits["train"]})
        with Loader(Plan(swapped, [stage], eval_batch_size=8), threads=1) as loader:
            for batch in loader:
                if batch.spec.split == "val":
                    assert batch.spec.res == res
                    with torch.no_grad():
                        right += int((network(batch.images).argmax(1) == batch.labels).sum())
        (row,) = (row for row in rows if (row["res"], row["weights"]) == (res, "ema"))
        assert row["top1"] == right / 75


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--res", "96"], "nothing to validate at 96 px with, got 32,48,64 px"),
        (["--res", "48px"], "--res: got 48px, expected px separated by commas"),
        (["--split", "test"], "got split test, expected one of train, val"),
        (["--shards", "nowhere"], "expected a finished shard set"),
        (["--device", "cuda:99"], "expected that one"),
    ],
)
def test_bad_input_is_one_clear_line(
    trained: Path, shard_root: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["eval", str(trained), "--shards", str(shard_root), "--device", "cpu", *words]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
