"""The disk cache serves exactly the fetched bytes, whatever processes share, damage, fill or are killed writing it."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from resolute.errors import ResoluteError, StorageError
from resolute.pipeline.storage import disk_cache as caching
from resolute.pipeline.storage.disk_cache import HEADER, Cache
from tests import ROOT

CHUNK = 10_000
FULL = CHUNK + HEADER.size


def key(number: int) -> str:
    return hashlib.sha1(str(number).encode()).hexdigest()


def content(number: int) -> bytes:
    return random.Random(number).randbytes(CHUNK)


def read(cache: Cache, number: int, start: int = 0, stop: int = CHUNK, *, fresh: bool = False) -> bool:
    """Read a part of a chunk and check it; whether it had to be fetched."""
    fetched = []

    def fetch() -> bytes:
        fetched.append(number)
        return content(number)

    assert cache.read(key(number), start, stop, CHUNK, fetch, fresh=fresh) == content(number)[start:stop]
    return bool(fetched)


def path_of(folder: Path, number: int) -> Path:
    return folder / "v1" / "chunks" / key(number)[:2] / key(number)


def real_bytes(folder: Path) -> int:
    sizes: dict[int, int] = {}  # by inode: a partial file may be renamed during the scan
    for kind in ("chunks", "files"):
        for path in (folder / "v1" / kind).rglob("*"):
            try:
                stat = path.stat()
            except FileNotFoundError:
                continue
            if path.is_file():
                sizes[stat.st_ino] = stat.st_size
    return sum(sizes.values())


def test_a_chunk_is_fetched_once_and_then_served_from_the_cache(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 10 * FULL)
    assert read(cache, 1)
    assert not read(cache, 1, 10, 20)
    assert not read(cache, 1, 0, 0)
    assert not read(Cache(tmp_path, 10 * FULL), 1)  # after a restart
    assert cache.quota.used() == real_bytes(tmp_path) == FULL
    assert read(cache, 1, fresh=True)
    assert cache.has(key(1))
    assert not cache.has(key(2))


def test_the_least_recently_used_chunks_are_evicted_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching, "TOUCH_S", 0.0)
    cache = Cache(tmp_path, 5 * FULL)
    for number in range(4):
        read(cache, number)
    for number in (1, 0):
        assert not read(cache, number)
    for number in (4, 5):  # one too many: space for it and a twentieth of the limit are freed
        read(cache, number)
    assert [number for number in range(6) if cache.has(key(number))] == [0, 1, 4, 5]
    assert cache.quota.evicted == 2


def test_a_smaller_limit_is_applied_when_the_cache_is_opened(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 10 * FULL)
    for number in range(10):
        read(cache, number)
    assert real_bytes(tmp_path) == 10 * FULL
    assert Cache(tmp_path, 3 * FULL).quota.used() == real_bytes(tmp_path) <= 3 * FULL


SHARE = """
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from resolute.pipeline.storage.disk_cache import Cache
from tests.pipeline.storage.test_disk_cache import FULL, read
folder, seed, keys, limit, log = sys.argv[1:]
cache, rng = Cache(Path(folder), int(limit) * FULL), Random(int(seed))
def read_chunk(number):
    if read(cache, number):
        with open(log, "a") as file:
            file.write(f"{number}\\n")
print("ready", flush=True)
sys.stdin.readline()
with ThreadPoolExecutor(4) as pool:
    list(pool.map(read_chunk, [rng.randrange(int(keys)) for _ in range(400)]))
print(cache.damaged)
"""


def share(tmp_path: Path, *, processes: int, keys: int, limit: int) -> list[int]:
    """Let processes of four threads read random chunks while the limit must hold; the numbers of fetched chunks."""
    log = tmp_path / "log"
    argv = [sys.executable, "-c", SHARE, tmp_path / "cache"]
    running = [
        subprocess.Popen([*map(str, [*argv, seed, keys, limit, log])], cwd=ROOT, text=True,
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE) for seed in range(processes)
    ]  # fmt: skip
    for process in running:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
    for process in running:
        assert process.stdin
        process.stdin.write("\n")
        process.stdin.flush()
    most, quota = 0, Cache(tmp_path / "cache", limit * FULL).quota
    while any(process.poll() is None for process in running):
        with quota._locked():  # why: nothing may be added or deleted during the scan
            most = max(most, real_bytes(tmp_path / "cache"))
    for process in running:
        assert process.communicate()[0] == "0\n"
        assert process.returncode == 0
    assert most <= limit * FULL, most / FULL
    assert real_bytes(tmp_path / "cache") >= min(keys, limit - 2) * FULL
    assert real_bytes(tmp_path / "cache") == Cache(tmp_path / "cache", limit * FULL).quota.used()
    assert not list((tmp_path / "cache").rglob("*.part"))
    return [int(line) for line in log.read_text().split()]


def test_processes_and_threads_fetch_each_chunk_once(tmp_path: Path) -> None:
    fetched = share(tmp_path, processes=3, keys=60, limit=100)
    assert sorted(fetched) == list(range(60))


def test_the_limit_holds_while_processes_evict_and_read_concurrently(tmp_path: Path) -> None:
    assert len(share(tmp_path, processes=3, keys=60, limit=10)) > 300


@pytest.mark.parametrize("how", ["flip", "flip the header", "cut", "empty", "longer", "another's"])
@pytest.mark.parametrize("when", ["restarted", "open"])
def test_a_damaged_chunk_is_fetched_again(tmp_path: Path, how: str, when: str) -> None:
    cache = Cache(tmp_path, 10 * FULL)
    read(cache, 1)
    read(cache, 2)
    path, data = path_of(tmp_path, 1), bytearray(path_of(tmp_path, 1).read_bytes())
    if how.startswith("flip"):
        data[5 if how == "flip the header" else 7_000] ^= 1
    elif how == "another's":
        data = bytearray(path_of(tmp_path, 2).read_bytes())
    else:
        data = {"cut": data[:-9], "empty": bytearray(), "longer": data + b"x"}[how]
    path.write_bytes(data)
    if when == "restarted":
        cache = Cache(tmp_path, 10 * FULL)
    assert read(cache, 1, 3, 9)
    assert cache.damaged == 1
    assert not read(cache, 1)
    assert not read(cache, 2)


WRITER = """
import os, sys
from pathlib import Path
from resolute.pipeline.storage import disk_cache as caching
from tests.pipeline.storage.test_disk_cache import FULL, content, key, read
def half(handle, head, whole):
    os.pwrite(handle, head + whole[:5_000], 0)
    print("half", flush=True)
    sys.stdin.readline()
cache = caching.Cache(Path(sys.argv[1]), 3 * FULL)
read(cache, 0)
caching._put = half
read(cache, 1)
"""


def start_writer(folder: Path) -> subprocess.Popen[str]:
    """A process that has cached chunk 0 and has written half of chunk 1."""
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], cwd=ROOT,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # fmt: skip
    assert process.stdout
    assert process.stdout.readline() == "half\n"
    return process


def test_a_partial_chunk_of_a_killed_writer_is_neither_served_nor_counted(tmp_path: Path) -> None:
    writer = start_writer(tmp_path)
    cache = Cache(tmp_path, 3 * FULL)
    assert not cache.has(key(1))
    assert real_bytes(tmp_path) == cache.quota.used() == 2 * FULL  # a file being written counts with its full size
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(read, cache, 1)
        time.sleep(0.1)
        assert not waiting.done()
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        assert waiting.result()  # taken over, at once
    read(cache, 2)
    for number in range(3):
        assert not read(cache, number)
    assert real_bytes(tmp_path) == cache.quota.used() == 3 * FULL


def test_opening_a_cache_deletes_partial_files_of_killed_writers(tmp_path: Path) -> None:
    writer = start_writer(tmp_path)
    Cache(tmp_path, 3 * FULL)
    assert len(list(tmp_path.rglob("*.part"))) == 1  # it is being written
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    cache = Cache(tmp_path, 3 * FULL)
    assert list(tmp_path.rglob("*.part")) == []
    assert cache.has(key(0))


def test_a_stopped_process_does_not_block_the_others(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 10 * FULL, patience_s=0.1)
    begun, end = threading.Event(), threading.Event()

    def hang() -> bytes:
        begun.set()
        end.wait(30)
        return content(1)

    with ThreadPoolExecutor(1) as pool:
        stuck = pool.submit(cache.read, key(1), 0, 5, CHUNK, hang)
        begun.wait(30)
        assert read(cache, 1)  # past the cache
        assert not cache.has(key(1))
        end.set()
        assert stuck.result() == content(1)[:5]
    assert not read(cache, 1)


def test_a_failed_fetch_leaves_nothing(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 10 * FULL)

    def fail() -> bytes:
        raise ResoluteError("no network")

    with pytest.raises(ResoluteError, match="no network"):
        cache.read(key(1), 0, 5, CHUNK, fail)
    assert real_bytes(tmp_path) == cache.quota.used() == 0
    assert read(cache, 1)


def test_a_file_system_without_locks_is_an_error_in_every_operation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is never mistaken for a lock held by another process, which would wait or report a full cache."""
    cache = Cache(tmp_path, 3 * FULL)
    for number in range(3):
        read(cache, number)
    real = fcntl.flock

    def none_of(kind: int) -> Callable[[int, int], None]:
        def flock(file: int, operation: int) -> None:
            if operation == kind:
                raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
            real(file, operation)

        return flock

    for kind in (fcntl.LOCK_EX, fcntl.LOCK_EX | fcntl.LOCK_NB):
        with monkeypatch.context() as patch:
            patch.setattr(fcntl, "flock", none_of(kind))
            with pytest.raises(StorageError, match=r"'No locks available', expected a folder .* with file locks"):
                read(cache, 9)
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", none_of(fcntl.LOCK_EX | fcntl.LOCK_NB))
        with pytest.raises(StorageError, match="'No locks available'"):
            cache.quota.shrink(FULL)
    assert read(cache, 9)


def test_a_chunk_of_the_wrong_size_is_not_read(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 10 * FULL)
    read(cache, 1)
    os.truncate(path_of(tmp_path, 1), 1 << 40)  # 1 TiB of nothing
    assert read(Cache(tmp_path, 10 * FULL), 1)
