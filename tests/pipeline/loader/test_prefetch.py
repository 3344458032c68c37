"""Prefetching from a remote set: the same batches as from a folder, with files cached before they are read."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import fsspec
import numpy as np
import pytest

from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.loader.prefetch import Prefetcher
from resolute.pipeline.loader.reader import Reader
from resolute.pipeline.plan.class_sampling import Sampling
from resolute.pipeline.plan.plan import Plan
from resolute.pipeline.plan.stage import Stage
from resolute.pipeline.storage.base import open_files
from resolute.pipeline.storage.cache import CacheSettings
from resolute.pipeline.storage.object_store import _BACKOFF
from resolute.pipeline.storage.remote import Remote
from tests.support.s3 import FaultyProxy, proxy, running_s3  # noqa: F401


@pytest.fixture(scope="module")
def s3_server() -> Iterator[str]:
    """One server for all tests of this module, each of which uploads the whole set."""
    with running_s3() as url:
        yield url


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_BACKOFF, "init_backoff", timedelta(seconds=0.01))


@pytest.fixture(scope="module")
def url(s3_server: str, shard_root: Path) -> str:
    fs = fsspec.filesystem("s3")
    fs.put(f"{shard_root}/", f"{s3_server}/set/", recursive=True)
    return f"{s3_server}/set"


def opened(url: str, folder: Path, **words: int) -> tuple[ShardSet, Remote]:
    settings = CacheSettings(folder=folder, **({"limit_bytes": 64 << 20} | words))
    files = open_files(url, cache=settings)
    assert isinstance(files, Remote)
    return ShardSet.open(url, files=files), files


def planned(shards: ShardSet, sampling: Sampling = "uniform") -> Plan:
    stages = [Stage(res=32, epochs=2, batch_size=10), Stage(res=64, epochs=1, batch_size=6, order="full")]
    return Plan(shards, stages, order="block", sampling=sampling, eval_batch_size=8)


def batch_bytes(reader: Reader, plan: Plan, index: int) -> list[bytes]:
    spec = plan.batch(index)
    read = reader.submit(spec.split, spec.stored_res, spec.ids).result()
    assert not read.errors
    return [bytes(piece) for piece in read.images]


def waited(files: Remote) -> None:
    deadline = time.monotonic() + 20
    while files.pending_bytes() and time.monotonic() < deadline:
        time.sleep(0.002)
    assert not files.pending_bytes()


@pytest.mark.slow
def test_batches_from_a_failing_store_equal_those_of_the_folder(
    url: str, proxy: FaultyProxy, shard_root: Path, tmp_path: Path  # noqa: F811
) -> None:
    local = ShardSet.open(shard_root)
    shards, _ = opened(url, tmp_path)
    assert shards.hash == local.hash
    assert {name: len(split) for name, split in shards.splits.items()} == {"train": 75, "val": 15}
    here, there = planned(local), planned(shards)
    assert here.total_batches == there.total_batches
    proxy.each = [503, "cut", "short", "drop"]
    proxy.requests.clear()
    with closing(Reader(local, padded=False)) as local_reader, closing(Reader(shards, padded=False)) as remote_reader:
        for index in range(here.total_batches):
            assert batch_bytes(local_reader, here, index) == batch_bytes(remote_reader, there, index)
    assert len(proxy.requests) >= 6
    assert all(n >= 5 for n in proxy.requests.values())
    shards.close()


def test_a_cached_file_with_wrong_content_is_downloaded_again(url: str, tmp_path: Path) -> None:
    shards, files = opened(url, tmp_path)
    with closing(Reader(shards, padded=False)) as reader:
        good = batch_bytes(reader, planned(shards), 0)
    before = files.counts()["requests"]
    for path in tmp_path.rglob("*.tar"):
        path.write_bytes(bytes(path.stat().st_size))
    with closing(Reader(shards, padded=False)) as reader:
        assert batch_bytes(reader, planned(shards), 0) == good
    assert files.counts()["requests"] > before
    shards.close()


def test_prefetched_files_are_cached_when_they_are_read(url: str, proxy: FaultyProxy, tmp_path: Path) -> None:  # noqa: F811
    """Also of a class with few samples, which are repeated while those of others are left out."""
    shards, files = opened(url, tmp_path)
    train = shards.splits["train"]
    kept = (train.samples["label"] != 0) | (np.arange(len(train)) % 4 == 0)
    shards = dataclasses.replace(shards, splits={**shards.splits, "train": train.subset("train", kept)})
    plan = planned(shards, "balanced")
    ahead = Prefetcher(plan, samples=20)
    with closing(Reader(shards)) as reader:
        for index in range(plan.total_batches):
            ahead.advance(index)
            waited(files)
            if index:
                before = files.counts()["requests"]
                batch_bytes(reader, plan, index)
                assert files.counts()["requests"] == before
            if index == 5:  # never further ahead than 20 samples, two batches
                assert ahead._next <= 8
    assert set(proxy.requests.values()) == {1}
    shards.close()
