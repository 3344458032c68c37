"""The quota of the disk cache: files in use are kept, a full disk is handled, bad settings are reported."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
from functools import partial
from pathlib import Path

import pytest

from resolute.errors import ResoluteError
from resolute.pipeline.storage import disk_cache as caching
from resolute.pipeline.storage.disk_cache import Cache, CacheSettings
from tests.pipeline.storage.test_disk_cache import CHUNK, FULL, content, key, read, real_bytes


def whole(cache: Cache, number: int) -> Path:
    def write(handle: int) -> None:
        os.pwrite(handle, content(number), 0)

    path = cache.file(f"{key(number)}-a.npy", CHUNK, hashlib.sha256(content(number)).hexdigest(), write)
    assert path.read_bytes() == content(number)
    return path


def test_whole_files_are_kept_while_in_use_and_evicted_afterwards(tmp_path: Path) -> None:
    cache, other = Cache(tmp_path, 5 * FULL), Cache(tmp_path, 5 * FULL)
    kept = whole(cache, 100)
    with kept.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        for number in range(20):
            read(other, number)
        assert kept.exists()
        assert whole(cache, 100) == whole(other, 100) == kept
        cache.close()
        other.close()
        for number in range(20):
            read(other, number)
        assert not list((tmp_path / "v1" / "files").rglob("*.npy*"))
        assert mapped[:] == content(100)  # an existing mapping stays valid
    for number in range(5):
        whole(cache, number)
    with pytest.raises(ResoluteError, match="the cache is too small"):
        whole(cache, 5)
    cache.close()


def test_a_damaged_whole_file_is_fetched_again(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 5 * FULL)
    path = whole(cache, 1)
    cache.close()
    path.write_bytes(content(2))
    assert whole(cache, 1) == path
    assert cache.damaged == 1
    cache.close()


def test_a_whole_file_of_unknown_content_is_fetched_again_if_its_size_is_wrong(tmp_path: Path) -> None:
    fetched = []

    def open_file() -> bytes:
        cache = Cache(tmp_path, 5 * FULL)
        path = cache.file(f"{key(1)}-a", CHUNK, None, lambda handle: fetched.append(os.pwrite(handle, content(1), 0)))
        cache.close()
        return path.read_bytes()

    assert open_file() == open_file() == content(1)
    assert len(fetched) == 1
    os.truncate(next((tmp_path / "v1" / "files").rglob("*-a")), CHUNK - 1)
    assert open_file() == content(1)
    assert len(fetched) == 2


def test_a_full_disk_evicts_chunks_or_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, put, room = Cache(tmp_path, 100 * FULL), caching._put, 10 * FULL

    def on_small_disk(handle: int, head: bytes, data: bytes) -> None:
        if real_bytes(tmp_path) > room:  # the partial file has its full size already
            raise OSError(errno.ENOSPC, "No space left on device")
        put(handle, head, data)

    monkeypatch.setattr(caching, "_put", on_small_disk)
    for number in range(40):
        assert read(cache, number)
        assert not read(cache, number)
    assert real_bytes(tmp_path) == cache.quota.used() <= room
    room = 0
    with pytest.raises(ResoluteError, match="the disk of the cache is full"):
        read(cache, 99)
    assert real_bytes(tmp_path) == cache.quota.used() == 0


def test_an_unusable_cache_folder_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ResoluteError, match=r"the cache cannot be used, got '.*'.*set RESOLUTE_CACHE"):
        Cache(tmp_path / "file", 10 * FULL)
    monkeypatch.setattr("fcntl.flock", partial(_no_locks))
    with pytest.raises(ResoluteError, match="with file locks"):
        Cache(tmp_path / "new", 10 * FULL)


def _no_locks(*args: object) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


def test_settings_come_from_the_environment_and_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESOLUTE_CACHE", str(tmp_path))
    monkeypatch.setenv("RESOLUTE_CACHE_GIB", "0.5")
    assert (CacheSettings().folder, CacheSettings().limit_bytes) == (tmp_path, 1 << 29)
    monkeypatch.delenv("RESOLUTE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert CacheSettings().folder == tmp_path / "resolute"
    for wrong, words in (("lots", "got 'lots', expected GiB"), ("0", "raise RESOLUTE_CACHE_GIB")):
        monkeypatch.setenv("RESOLUTE_CACHE_GIB", wrong)
        with pytest.raises(ResoluteError, match=words):
            CacheSettings()
    with pytest.raises(ResoluteError, match="requests got 0"):
        CacheSettings(limit_bytes=1 << 30, requests=0)
    with pytest.raises(ResoluteError, match="stall_s got 0"):
        CacheSettings(limit_bytes=1 << 30, stall_s=0)
