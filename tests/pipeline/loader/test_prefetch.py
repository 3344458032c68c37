"""Prefetching from a remote set: the same batches as from a folder, with files cached before they are read."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import fsspec
import pytest

from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.loader.prefetch import Prefetcher
from resolute.pipeline.loader.reader import Reader
from resolute.pipeline.plan.plan import Plan
from resolute.pipeline.plan.stage import Stage
from resolute.pipeline.storage.base import open_files
from resolute.pipeline.storage.cache import CacheSettings
from resolute.pipeline.storage.remote import Remote
from tests.pipeline.storage.test_remote import s3_server  # noqa: F401
from tests.support.s3 import FaultyProxy, proxy  # noqa: F401


@pytest.fixture(scope="module")
def url(s3_server: str, shard_root: Path) -> str:  # noqa: F811
    fs = fsspec.filesystem("s3")
    fs.put(f"{shard_root}/", f"{s3_server}/set/", recursive=True)
    return f"{s3_server}/set"


def opened(url: str, folder: Path) -> tuple[ShardSet, Remote]:
    files = open_files(url, cache=CacheSettings(folder=folder, limit_bytes=64 << 20))
    assert isinstance(files, Remote)
    return ShardSet.open(url, files=files), files


def planned(shards: ShardSet) -> Plan:
    stages = [Stage(res=32, epochs=2, batch_size=10), Stage(res=64, epochs=1, batch_size=6, order="full")]
    return Plan(shards, stages, order="block", eval_batch_size=8)


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


def test_prefetched_files_are_cached_when_they_are_read_and_equal_those_of_the_folder(
    url: str,
    proxy: FaultyProxy,  # noqa: F811
    tmp_path: Path,
    shard_set: ShardSet,
) -> None:
    shards, files = opened(url, tmp_path)
    assert shards.hash == shard_set.hash
    plan, local_plan = planned(shards), planned(shard_set)
    ahead = Prefetcher(plan, samples=20)
    with closing(Reader(shards, padded=False)) as reader, closing(Reader(shard_set, padded=False)) as local:
        for index in range(plan.total_batches):
            ahead.advance(index)
            waited(files)
            before = files.counts()["requests"]
            assert batch_bytes(reader, plan, index) == batch_bytes(local, local_plan, index)
            assert index == 0 or files.counts()["requests"] == before
            if index == 5:  # never further ahead than 20 samples, two batches
                assert ahead._next <= 8
    assert set(proxy.requests.values()) == {1}
    shards.close()
