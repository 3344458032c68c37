"""The disk cache serves exactly the downloaded bytes, whatever processes share, damage, fill or are killed in it."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import Mock

import pytest

from resolute.errors import Interrupted, ResoluteError, StorageError
from resolute.pipeline.storage import cache as caching
from resolute.pipeline.storage.base import OpenFile
from resolute.pipeline.storage.cache import Cache, CacheSettings
from resolute.pipeline.storage.cancel import CancelScope
from tests import ROOT

FULL = 10_000  # bytes of a file
NEVER = CancelScope()


def content(number: int) -> bytes:
    return random.Random(number).randbytes(FULL)


def opened(cache: Cache, number: int, **words: Any) -> tuple[OpenFile, bool]:
    """A file of the cache, whose bytes are checked, and whether it had to be downloaded."""
    downloaded = []

    def download(write: Any) -> None:
        downloaded.append(number)
        for at in range(0, FULL, 3_000):
            write(memoryview(content(number))[at : at + 3_000], at)

    file = cache.open(f"{number}-a.tar", FULL, download, **{"scope": NEVER} | words)
    assert os.pread(file.fd, FULL + 1, 0) == content(number)
    return file, bool(downloaded)


def read(cache: Cache, number: int, **words: Any) -> bool:
    return opened(cache, number, **words)[1]


def cached(folder: Path) -> list[int]:
    return sorted(int(path.name.partition("-")[0]) for path in (folder / "v2").glob("*.tar"))


def real_bytes(folder: Path) -> int:
    sizes: dict[int, int] = {}  # by inode: a partial file may be renamed during the scan
    for path in (folder / "v2").iterdir():
        try:
            stat = path.stat()
        except FileNotFoundError:
            continue
        sizes[stat.st_ino] = stat.st_size
    return sum(sizes.values())


def test_a_file_is_downloaded_once_and_then_served_from_the_cache(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 10 * FULL)
    assert read(cache, 1)
    assert not read(cache, 1)
    assert not read(Cache(tmp_path, 10 * FULL), 1)  # after a restart
    assert [path.name for path in (tmp_path / "v2").iterdir()] == ["1-a.tar"]  # no lock stays
    cache.drop("1-a.tar")
    assert not cache.has("1-a.tar")
    assert read(cache, 1)


def test_the_least_recently_used_files_are_evicted_first_also_for_a_smaller_limit(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 5 * FULL)
    for number in range(4):
        read(cache, number)
    for number in (1, 0):
        assert not read(cache, number)
    for number in (4, 5):  # one too many: room for it and a twentieth of the limit is made
        read(cache, number)
    assert cached(tmp_path) == [0, 1, 4, 5]
    assert cache.evicted == 2
    Cache(tmp_path, 3 * FULL)
    assert real_bytes(tmp_path) <= 3 * FULL


SHARE = """
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from resolute.pipeline.storage.cache import Cache
from tests.pipeline.storage.test_cache import FULL, read
folder, seed, keys, limit, log = sys.argv[1:]
cache, rng = Cache(Path(folder), int(limit) * FULL), Random(int(seed))
def read_file(number):
    if read(cache, number):
        with open(log, "a") as file:
            file.write(f"{number}\\n")
print("ready", flush=True)
sys.stdin.readline()
with ThreadPoolExecutor(4) as pool:
    list(pool.map(read_file, [rng.randrange(int(keys)) for _ in range(200)]))
print(cache.damaged)
"""


@pytest.mark.slow
@pytest.mark.parametrize("limit", [100, 10])
def test_processes_and_threads_share_downloads_and_the_limit_holds(tmp_path: Path, limit: int) -> None:
    """Processes of four threads read 60 files, of which `limit` have room, in random order."""
    log, keys = tmp_path / "log", 60
    running = [
        subprocess.Popen(
            [sys.executable, "-c", SHARE, *map(str, (tmp_path / "cache", seed, keys, limit, log))],
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for seed in range(3)
    ]
    for process in running:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
    for process in running:
        assert process.stdin
        process.stdin.write("\n")
        process.stdin.flush()
    most, cache = 0, Cache(tmp_path / "cache", limit * FULL)
    while any(process.poll() is None for process in running):
        with cache._locked(cache._folder):  # why: nothing may be added or deleted during the scan
            most = max(most, real_bytes(tmp_path / "cache"))
        time.sleep(0.005)
    for process in running:
        assert (process.communicate()[0], process.returncode) == ("0\n", 0)
    assert most <= limit * FULL, most / FULL
    assert real_bytes(tmp_path / "cache") >= min(keys, limit - 2) * FULL
    assert {path.suffix for path in (tmp_path / "cache" / "v2").iterdir()} == {".tar"}
    downloads = sorted(map(int, log.read_text().split()))
    assert downloads == list(range(keys)) if limit > keys else len(downloads) > 200


def test_a_damaged_file_is_downloaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the wrong size, with other content, or that cannot be read."""
    cache, fstat, sha256 = Cache(tmp_path, 10 * FULL), os.fstat, hashlib.sha256(content(1)).hexdigest()
    read(cache, 1)
    read(cache, 2)
    for nbytes in (0, FULL - 9, FULL + 1):
        os.truncate(cache.path("1-a.tar"), nbytes)
        assert read(cache, 1)
        assert not read(cache, 1)
    cache.path("1-a.tar").write_bytes(content(2))
    assert read(cache, 1, keep=True, sha256=sha256)
    assert not read(cache, 1, keep=True, sha256=sha256)
    with monkeypatch.context() as patch:
        stale = [OSError(errno.ESTALE, "Stale file handle")]
        patch.setattr(caching.os, "fstat", lambda handle: fstat(handle) if not stale else raise_(stale.pop()))
        assert read(cache, 1)
    assert not read(cache, 2)
    assert cache.damaged == 5


def raise_(error: Exception) -> NoReturn:
    raise error


WRITER = """
import sys
from pathlib import Path
from resolute.pipeline.storage.cache import Cache
from tests.pipeline.storage.test_cache import FULL, NEVER, content, read
def half(write):
    write(memoryview(content(1))[:5_000], 0)
    print("half", flush=True)
    sys.stdin.readline()
cache = Cache(Path(sys.argv[1]), 3 * FULL)
read(cache, 0)
cache.open("1-a.tar", FULL, half, scope=NEVER)
"""


def start_writer(folder: Path) -> subprocess.Popen[str]:
    """A process that has cached file 0 and has written half of file 1."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    assert process.stdout.readline() == "half\n"
    return process


def test_a_partial_file_of_a_killed_process_is_neither_served_nor_counted(tmp_path: Path) -> None:
    writer = start_writer(tmp_path)
    cache, scope = Cache(tmp_path, 3 * FULL), CancelScope()
    assert len(list(tmp_path.rglob("*.part"))) == 1  # it is being written, and stays
    assert cached(tmp_path) == [0]
    assert real_bytes(tmp_path) == 2 * FULL  # a file being downloaded counts with its full size
    with ThreadPoolExecutor(2) as pool:
        interrupted, waiting = pool.submit(read, cache, 1, scope=scope), pool.submit(read, cache, 1)
        time.sleep(0.1)
        scope.cancel()
        with pytest.raises(Interrupted):
            interrupted.result(1)
        assert not waiting.done()
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        assert waiting.result(1)  # taken over, at once
    read(cache, 2)
    for number in range(3):
        assert not read(cache, number)
    assert real_bytes(tmp_path) == 3 * FULL


def test_too_large_files_are_refused(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 2 * FULL + FULL // 2)
    read(cache, 1)
    with pytest.raises(ResoluteError, match=r"too small, .* expected room for a file of 30000; raise RESOLUTE_CACHE_G"):
        cache.open("5-a.tar", 3 * FULL, Mock(), scope=NEVER)
    assert cached(tmp_path)  # nothing was evicted for it


def test_kept_files_stay_while_in_use_and_are_evicted_afterwards(tmp_path: Path) -> None:
    cache, other = Cache(tmp_path, 5 * FULL), Cache(tmp_path, 5 * FULL)
    kept, path = opened(cache, 100, keep=True)[0], cache.path("100-a.tar")
    again = opened(other, 100, keep=True)[0]
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        for number in range(20):
            read(other, number)
        assert path.exists()
        del kept, again
        for number in range(20):
            read(other, number)
        assert not path.exists()
        assert mapped[:] == content(100)  # an existing mapping stays valid


def test_a_full_disk_evicts_files_or_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, pwrite, room = Cache(tmp_path, 100 * FULL), os.pwrite, 10 * FULL

    def on_small_disk(handle: int, data: memoryview, offset: int) -> int:
        if real_bytes(tmp_path) > room:  # the partial file has its full size already
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(handle, data[:2_999], offset)  # and may write less than asked

    monkeypatch.setattr(caching.os, "pwrite", on_small_disk)
    for number in range(40):
        assert read(cache, number)
        assert not read(cache, number)
    assert real_bytes(tmp_path) <= room
    room = 0
    with pytest.raises(StorageError, match="the disk of the cache is full"):
        read(cache, 99)
    assert real_bytes(tmp_path) == 0


def test_settings_come_from_the_environment_and_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESOLUTE_CACHE", str(tmp_path))
    monkeypatch.setenv("RESOLUTE_CACHE_GIB", "0.5")
    assert (CacheSettings().folder, CacheSettings().limit_bytes) == (tmp_path, 1 << 29)
    for wrong, words in (("lots", "got 'lots', expected GiB"), ("0", "raise RESOLUTE_CACHE_GIB")):
        monkeypatch.setenv("RESOLUTE_CACHE_GIB", wrong)
        with pytest.raises(ResoluteError, match=words):
            CacheSettings()
    with pytest.raises(ResoluteError, match="requests got 0"):
        CacheSettings(limit_bytes=1 << 30, requests=0)


def test_an_unusable_cache_folder_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match=r"the cache cannot be used, got '.*'.*set RESOLUTE_CACHE"):
        Cache(tmp_path / "file", 10 * FULL)
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    with pytest.raises(StorageError, match=r"'No locks available', expected a folder .* with file locks"):
        Cache(tmp_path / "new", 10 * FULL)
