"""Remote files: whatever faults a store has, a read returns the stored bytes or a clear error."""

from __future__ import annotations

import hashlib
import json
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import fsspec
import pytest

from resolute.errors import FileEndsEarly, Interrupted, Missing, ResoluteError, StorageError
from resolute.pipeline.storage.base import Files
from resolute.pipeline.storage.cache import CacheSettings
from resolute.pipeline.storage.obstore_client import _BACKOFF
from resolute.pipeline.storage.open_files import open_files
from resolute.pipeline.storage.remote import Remote
from tests import ROOT
from tests.support.s3 import BUCKET, FaultyProxy, proxy, running_s3  # noqa: F401

STEP = 1 << 14
TAR = random.Random(7).randbytes(20 * STEP + 777)
INDEX = random.Random(8).randbytes(3 * STEP + 5)


def manifest(files: dict[str, bytes]) -> bytes:
    listed = {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()}
    return json.dumps({"files": listed}).encode()


MORE = {f"64/{number}.tar": random.Random(number).randbytes(STEP + number) for number in range(20)}
SET = {"32/a.tar": TAR, "index/a.npy": INDEX, "64/empty.tar": b"", **MORE}
SET["manifest.json"] = manifest(SET)


def settings(folder: Path, **words: Any) -> CacheSettings:
    fast: dict[str, Any] = {"tries": 4, "stall_s": 0.4, "requests": 4}
    return CacheSettings(folder=folder, **{"limit_bytes": 4 << 20} | fast | words)


@pytest.fixture(scope="module")
def s3_server() -> Iterator[str]:
    """One server for all tests of this module, each of which uploads the whole set."""
    with running_s3() as url:
        yield url


@pytest.fixture
def url(s3_server: str) -> str:
    fs = fsspec.filesystem("s3")
    for name, data in SET.items():
        fs.pipe(f"{s3_server}/set/{name}", data, ACL="public-read")  # for plain HTTP
    return f"{s3_server}/set"


@pytest.fixture(params=["s3", "http"])
def remote_url(request: pytest.FixtureRequest, url: str, proxy: FaultyProxy) -> str:  # noqa: F811
    """The set's URL through the proxy, in both protocols."""
    return url if request.param == "s3" else f"http://{proxy.address}/{BUCKET}/set"


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_BACKOFF, "init_backoff", timedelta(seconds=0.01))


def opened(url: str, folder: Path, **words: Any) -> Remote:
    files = open_files(url, cache=settings(folder, **words))
    assert isinstance(files, Remote)
    return files


def read_everywhere(files: Files, times: int = 60) -> None:
    """Read random ranges in eight threads and compare each with the original bytes."""
    rng = random.Random(times)
    spans = [(0, len(TAR)), (len(TAR) - 1, 1), (STEP, STEP), (5, 0)]
    for _ in range(times):
        offset = rng.randrange(len(TAR))
        spans.append((offset, rng.randrange(min(3 * STEP, len(TAR) - offset) + 1)))
    with ThreadPoolExecutor(8) as pool:
        got = pool.map(lambda span: files.read("32/a.tar", *span), spans)
        for (offset, nbytes), data in zip(spans, got, strict=True):
            assert data == TAR[offset : offset + nbytes]


def test_every_byte_of_a_remote_set_equals_the_local_one(tmp_path: Path, remote_url: str) -> None:
    with opened(remote_url, tmp_path) as files:
        assert files.remote
        for name in ("manifest.json", "index/a.npy"):
            assert files.local(name).read_bytes() == SET[name]
            assert files.size(name) == len(SET[name])
        read_everywhere(files)
        before = files.counts()
        read_everywhere(files)
        assert files.counts() == before  # all of it from the cache
        assert before["fetched_bytes"] == sum(len(SET[name]) for name in ("manifest.json", "index/a.npy", "32/a.tar"))
        assert files.read("64/empty.tar", 0, 0) == b""
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


@pytest.mark.slow
@pytest.mark.timing
@pytest.mark.parametrize(("remote_url", "etags"), [("s3", True), ("http", False)], indirect=["remote_url"])
def test_requests_to_a_failing_store_are_retried(
    tmp_path: Path,
    remote_url: str,
    proxy: FaultyProxy,  # noqa: F811
    etags: bool,
) -> None:
    state = random.getstate()
    with opened(remote_url, tmp_path, tries=8, requests=8) as files:
        files.local("manifest.json")
        proxy.requests.clear()
        proxy.etags = etags  # without, a body that breaks off cannot be continued
        proxy.each = [500, 503, 429, "cut", "short", "drop", "hang"]
        names = ["32/a.tar", "index/a.npy", *sorted(MORE)[:6]]
        with ThreadPoolExecutor(8) as pool:
            got = list(pool.map(lambda name: files.read(name, 0, len(SET[name])), names))
        assert got == [SET[name] for name in names]
        assert sum(proxy.requests.values()) >= 8 * len(names)
    assert random.getstate() == state  # delays are drawn from another generator


@pytest.mark.slow
@pytest.mark.timing
def test_a_slow_store_does_not_count_as_stalled_but_a_trickling_one_does(
    tmp_path: Path,
    url: str,
    proxy: FaultyProxy,  # noqa: F811
) -> None:
    with opened(url, tmp_path, stall_s=0.5, tries=2) as files:
        files.local("manifest.json")
        proxy.requests.clear()
        proxy.slow_bytes_per_s = 256 << 10  # the file takes 1.3 s, in pieces
        assert files.read("32/a.tar", 0, len(TAR)) == TAR
        assert set(proxy.requests.values()) == {1}
    with opened(url, tmp_path / "other", stall_s=0.3, tries=2) as files:
        files.local("manifest.json")
        proxy.slow_bytes_per_s = 4 << 10  # the file would take 80 s, never silent for long
        began = time.monotonic()
        with pytest.raises(StorageError, match=r"got 'no answer in time' after 2 tries or 0\.6 s, expected its"):
            files.read("32/a.tar", 0, 1)
        assert time.monotonic() - began < 3


@pytest.mark.slow
@pytest.mark.timing
@pytest.mark.parametrize(
    ("fault", "words", "most"),
    [
        (503, r"cannot be read, got '.*HTTP status 503' after 3 tries or 0\.9 s, expected its bytes;", 3),
        ("hang", r"cannot be read, got 'no answer in time' after 3 tries or 0\.9 s", 3),
        ("cut", "cannot be read, got '.*body error' after 3 tries", 9),  # twice continued by obstore, three times
        (403, "access is refused, got 'HTTP status 403'", 1),
        (404, "not found, expected", 1),
    ],
)
def test_the_last_error_is_reported_and_those_that_cannot_change_are_not_retried(
    tmp_path: Path,
    url: str,
    proxy: FaultyProxy,  # noqa: F811
    fault: Any,
    words: str,
    most: int,
) -> None:
    with opened(url, tmp_path, tries=3, stall_s=0.3) as files:
        files.local("manifest.json")
        proxy.requests.clear()
        proxy.always = fault
        with pytest.raises(StorageError, match=rf"/set/32/a\.tar: {words}") as error:
            files.read("32/a.tar", 0, 1)
        assert isinstance(error.value, Missing) == (fault == 404)
        assert "\n" not in str(error.value)
        while sum(proxy.requests.values()) < min(2, most):  # a busy server may see the last request after its time
            time.sleep(0.01)
        assert sum(proxy.requests.values()) <= most
        assert not list(tmp_path.rglob("*.part"))
        proxy.always = None
        assert files.read("32/a.tar", 0, 9) == TAR[:9]


@pytest.mark.timing
def test_prefetching_is_concurrent_and_bounded(tmp_path: Path, url: str, proxy: FaultyProxy) -> None:  # noqa: F811
    names = list(MORE)
    with opened(url, tmp_path, requests=3, ahead_bytes=6 * STEP + 99) as files:
        files.local("manifest.json")
        proxy.requests.clear()
        proxy.slow_bytes_per_s = 64 << 10
        assert [files.prefetch(name) for name in names[:7]] == [True] * 6 + [False]
        assert all(files.prefetch(name) for name in names[:6])  # pending already
        deadline = time.monotonic() + 10
        while files.pending_bytes() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert proxy.max_concurrent == 3
        for name in names[:6]:
            assert files.read(name, 0, 99) == MORE[name][:99]
            assert files.prefetch(name)  # cached
        assert files.prefetch("gone")  # never will be
        assert files.pending_bytes() == 0
        assert proxy.requests == {f"/{BUCKET}/set/{name}": 1 for name in names[:6]}


def hanging(files: Remote, proxy: FaultyProxy) -> tuple[threading.Thread, list[Exception]]:  # noqa: F811
    """Begin six prefetches and a read of a store that hangs; the reading thread and its errors."""
    files.local("manifest.json")
    proxy.requests.clear()
    proxy.always = "hang"
    for name in list(MORE)[:6]:
        files.prefetch(name)
    errors: list[Exception] = []

    def read() -> None:
        try:
            files.read("32/a.tar", 9, 1)
        except StorageError as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    while sum(proxy.requests.values()) < 4:  # three prefetches; the others wait for them
        time.sleep(0.01)
    return reader, errors


@pytest.mark.timing
@pytest.mark.parametrize("end", [Remote.close, Remote.interrupt])
def test_hanging_requests_end_at_once(
    tmp_path: Path,
    remote_url: str,
    proxy: FaultyProxy,  # noqa: F811
    end: Callable[[Remote], None],
) -> None:
    """After an interrupt, later reads work."""
    with opened(remote_url, tmp_path, stall_s=60.0, requests=3) as files:
        reader, errors = hanging(files, proxy)
        began = time.monotonic()
        end(files)
        reader.join()
        assert time.monotonic() - began < 2
        assert isinstance(errors[0], Interrupted)
        if end is Remote.interrupt:
            while files.pending_bytes():
                time.sleep(0.01)
            proxy.always = None
            assert files.read("32/a.tar", 9 * STEP, 9) == TAR[9 * STEP :][:9]
    assert not list(tmp_path.rglob("*.part"))
    assert not list(tmp_path.rglob("*.tar.lock"))


@pytest.mark.timing
def test_ctrl_c_ends_a_hanging_read_at_once(tmp_path: Path, url: str, proxy: FaultyProxy) -> None:  # noqa: F811
    with opened(url, tmp_path, stall_s=60.0) as files:
        files.local("manifest.json")
        proxy.always = "hang"
        threading.Timer(0.3, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT]).start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            files.read("32/a.tar", 0, 1)
        assert time.monotonic() - began < 1.5


ENDS_EARLY = """
import sys, time
from pathlib import Path
from resolute.pipeline.storage.open_files import open_files
from resolute.pipeline.storage.cache import CacheSettings
files = open_files(sys.argv[1], cache=CacheSettings(folder=Path(sys.argv[2]), stall_s=60.0))
files.local("manifest.json")
files.prefetch("32/a.tar")
time.sleep(float(sys.argv[3]))
print("end", flush=True)
"""


@pytest.mark.slow
def test_a_process_that_ends_while_it_downloads_ends_well(tmp_path: Path, url: str, proxy: FaultyProxy) -> None:  # noqa: F811
    """Nothing was closed: threads of obstore must not meet an interpreter that has ended."""
    proxy.slow_bytes_per_s = 64 << 10  # the tar takes 5 s
    for number in (0, 3):
        argv = [sys.executable, "-c", ENDS_EARLY, url, str(tmp_path / str(number)), str(0.01 * number)]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


@pytest.mark.parametrize("url", ["s3://me:secret@bucket/set", "http://host/set?X-Amz-Signature=secret"])
def test_messages_contain_no_credentials(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(url, tmp_path, tries=1) as files:
        assert "secret" not in files.root + files.where("a")

        def fail(*args: Any) -> Any:
            raise ValueError(f"Error performing GET {url}/a - cannot ask {url}/a for its bytes\n\nDebug source: secret")

        monkeypatch.setattr("obstore.head_async", fail)
        with pytest.raises(StorageError, match="cannot ask") as error:
            files.read("a", 0, 1)
        assert "secret" not in str(error.value)
    with pytest.raises(ResoluteError) as refused:
        open_files(url.replace("s3", "nosuch").replace("http", "nosuch"), cache=settings(tmp_path))
    assert "secret" not in str(refused.value)


def test_credentials_come_from_the_profiles_of_the_aws_tools(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    (tmp_path / "credentials").write_text("[mine]\naws_access_key_id = test\naws_secret_access_key = test\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "mine")
    with opened(url, tmp_path / "cache") as files:
        assert files.read("32/a.tar", 0, 9) == TAR[:9]
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(ResoluteError, match=r"got '.*profile .nobody. could not be found'"):
        opened(url, tmp_path / "cache")
