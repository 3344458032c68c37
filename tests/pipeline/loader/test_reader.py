"""The reader: exact bytes of the tars, damage reported per sample, and unavailable storage, which is no damage."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from resolute.errors import DamagedSample, StorageError
from resolute.pipeline.dataset.manifest import manifest_bytes
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.graph.kernels.pread import fetch
from resolute.pipeline.loader.reader import EncodedBatch, Reader
from tests.support.damage import damage_sample
from tests.support.reference import stored_jpeg


def assert_members(shards: ShardSet, res: int, ids: np.ndarray, read: EncodedBatch) -> None:
    assert len(read.images) == len(ids)
    for place, i in enumerate(ids.tolist()):
        if place not in read.errors:
            expected = stored_jpeg(shards, "train", res, i)
            assert read.images[place][: len(expected)].tobytes() == expected


@pytest.mark.parametrize(("threads", "padded"), [(1, True), (20, False)])
def test_samples_equal_the_members_of_the_tars(shard_set: ShardSet, threads: int, padded: bool) -> None:
    ids = np.random.default_rng(0).permutation(75)
    with closing(Reader(shard_set, threads=threads, padded=padded)) as reader:
        results = {res: reader.submit("train", res, ids) for res in (32, 64)}
        for res, pending in results.items():
            assert_members(shard_set, res, ids, pending.result())
            assert pending.done()


def test_a_damaged_sample_is_reported_and_the_rest_of_its_batch_is_read(shard_root: Path, tmp_path: Path) -> None:
    """One with other bytes and one that is cut off, the last of its tar."""
    shards = ShardSet.open(shutil.copytree(shard_root, tmp_path / "copy"))
    part = shards.splits["train"]
    last, end = len(part) - 1, part.stored[32][-1]
    damage_sample(shards, 10)
    tar = shards.path(32, part.shards[2])
    tar.write_bytes(tar.read_bytes()[: int(end["offset"]) + 7])
    ids = np.array([0, 10, last, 20])
    with closing(Reader(shards)) as reader:
        read = reader.submit("train", 32, ids).result()
    assert_members(shards, 32, ids, read)
    assert sorted(read.errors) == [1, 2]
    for place, what in ((1, "got CRC-32"), (2, "got 7 bytes, expected")):
        assert isinstance(read.errors[place], DamagedSample)
        key, offset = part.samples[ids[place]]["key"], part.stored[32][ids[place]]["offset"]
        for word in (what, f"{int(key):09d}", f"offset {offset}", ".tar", "resolute verify"):
            assert word in str(read.errors[place])
    with closing(Reader(shards, check_crc=False)) as reader:
        assert not reader.submit("train", 32, np.array([10])).result().errors


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("a tar is gone", r"train-000001\.tar: not found, expected a file of the set; put it back"),
        ("being rebuilt", "the shard set is gone, expected it as it was opened; put it back or mount its volume"),
        ("another set", r"the shard set was replaced while it was read: classes got .*put the old one back"),
    ],
)
def test_a_missing_or_replaced_set_is_unavailable_and_not_damaged(
    shard_root: Path, tmp_path: Path, change: str, words: str
) -> None:
    root = tmp_path / "copy"
    shards = ShardSet.open(shutil.copytree(shard_root, root))
    gone = next(i for i in range(75) if shards.splits["train"].stored[32][i]["shard"] == 1)
    with closing(Reader(shards)) as reader:
        reader.submit("train", 32, np.arange(gone)).result()
        if change == "a tar is gone":
            shards.path(32, "train-000001").unlink()
        elif change == "another set":
            manifest = json.loads((root / "manifest.json").read_text())
            (root / "manifest.json").write_bytes(manifest_bytes({**manifest, "classes": ["x", "y", "z"]}))
            damage_sample(shards, gone)
        else:
            (root / "manifest.json").unlink()
            shards.path(32, "train-000001").write_bytes(b"")
        with pytest.raises(StorageError, match=words) as error:
            reader.submit("train", 32, np.array([gone])).result()
        assert "damaged" not in str(error.value)


class Failing:
    """Makes reads of tars fail with errno `number`: all compiled reads, and the first `times` Python reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int, times: int) -> None:
        self.left, self.lock, self._number, self._pread = times, threading.Lock(), number, os.pread
        monkeypatch.setattr("resolute.pipeline.loader.reader.fetch", self.fetch)
        monkeypatch.setattr("resolute.pipeline.storage.read_at.os.pread", self.pread)
        monkeypatch.setattr("resolute.pipeline.storage.local._FIRST_WAIT_S", 0.001)
        monkeypatch.setattr("resolute.pipeline.storage.local._TRIES", 5)

    def fetch(self, files: Any, *rest: Any) -> Any:
        return fetch(np.full_like(files, -1), *rest)

    def pread(self, file: int, nbytes: int, offset: int) -> bytes:
        if Path(f"/proc/self/fd/{file}").resolve().suffix == ".tar":
            with self.lock:
                self.left -= 1
                if self.left >= 0:
                    raise OSError(self._number, os.strerror(self._number))
        return self._pread(file, nbytes, offset)


@pytest.mark.parametrize("number", [errno.EINTR, errno.ESTALE])
def test_a_transient_io_error_is_retried_and_a_persistent_one_is_unavailable_storage_and_no_damage(
    shard_set: ShardSet, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    ids, failing = np.arange(6), Failing(monkeypatch, number, 3)
    with closing(Reader(shard_set)) as reader:
        read = reader.submit("train", 32, ids).result()
        assert not read.errors
        assert_members(shard_set, 32, ids, read)
        failing.left = 10**9
        reason = os.strerror(number)
        with pytest.raises(StorageError, match=rf"\.tar: .* got '{reason}'.*then run the same command again") as error:
            reader.submit("train", 32, ids).result()
        assert not isinstance(error.value, DamagedSample)
        assert "\n" not in str(error.value)
        failing.left = 0
        assert not reader.submit("train", 32, ids).result().errors


def test_files_closed_by_the_open_file_limit_are_reopened(shard_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resolute.pipeline.storage.local.MAX_OPEN_FILES", 1)
    shard_set = ShardSet.open(shard_root)
    with closing(Reader(shard_set, threads=4)) as reader:
        ids = np.random.default_rng(1).permutation(75)
        pending = [reader.submit("train", res, ids) for res in (32, 48, 64)]
        for res, each in zip((32, 48, 64), pending, strict=True):
            assert_members(shard_set, res, ids, each.result())
