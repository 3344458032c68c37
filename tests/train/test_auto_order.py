"""A run with order `auto` keeps its initial order when it is resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from resolute.cli import main
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.storage.local import Folder
from resolute.train import trainer as runs
from tests.train.conftest import without_clocks

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
    shards: ShardSet, folder: Path, monkeypatch: pytest.MonkeyPatch, *, remote: bool, stop_after: int = 0
) -> int:
    """The exit status of a run stopped after `stop_after` batches; `remote`: its shards count as remote."""
    folder.mkdir(exist_ok=True)
    (folder.parent / "auto.toml").write_text(RECIPE)
    after, count = runs._Session._after, 0

    def stopping(session: runs._Session, spec: runs.BatchSpec) -> bool:
        nonlocal count
        count += 1
        if count == stop_after:
            session.stopped_by = 15
        return after(session, spec)

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "remote", remote)
        patch.setattr(runs._Session, "_after", stopping)
        words = ["train", "--shards", shards.root, "--recipe", str(folder.parent / "auto.toml"),
                 "--run", "auto", "--runs", str(folder)]  # fmt: skip
        return main([*words, "--device", "cpu", "--threads", "1"])


@pytest.mark.slow
def test_a_run_resumed_with_local_shards_keeps_the_order_of_its_remote_start(
    shard_set: ShardSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(shard_set, tmp_path / "whole", monkeypatch, remote=True) == 0
    assert train(shard_set, tmp_path / "cut", monkeypatch, remote=True, stop_after=3) == 128 + 15
    assert torch.load(tmp_path / "cut" / "auto" / "last.pt", weights_only=True)["order"] == "block"
    assert train(shard_set, tmp_path / "cut", monkeypatch, remote=False) == 0
    whole, cut = (torch.load(tmp_path / name / "auto" / "last.pt", weights_only=True) for name in ("whole", "cut"))
    assert all(torch.equal(cut["model"][name], tensor) for name, tensor in whole["model"].items())
    logs = [without_clocks(tmp_path / name / "auto" / "run.jsonl") for name in ("whole", "cut")]
    assert logs[0] == logs[1]
    assert logs[0][0]["order"] == "block"
