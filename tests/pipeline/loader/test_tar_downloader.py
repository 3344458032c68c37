"""Prefetching from a remote set: the same batches as from a folder, with files cached before they are read."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import fsspec
import pytest

from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.loader.loader import Loader
from resolute.pipeline.loader.reader import Reader
from resolute.pipeline.loader.tar_downloader import TarDownloader
from resolute.pipeline.plan.plan import Plan
from resolute.pipeline.plan.stage import Stage
from resolute.pipeline.storage.cache import CacheSettings
from resolute.pipeline.storage.open_files import open_files
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
    stages = [Stage(res=32, epochs=2, batch_size=10), Stage(res=64, epochs=1, batch_size=6, order="shuffled")]
    return Plan(shards, stages, order="windowed", eval_batch_size=8)


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
    ahead = TarDownloader(plan, files, samples=20)
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


@pytest.mark.timing
def test_closing_a_loader_ends_no_download_that_another_has_asked_for(
    url: str,
    proxy: FaultyProxy,  # noqa: F811
    tmp_path: Path,
    shard_set: ShardSet,
) -> None:
    """Two loaders read ahead at one set: each tar is downloaded once, and the batches of the other are right."""
    shards, files = opened(url, tmp_path)
    plan = planned(shards)
    first, second = Reader(shards), Reader(shards)
    proxy.requests.clear()
    proxy.slow_bytes_per_s = 400 << 10
    names = [f"{res}/{shard}.tar" for res in (32, 48, 64) for shard in shards.splits["train"].shards]
    assert all(reader.files.prefetch(name) for reader in (first, second) for name in names)
    while not proxy.requests:
        time.sleep(0.002)
    first.close()
    assert files.pending_bytes()
    waited(files)
    assert {path.rpartition("/set/")[2]: count for path, count in proxy.requests.items()} == dict.fromkeys(names, 1)
    assert batch_bytes(second, plan, 0)
    second.close()
    with Loader(plan) as loader, Loader(planned(shard_set)) as local:
        for _ in range(4):
            assert next(loader).images.equal(next(local).images)
    shards.close()


@pytest.mark.timing
def test_the_last_reader_that_closes_ends_its_downloads(url: str, proxy: FaultyProxy, tmp_path: Path) -> None:  # noqa: F811
    shards, files = opened(url, tmp_path)
    first, second = Reader(shards), Reader(shards)
    proxy.always = "hang"
    assert all(reader.files.prefetch("32/train-000000.tar") for reader in (first, second))
    first.close()
    assert files.pending_bytes()
    began = time.monotonic()
    second.close()
    waited(files)
    assert time.monotonic() - began < 5
    shards.close()


def test_a_tar_that_is_cut_short_in_the_store_is_asked_for_once(
    url: str,
    proxy: FaultyProxy,  # noqa: F811
    tmp_path: Path,
    shard_root: Path,
) -> None:
    """By two loaders of two processes, for all of its samples."""
    fs, name = fsspec.filesystem("s3"), "32/train-000001.tar"
    whole = (shard_root / name).read_bytes()
    fs.pipe(f"{url}/{name}", whole[: len(whole) // 3])
    sets = [opened(url, tmp_path) for _ in range(2)]
    proxy.requests.clear()
    for shards, _ in sets:
        plan = Plan(shards, [Stage(res=32, epochs=2, batch_size=15)], eval_batch_size=None)
        with Loader(plan, on_bad_sample="skip") as loader:
            assert len(list(loader)) == plan.total_batches
            assert len(loader.skipped) > 20
    assert {path.rpartition("/set/")[2]: count for path, count in proxy.requests.items()}[name] == 1
    fs.pipe(f"{url}/{name}", whole)  # as good again: a set that is opened later asks anew
    shards, _ = opened(url, tmp_path)
    with Loader(planned(shards), on_bad_sample="skip") as loader:
        list(loader)
        assert not loader.skipped
    for each in (shards, *(shards for shards, _ in sets)):
        each.close()
