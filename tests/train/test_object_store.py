"""A run from shards on an object store equals the run from the same shards in a folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import fsspec
import pytest

from resolute.cli import main
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.train.logs.metrics import read_log
from tests.support.damage import damage_sample
from tests.support.s3 import running_s3
from tests.train.conftest import stages, train_words

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
