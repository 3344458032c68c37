"""A run from shards on an object store equals the run from the same shards in a folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import fsspec
import pytest

from resolute.cli import main
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.storage.local import Folder
from resolute.train import checkpoint
from resolute.train.logs.metrics import read_log
from tests.support.damage import damage_sample
from tests.support.s3 import running_s3
from tests.train.conftest import assert_equal_runs, stages, stop_at, train_words

pytestmark = pytest.mark.slow
RECIPE = f"""
model = {{ name = "test_resnet" }}
data = {{ on_bad_sample = "skip" }}
augment = {{ policy = "randaugment" }}
{stages((32, 1, 16), (48, 1, 16))}order = "block"
"""


def test_a_run_from_an_object_store_is_bit_identical_to_a_local_one(
    shard_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a damaged sample that is reported and replaced in both."""
    root = Path(shutil.copytree(shard_root, tmp_path / "set"))
    damage_sample(ShardSet.open(root), 0)
    monkeypatch.setenv("RESOLUTE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tiny.toml").write_text(RECIPE)
    with running_s3() as url:
        fsspec.filesystem("s3").put(f"{root}/", f"{url}/set/", recursive=True)
        for name, shards in (("here", str(root)), ("there", f"{url}/set")):
            assert main(train_words(shards, tmp_path / "tiny.toml", tmp_path / name)) == 0
    here, there = (read_log(tmp_path / name / "tiny" / "run.jsonl") for name in ("here", "there"))
    for kind in ("step", "epoch"):
        losses = [r["loss"] for r in here if r["kind"] == kind]
        assert losses == [r["loss"] for r in there if r["kind"] == kind]
        assert losses
    for log in (here, there):
        (skipped,) = (r for r in log if r["kind"] == "skipped")
        assert "is damaged, got CRC-32" in skipped["reason"]
    assert any((tmp_path / "cache").rglob("*"))


def test_a_run_with_order_auto_that_is_resumed_with_local_shards_keeps_the_order_of_its_remote_start(
    shard_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "auto.toml"
    recipe.write_text(f"""
data = {{ order = "auto" }}
model = {{ name = "test_resnet" }}
precision = {{ amp = "off" }}
{stages((32, 2, 16))}""")
    whole, cut = (train_words(shard_root, recipe, tmp_path / name) for name in ("whole", "cut"))
    with monkeypatch.context() as patch:
        patch.setattr(Folder, "remote", True)
        assert main(whole) == 0
        stop_at(patch, 2)
        assert main(cut) == 128 + 15
    assert checkpoint.peek(tmp_path / "cut" / "auto" / "last.pt", "order") == "block"
    assert main(cut) == 0
    assert_equal_runs(tmp_path / "cut" / "auto", tmp_path / "whole" / "auto")
