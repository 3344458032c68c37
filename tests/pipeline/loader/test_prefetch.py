"""A set behind a URL gives the batches of the local one, and what will be read soon is there before it is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import fsspec
import pytest

from pipeline.dataset.shard_set import ShardSet
from pipeline.loader.prefetch import Prefetcher
from pipeline.loader.reader import Reader
from pipeline.plan.plan import Plan
from pipeline.plan.stage import Stage
from pipeline.storage.base import open_files
from pipeline.storage.disk_cache import HEADER, CacheSettings
from pipeline.storage.remote import Remote
from tests.support.s3 import Front, front, running_s3  # noqa: F401

STEP = 4096


@pytest.fixture(scope="module")
def s3_server() -> Iterator[str]:
    """One for all tests here: each puts the whole set there anew."""
    with running_s3() as url:
        yield url


@pytest.fixture
def url(s3_server: str, shard_root: Path) -> str:
    fs = fsspec.filesystem("s3")
    fs.put(f"{shard_root}/", f"{s3_server}/set/", recursive=True)
    return f"{s3_server}/set"


def opened(url: str, folder: Path, **words: int) -> tuple[ShardSet, Remote]:
    settings = CacheSettings(folder=folder, chunk_bytes=STEP, first_wait_s=0.01, **({"limit_bytes": 64 << 20} | words))
    files = open_files(url, cache=settings)
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


def test_batches_from_a_store_in_trouble_are_those_of_the_folder(
    url: str, front: Front, shard_root: Path, tmp_path: Path  # noqa: F811
) -> None:
    local = ShardSet.open(shard_root)
    shards, files = opened(url, tmp_path)
    assert shards.hash == local.hash
    assert {name: len(split) for name, split in shards.splits.items()} == {"train": 75, "val": 15}
    here, there = planned(local), planned(shards)
    assert here.total_batches == there.total_batches
    front.each = [503]
    front.faults.extend(["cut", "drop"])  # so three at most of one range, of four tries
    with closing(Reader(local, padded=False)) as one, closing(Reader(shards, padded=False)) as other:
        for index in range(here.total_batches):
            assert batch_bytes(one, here, index) == batch_bytes(other, there, index)
    assert files.counts()["retries"] >= 12
    shards.close()


def test_a_chunk_with_a_sound_checksum_but_other_bytes_is_fetched_again(url: str, tmp_path: Path) -> None:
    shards, files = opened(url, tmp_path)
    with closing(Reader(shards, padded=False)) as reader:
        good = batch_bytes(reader, planned(shards), 0)
    before = files.counts()["requests"]
    for path in (tmp_path / "v1" / "chunks").rglob("*"):
        if path.is_file():  # as if the store had sent this: whole, and not what the set's index lists
            key = path.name
            data = bytes(path.stat().st_size - HEADER.size)
            path.unlink()
            files._cache.read(key, 0, 0, len(data), lambda data=data: data)
    with closing(Reader(shards, padded=False)) as reader:
        assert batch_bytes(reader, planned(shards), 0) == good
    assert files.counts()["requests"] > before
    shards.close()


def test_what_was_hinted_at_is_there_when_it_is_read(url: str, front: Front, tmp_path: Path) -> None:  # noqa: F811
    shards, files = opened(url, tmp_path)
    plan = planned(shards)
    ahead = Prefetcher(plan, samples=20)
    with closing(Reader(shards)) as reader:
        for index in range(plan.total_batches):
            ahead.advance(index)
            waited(files)
            if index:
                before = files.counts()["requests"]
                batch_bytes(reader, plan, index)
                assert files.counts()["requests"] == before
            if index == 5:  # never further than it was told: 20 samples, two batches
                assert ahead._next <= 8
    assert set(front.asked.values()) == {1}
    shards.close()


def test_hints_that_are_refused_come_again_and_a_jump_starts_anew(url: str, tmp_path: Path) -> None:
    shards, files = opened(url, tmp_path, ahead_bytes=3 * STEP, requests=2)
    plan = planned(shards)
    ahead = Prefetcher(plan, samples=50)
    ahead.advance(0)
    assert 0 < files.pending_bytes() <= 3 * STEP
    for _ in range(200):
        ahead.advance(0)
        waited(files)
        if ahead._next == 6 and not ahead._pending:
            break
    with closing(Reader(shards)) as reader:
        before = files.counts()["requests"]
        for index in range(1, 6):
            batch_bytes(reader, plan, index)
        assert files.counts()["requests"] == before
    ahead.advance(plan.total_batches - 3)  # a run that goes on somewhere else
    assert ahead._next > plan.total_batches - 3
    ahead.advance(plan.total_batches - 1)
    ahead.advance(0)
    assert ahead._next <= 6
    shards.close()


def test_a_folder_needs_no_hints(shard_set: ShardSet, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> bool:
        raise AssertionError

    monkeypatch.setattr(shard_set.files, "prefetch", refuse)
    Prefetcher(planned(shard_set)).advance(0)
