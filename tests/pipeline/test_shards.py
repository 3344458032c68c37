"""A shard set that is not whole is refused before training starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from pipeline.errors import ResoluteError
from pipeline.shards import ShardSet


@pytest.fixture
def copy(shard_root: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(shard_root, tmp_path / "copy"))


def test_open_gives_classes_splits_and_records(shard_set: ShardSet) -> None:
    assert shard_set.classes == ("class0", "class1", "class2")
    assert shard_set.resolutions == (32, 48, 64)
    train = shard_set.splits["train"]
    assert (len(train), len(shard_set.splits["val"]), len(train.shards)) == (75, 15, 3)
    for res in shard_set.resolutions:
        assert (np.minimum(train.stored[res]["width"], train.stored[res]["height"]) <= shard_set.short_side(res)).all()
    assert np.bincount(train.samples["label"]).tolist() == [25, 25, 25]


def test_a_folder_without_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ResoluteError, match=r"manifest\.json: not found.*make shards"):
        ShardSet.open(tmp_path)


def test_a_resolution_that_is_not_there_is_named(shard_root: Path) -> None:
    with pytest.raises(ResoluteError, match=r"no shards at 96 px, got 32,48,64.*RES=32,48,64,96"):
        ShardSet.open(shard_root, resolutions=(32, 96))


def test_another_format_version_is_refused(copy: Path) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps({**manifest, "version": 99}))
    with pytest.raises(ResoluteError, match="version 99, expected resolute-shards version 2"):
        ShardSet.open(copy)
    flipped = json.dumps({**manifest, "classes": manifest["classes"][::-1]}, indent=1) + "\n"
    (copy / "manifest.json").write_text(flipped)
    with pytest.raises(ResoluteError, match="damaged, got other bytes than its own hash says"):
        ShardSet.open(copy)
    (copy / "manifest.json").write_text("{")
    with pytest.raises(ResoluteError, match="unreadable"):
        ShardSet.open(copy)


def test_a_shard_cut_short_is_refused_by_name_and_size(copy: Path) -> None:
    tar = copy / "48" / "train-000001.tar"
    size = tar.stat().st_size
    with tar.open("r+b") as file:
        file.truncate(size - 512)
    with pytest.raises(ResoluteError, match=rf"train-000001\.tar: cut short.*got {size - 512} bytes, expected {size}"):
        ShardSet.open(copy)
    assert ShardSet.open(copy, resolutions=(32,)).splits["train"].stored.keys() == {32}
    tar.unlink()
    with pytest.raises(ResoluteError, match=r"train-000001\.tar: No such file"):
        ShardSet.open(copy)


def test_a_changed_index_is_refused(copy: Path) -> None:
    index = copy / "index" / "train-32.npy"
    data = bytearray(index.read_bytes())
    data[-5] ^= 1
    index.write_bytes(data)
    with pytest.raises(ResoluteError, match=r"train-32\.npy: changed since prep, got SHA-256"):
        ShardSet.open(copy)
