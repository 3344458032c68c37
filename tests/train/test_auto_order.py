"""A run whose order is `auto` measures once, and goes on in the order it began with whatever it would measure now."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipeline.dataset.shard_set import ShardSet
from pipeline.loader.probe import Probe
from pipeline.plan.order import Order
from tests.train.conftest import without_clocks
from train import setup
from train import trainer as runs
from train.__main__ import main

RECIPE = """
seed = 5
data = { order = "auto" }
model = { name = "test_resnet" }
precision = { amp = "off" }
eval = { batch_size = 8 }
[[stages]]
res = 32
epochs = 2
batch_size = 16
"""


def train(
    shards: ShardSet, folder: Path, measured: Order, monkeypatch: pytest.MonkeyPatch, *, stop_after: int = 0
) -> int:
    """The exit status of a run that measures `measured`, and is told to stop after so many batches."""
    folder.mkdir(exist_ok=True)
    (folder.parent / "auto.toml").write_text(RECIPE)
    asked: list[Order] = []

    def choose(_: ShardSet, res: int) -> Probe:
        assert res == 32
        asked.append(measured)
        return Probe(order=measured)

    after, count = runs._Session._after, 0

    def stopping(session: runs._Session, spec: runs.BatchSpec) -> bool:
        nonlocal count
        count += 1
        if count == stop_after:
            session.stopped_by = 15
        return after(session, spec)

    with monkeypatch.context() as patch:
        patch.setattr(setup, "choose_order", choose)
        patch.setattr(runs._Session, "_after", stopping)
        words = ["--shards", shards.root, "--recipe", str(folder.parent / "auto.toml"), "--runs", str(folder)]
        status = main([*words, "--device", "cpu", "--threads", "1"])
    (folder / "asked").write_text(str(len(asked)))
    return status


@pytest.mark.slow
def test_a_cut_run_goes_on_in_the_order_it_began_with(
    shard_set: ShardSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(shard_set, tmp_path / "whole", "block", monkeypatch) == 0
    assert train(shard_set, tmp_path / "cut", "block", monkeypatch, stop_after=3) == 128 + 15
    assert torch.load(tmp_path / "cut" / "auto" / "last.pt", weights_only=True)["order"] == "block"
    assert train(shard_set, tmp_path / "cut", "full", monkeypatch) == 0
    assert (tmp_path / "cut" / "asked").read_text() == "0"
    assert (tmp_path / "whole" / "asked").read_text() == "1"
    whole, cut = (torch.load(tmp_path / name / "auto" / "last.pt", weights_only=True) for name in ("whole", "cut"))
    assert all(torch.equal(cut["model"][name], tensor) for name, tensor in whole["model"].items())
    logs = [without_clocks(tmp_path / name / "auto" / "run.jsonl") for name in ("whole", "cut")]
    assert logs[0] == logs[1]
    assert logs[0][0]["order"] == "block"
    assert train(shard_set, tmp_path / "other", "full", monkeypatch) == 0
    other = torch.load(tmp_path / "other" / "auto" / "last.pt", weights_only=True)
    assert not all(torch.equal(other["model"][name], tensor) for name, tensor in whole["model"].items())
