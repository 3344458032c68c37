"""Whatever a store does on the way, the bytes that come are those that lie there, or a clear error does."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from pipeline.dataset.shard_set import ShardSet
from pipeline.errors import FileEndsEarly, Interrupted, Missing, ResoluteError, StorageError
from pipeline.loader.reader import Reader
from pipeline.storage.base import Files, open_files
from pipeline.storage.disk_cache import CacheSettings
from pipeline.storage.remote import Remote
from tests import ROOT
from tests.support.s3 import BUCKET, Front, front, running_s3  # noqa: F401

STEP = 1 << 14
TAR = random.Random(7).randbytes(20 * STEP + 777)
INDEX = random.Random(8).randbytes(3 * STEP + 5)


def manifest(files: dict[str, bytes]) -> bytes:
    listed = {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()}
    return json.dumps({"files": listed}).encode()


SET = {"32/a.tar": TAR, "index/a.npy": INDEX}
SET["manifest.json"] = manifest(SET)


def settings(folder: Path, **words: Any) -> CacheSettings:
    fast: dict[str, Any] = {"tries": 4, "first_wait_s": 0.01, "stall_s": 0.4, "requests": 4}
    return CacheSettings(folder=folder, **{"limit_bytes": 4 << 20, "chunk_bytes": STEP} | fast | words)


@pytest.fixture(scope="module")
def s3_server() -> Iterator[str]:
    """One for all tests here: each puts the whole set there anew."""
    with running_s3() as url:
        yield url


@pytest.fixture
def url(s3_server: str) -> str:
    fs = fsspec.filesystem("s3")
    for name, data in SET.items():
        fs.pipe(f"{s3_server}/set/{name}", data, ACL="public-read")  # for plain HTTP
    return f"{s3_server}/set"


@pytest.fixture(params=["s3", "http"])
def either(request: pytest.FixtureRequest, url: str, front: Front) -> str:  # noqa: F811
    """The set's URL through the front, in both protocols."""
    return url if request.param == "s3" else f"http://{front.address}/{BUCKET}/set"


def opened(url: str, folder: Path, **words: Any) -> Remote:
    files = open_files(url, cache=settings(folder, **words))
    assert isinstance(files, Remote)
    return files


def read_everywhere(files: Files, times: int = 60) -> None:
    """Reads of all lengths at all places, in eight threads: each one what lies there."""
    rng = random.Random(times)
    spans = [(0, len(TAR)), (len(TAR) - 1, 1), (STEP, STEP), (5, 0)]
    for _ in range(times):
        offset = rng.randrange(len(TAR))
        spans.append((offset, rng.randrange(min(3 * STEP, len(TAR) - offset) + 1)))
    with ThreadPoolExecutor(8) as pool:
        got = pool.map(lambda span: files.read("32/a.tar", *span), spans)
        for (offset, nbytes), data in zip(spans, got, strict=True):
            assert data == TAR[offset : offset + nbytes]


def test_every_byte_of_a_remote_set_is_that_of_the_local_one(tmp_path: Path, either: str) -> None:
    with opened(either, tmp_path) as files:
        assert files.remote
        for name in ("manifest.json", "index/a.npy"):
            assert files.local(name).read_bytes() == SET[name]
            assert files.size(name) == len(SET[name])
        read_everywhere(files)
        before = files.counts()
        read_everywhere(files)
        assert files.counts() == before  # all of it from the cache
        assert before["fetched_bytes"] == sum(map(len, SET.values()))
        assert files.size("gone") is None
        with pytest.raises(FileNotFoundError):
            files.local("gone")
        with pytest.raises(Missing, match="gone: not found"):
            files.read("gone", 0, 1)
        with pytest.raises(FileEndsEarly, match="ends too early"):
            files.read("32/a.tar", len(TAR) - 7, 8)
        copy = pickle.loads(pickle.dumps(files))
    with copy:  # another process's files: the cache outlives the first
        assert copy.local("index/a.npy").read_bytes() == INDEX
        read_everywhere(copy)


def test_a_store_in_trouble_is_asked_again_until_the_bytes_are_there(tmp_path: Path, either: str, front: Front) -> None:  # noqa: F811
    state = random.getstate()
    with opened(either, tmp_path, tries=8, requests=8) as files:
        files.local("manifest.json")
        front.each = [500, 503, 429, "cut", "short", "drop", "hang"]
        read_everywhere(files, 10)
        counts = files.counts()
        assert counts["fetched_bytes"] == len(TAR) + len(SET["manifest.json"])
        # why 6: aiohttp asks once more by itself where a connection that was used before breaks
        assert 6 * 21 <= counts["retries"] <= 7 * 21  # chunks
    assert random.getstate() == state  # waits are drawn elsewhere


def placed(files: Files, offset: int, nbytes: int) -> bytes | None:
    found = files.locate("32/a.tar", offset, nbytes)
    return None if found is None else os.pread(found[0].fd, nbytes, found[1])


def test_a_place_holds_what_a_read_gives(tmp_path: Path, either: str, front: Front) -> None:  # noqa: F811
    with opened(either, tmp_path) as files:
        for offset, nbytes in ((0, 1), (5, 7), (STEP - 9, 9), (STEP, STEP), (len(TAR) - 3, 3)):
            assert placed(files, offset, nbytes) == TAR[offset : offset + nbytes]
        for offset, nbytes in ((STEP - 9, 10), (0, STEP + 1), (0, 0), (len(TAR) + STEP, 1)):
            assert placed(files, offset, nbytes) is None  # in no chunk alone: `read` tells what is wrong, if it is
        asked = sum(front.asked.values())
        assert placed(files, 3, 4) == TAR[3:7]
        assert sum(front.asked.values()) == asked


def test_a_place_in_a_chunk_that_was_removed_is_let_go(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(url, tmp_path) as files:
        assert placed(files, 0, 9) == TAR[:9]
        (chunk,) = (path for path in (tmp_path / "v1" / "chunks").rglob("*") if path.is_file())
        chunk.unlink()
        assert placed(files, 0, 9) == TAR[:9]  # still open
        assert not chunk.exists()
        monkeypatch.setattr("pipeline.storage.remote.TOUCH_S", -1.0)  # a while later
        assert placed(files, 0, 9) == TAR[:9]
        assert chunk.exists()
        monkeypatch.setattr("pipeline.storage.remote.MAX_OPEN_FILES", 2)
        for index in range(9):
            assert placed(files, index * STEP, 1) == TAR[index * STEP :][:1]
            assert len(files._opened) <= 2


def test_a_slow_store_is_not_a_stalled_one(tmp_path: Path, url: str, front: Front) -> None:  # noqa: F811
    front.slow_bytes_per_s = 64 << 10  # a body takes 0.25 s, in pieces
    with opened(url, tmp_path, stall_s=3.0) as files:
        assert files.read("32/a.tar", 0, 3 * STEP) == TAR[: 3 * STEP]
        assert files.counts()["retries"] == 0


def test_a_store_that_drips_is_a_stalled_one(tmp_path: Path, either: str, front: Front) -> None:  # noqa: F811
    with opened(either, tmp_path, stall_s=0.3, tries=2) as files:
        files.local("manifest.json")
        front.slow_bytes_per_s = 4 << 10  # a body would take 4 s, never silent for long
        began = time.monotonic()
        with pytest.raises(StorageError, match="got 'no answer in time' at the last of 2 tries"):
            files.read("32/a.tar", 0, 1)
        assert time.monotonic() - began < 3


@pytest.mark.parametrize(("fault", "reason"), [
    (503, "HTTP status 503|HTTP 503|reduce your request|Service Unavailable|503"), ("cut", "."),
    ("hang", "no answer in time|[Tt]imeout"), ("drop", "."), ("short", "8192 of 16384 bytes"),
])  # fmt: skip
def test_tries_that_are_spent_are_told(tmp_path: Path, either: str, front: Front, fault: Any, reason: str) -> None:  # noqa: F811
    with opened(either, tmp_path, tries=3, stall_s=0.2) as files:
        files.local("manifest.json")
        front.always = fault
        words = rf"/set/32/a\.tar: cannot be read, got '.*({reason}).*' at the last of 3"
        with pytest.raises(StorageError, match=words):
            files.read("32/a.tar", 0, 1)
        # why 6: aiohttp asks once more by itself where a connection that was used before breaks
        assert 3 <= sum(front.asked.values()) <= (6 if fault == "drop" else 3)
        front.always = None
        assert files.read("32/a.tar", 0, 9) == TAR[:9]


@pytest.mark.parametrize("status", [401, 403, 404, 410])
def test_a_final_answer_is_not_asked_for_again(tmp_path: Path, either: str, front: Front, status: int) -> None:  # noqa: F811
    with opened(either, tmp_path) as files:
        files.local("manifest.json")
        front.always = status
        with pytest.raises(StorageError, match=r"/set/32/a\.tar: (access is refused|not found)"):
            files.read("32/a.tar", 0, 1)
        assert sum(front.asked.values()) == 1


def test_a_server_without_ranges_is_told(tmp_path: Path, either: str, front: Front) -> None:  # noqa: F811
    front.always = "whole"
    with opened(either, tmp_path) as files, pytest.raises(ResoluteError, match="ignores byte ranges"):
        files.read("32/a.tar", STEP, 1)


def test_what_is_wanted_is_fetched_beside_and_within_bounds(tmp_path: Path, url: str, front: Front) -> None:  # noqa: F811
    front.slow_bytes_per_s = 1 << 20
    with opened(url, tmp_path, requests=3, ahead_bytes=6 * STEP) as files:
        assert not files.prefetch("32/a.tar", 0, 20 * STEP)  # more than may be under way: the first six are taken
        assert not files.prefetch("32/a.tar", 0, 20 * STEP)
        assert files.prefetch("32/a.tar", 0, 6 * STEP)  # under way already
        deadline = time.monotonic() + 10
        while files.pending_bytes() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert files.counts()["fetched_bytes"] == 6 * STEP
        assert front.most_at_once == 3
        assert files.read("32/a.tar", 0, 6 * STEP) == TAR[: 6 * STEP]
        assert files.prefetch("32/a.tar", 0, 6 * STEP)  # there
        assert files.prefetch("gone", 0, 1)  # never will be
        assert files.pending_bytes() == 0
        assert set(front.asked.values()) == {1}


def test_close_ends_what_hangs(tmp_path: Path, either: str, front: Front) -> None:  # noqa: F811
    files = opened(either, tmp_path, stall_s=60.0)
    files.local("manifest.json")
    front.always = "hang"
    files.prefetch("32/a.tar", 0, 8 * STEP)
    told: list[str] = []

    def read() -> None:
        try:
            files.read("32/a.tar", 9 * STEP, 1)
        except ResoluteError as error:
            told.append(str(error))

    reader = threading.Thread(target=read)
    reader.start()
    while sum(front.asked.values()) < 5:
        time.sleep(0.01)
    began = time.monotonic()
    files.close()
    reader.join()
    assert time.monotonic() - began < 5
    assert "interrupted" in told[0]
    assert not list(tmp_path.rglob("*.part"))


def test_an_interruption_ends_what_hangs_and_later_reads_work(tmp_path: Path, either: str, front: Front) -> None:  # noqa: F811
    with opened(either, tmp_path, stall_s=60.0, requests=3) as files:
        files.local("manifest.json")
        front.always = "hang"
        files.prefetch("32/a.tar", 0, 8 * STEP)  # three requests, and five that wait for them
        told: list[Exception] = []

        def read() -> None:
            try:
                files.read("32/a.tar", 9 * STEP, 1)
            except StorageError as error:
                told.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        while sum(front.asked.values()) < 4:
            time.sleep(0.01)
        began = time.monotonic()
        files.interrupt()
        reader.join()
        while files.pending_bytes():
            time.sleep(0.01)
        assert time.monotonic() - began < 5
        assert isinstance(told[0], Interrupted)
        front.always = None
        assert files.read("32/a.tar", 9 * STEP, 9) == TAR[9 * STEP :][:9]


def test_closing_a_reader_of_a_hung_store_takes_no_two_seconds(tmp_path: Path, shard_root: Path, s3_server: str,
                                                               front: Front) -> None:  # noqa: F811  # fmt: skip
    fs = fsspec.filesystem("s3")
    for path in shard_root.rglob("*"):
        if path.is_file() and path.suffix in (".tar", ".npy", ".json"):
            fs.pipe(f"{s3_server}/whole/{path.relative_to(shard_root)}", path.read_bytes())
    with opened(f"{s3_server}/whole", tmp_path, stall_s=60.0, requests=3) as files:
        shards = ShardSet.open(f"{s3_server}/whole", resolutions=(32,), files=files)
        reader = Reader(shards, threads=3)
        front.always = "hang"
        before = sum(front.asked.values())
        for name in ("32/train-000000.tar", "32/train-000001.tar"):
            files.prefetch(name, 0, 20 * STEP)
        for _ in range(5):
            reader.submit("train", 32, np.arange(75))
        while sum(front.asked.values()) < before + 3:
            time.sleep(0.01)
        began = time.monotonic()
        reader.close()
        assert time.monotonic() - began < 2
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("resolute-read")]
        front.always = None
        with closing(Reader(shards)) as again:
            assert not again.submit("train", 32, np.arange(75)).result().errors


def test_work_that_was_submitted_never_keeps_a_process_from_ending() -> None:
    code = """
import threading, time
from pathlib import Path
from pipeline.storage.base import open_files
from pipeline.storage.threads import DaemonPool
pool = DaemonPool(2, name="pool", files=open_files("."))
begun = threading.Event()
for _ in range(100):
    pool.submit(lambda: (begun.set(), time.sleep(600)))
begun.wait()
print("end", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                          timeout=60, check=True)  # fmt: skip
    assert done.stdout == "end\n"


@pytest.mark.parametrize("url", [
    "s3://me:secret@bucket/set", "http://host/set?sig=secret&x=1", "http://host/set?X-Amz-Signature=secret",
])  # fmt: skip
def test_no_message_holds_credentials(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(url, tmp_path, tries=1) as files:
        assert "secret" not in files.root + files.where("a")

        def fail(*args: Any, **words: Any) -> Any:
            raise ValueError(f"cannot ask {url}/a for its bytes")

        monkeypatch.setattr(files._store, "_call", fail)
        with pytest.raises(StorageError, match="cannot ask") as error:
            files.read("a", 0, 1)
        assert "secret" not in str(error.value)
    with pytest.raises(ResoluteError) as refused:
        open_files(url.replace("s3", "nosuch").replace("http", "nosuch"), cache=settings(tmp_path))
    assert "secret" not in str(refused.value)


def test_a_file_that_is_too_large_to_be_a_manifest_is_refused_before_it_is_read(
    tmp_path: Path, either: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.storage.object_store._MAX_WHOLE_BYTES", 100)
    with opened(either, tmp_path) as files:
        with pytest.raises(ResoluteError, match=r"manifest\.json: too large, got 231 bytes, expected at most 100"):
            files.local("manifest.json")
        assert files.counts()["fetched_bytes"] == 0
