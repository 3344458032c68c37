"""`Remote`: the files of a shard set behind a URL, read through the machine's disk cache.

A cache key is made of a file's URL and its identity: the SHA-256 from the set's manifest, else what the store reports
(size and ETag, or similar). A changed set therefore never gets bytes of the old one. The manifest itself is fetched
every time it is opened.

Connections must not be shared between processes: create one `Remote` per rank, never before a fork.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.errors import FileEndsEarly, Missing, ResoluteError

from .base import MAX_OPEN_FILES, Files, OpenFile
from .disk_cache import HEADER, TOUCH_S, Cache, CacheSettings, write_at
from .object_store import Store
from .threads import DaemonPool

__all__ = ["Remote"]


@dataclass(frozen=True)
class _RemoteFile:
    """A remote file: its size, the identity of its content, and the hash state that its chunk keys start from."""

    nbytes: int
    identity: str
    seed: Any  # hashlib object; copied, never updated


class Remote(Files):
    """The files of a shard set behind a URL. Use as a context manager."""

    remote = True

    def __init__(self, url: str, cache: CacheSettings | None = None) -> None:
        """Raises `ResoluteError` if the URL's driver is not installed, `StorageError` if the cache cannot be used."""
        self._url, self._settings = url.rstrip("/"), cache or CacheSettings()
        self._store = Store(
            self._url, tries=self._settings.tries, first_wait_s=self._settings.first_wait_s,
            stall_s=self._settings.stall_s,
        )  # fmt: skip
        self._cache = Cache(self._settings.folder, self._settings.limit_bytes)
        self._lock = threading.Lock()
        self._pending_bytes = 0
        self._remote_files: dict[str, _RemoteFile] = {}
        self._listed: dict[str, Any] = {}  # `files` of the manifest
        self._prefetching: set[str] = set()
        self._opened: dict[tuple[str, int], tuple[OpenFile, float]] = {}  # by name and chunk index; when opened
        self._pool = DaemonPool(self._settings.requests, name="resolute-fetch", files=self)

    def __reduce__(self) -> tuple[object, ...]:
        return Remote, (self._url, self._settings)

    @property
    def root(self) -> str:
        return self._store.root

    @property
    def chunk_bytes(self) -> int:
        """Reads and prefetches are fetched in ranges of this size, aligned to the start of each file."""
        return self._settings.chunk_bytes

    def counts(self) -> dict[str, int]:
        """Counters of this process: requests, retries among them, fetched bytes, damaged and evicted cache files."""
        return {
            "requests": self._store.requests, "retries": self._store.retries,
            "fetched_bytes": self._store.fetched_bytes, "damaged": self._cache.damaged,
            "evicted": self._cache.quota.evicted,
        }  # fmt: skip

    def where(self, name: str) -> str:
        return self._store.where(name)

    def identity(self, name: str) -> tuple[int, str] | None:
        try:
            return self._store.info(name)
        except FileNotFoundError:
            return None

    def local(self, name: str) -> Path:
        if name == "manifest.json":
            text = self._store.read_all(name)
            with suppress(ValueError, TypeError, KeyError):  # why: `read_manifest` reports what is wrong with it
                self._listed = dict(json.loads(text)["files"])
                self._remote_files.clear()
                self._opened.clear()
            return self._file(name, self._remote_file_of(name, len(text), f"sha256:{_sha256(text)}"), text)
        return self._file(name, self._remote_file(name), None)

    def read(self, name: str, offset: int, nbytes: int, *, fresh: bool = False) -> bytes:
        with self._missing(name):
            remote_file = self._remote_file(name)
        stop, step = offset + nbytes, self._settings.chunk_bytes
        if fresh:
            self._opened.clear()
        if stop > remote_file.nbytes:
            raise FileEndsEarly(
                f"{self.where(name)}: ends too early, got {remote_file.nbytes} bytes, expected {stop} or more; "
                "upload the set again", max(0, remote_file.nbytes - offset),
            )  # fmt: skip
        parts = [
            self._chunk(name, remote_file, index, max(offset - index * step, 0), min(stop - index * step, step), fresh)
            for index in range(offset // step, -(-stop // step))
        ]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def locate(self, name: str, offset: int, nbytes: int) -> tuple[OpenFile, int] | None:
        index, step, now = offset // self._settings.chunk_bytes, self._settings.chunk_bytes, time.monotonic()
        if not 0 < nbytes <= (index + 1) * step - offset:
            return None
        file, since = self._opened.get((name, index), (None, 0.0))
        if file is None or now - since > TOUCH_S:
            file = self._open(name, index)
            if file is None:
                return None
            if len(self._opened) >= MAX_OPEN_FILES:  # why the old ones: they may keep evicted chunks on the disk
                self._opened = {key: opened for key, opened in list(self._opened.items()) if now - opened[1] <= TOUCH_S}
            if len(self._opened) < MAX_OPEN_FILES:
                self._opened[name, index] = file, now
        return file, HEADER.size + offset - index * step

    def _open(self, name: str, index: int) -> OpenFile | None:
        with self._missing(name):
            remote_file = self._remote_file(name)
            nbytes = self._chunk_bytes_of(remote_file, index)
            if nbytes <= 0:
                return None
            fetch = partial(self._store.read_range, name, index * self._settings.chunk_bytes, nbytes)
            return self._cache.open(_key(remote_file, index), nbytes, fetch, closed=self._store.stopped)

    def prefetch(self, name: str, offset: int, nbytes: int) -> bool:
        """Fetch the chunks that hold these bytes in the background, at most `requests` at a time.

        False if more than `ahead_bytes` would be pending (or a quarter of the cache, so that no prefetched chunk is
        evicted before it is read); the chunks accepted up to then are fetched.
        """
        step, max_bytes = self._settings.chunk_bytes, min(self._settings.ahead_bytes, self._settings.limit_bytes // 4)
        try:
            remote_file = self._remote_file(name)
        except (FileNotFoundError, ResoluteError):
            return True  # why: `read` will raise it
        for index in range(offset // step, -(-min(offset + nbytes, remote_file.nbytes) // step)):
            key, size_bytes = _key(remote_file, index), self._chunk_bytes_of(remote_file, index)
            if key in self._prefetching or self._cache.has(key):
                continue
            with self._lock:
                if self._pending_bytes and self._pending_bytes + size_bytes > max_bytes:
                    return False
                self._prefetching.add(key)
                self._pending_bytes += size_bytes
            try:
                future = self._pool.submit(partial(self._prefetch_chunk, name, remote_file, index))
            except RuntimeError:  # closed meanwhile
                self._prefetch_done(key, size_bytes)
            else:
                future.add_done_callback(lambda _, key=key, size=size_bytes: self._prefetch_done(key, size))  # type: ignore[misc]
        return True

    def pending_bytes(self) -> int:
        """Bytes of prefetches that are not complete yet."""
        return self._pending_bytes

    def _prefetch_chunk(self, name: str, remote_file: _RemoteFile, index: int) -> None:
        with suppress(FileNotFoundError, ResoluteError):  # why: `read` will raise it
            self._chunk(name, remote_file, index, 0, 0, False)

    def _prefetch_done(self, key: str, size_bytes: int) -> None:
        with self._lock:
            self._prefetching.discard(key)
            self._pending_bytes -= size_bytes

    def _chunk(self, name: str, remote_file: _RemoteFile, index: int, start: int, stop: int, fresh: bool) -> bytes:
        nbytes = self._chunk_bytes_of(remote_file, index)
        fetch = partial(self._store.read_range, name, index * self._settings.chunk_bytes, nbytes)
        with self._missing(name):
            return self._cache.read(
                _key(remote_file, index), start, stop, nbytes, fetch, fresh=fresh, closed=self._store.stopped
            )

    def _file(self, name: str, remote_file: _RemoteFile, text: bytes | None) -> Path:
        """A complete file in the cache: `text` if it was already fetched, else downloaded in parallel ranges."""
        step = self._settings.chunk_bytes

        def write(handle: int) -> str:
            if text is not None:
                write_at(handle, text, 0)
                return _sha256(text)

            def fetch_range(at: int) -> None:
                write_at(handle, self._store.read_range(name, at, min(step, remote_file.nbytes - at)), at)

            with DaemonPool(self._settings.requests, name="resolute-fetch-file", files=self) as pool:
                for part in [pool.submit(partial(fetch_range, at)) for at in range(0, remote_file.nbytes, step)]:
                    part.result()
            with open(handle, "rb", closefd=False) as file:
                file.seek(0)
                got = hashlib.file_digest(file, "sha256").hexdigest()
            expected = remote_file.identity.removeprefix("sha256:")
            if remote_file.identity.startswith("sha256:") and got != expected:
                raise ResoluteError(
                    f"{self.where(name)}: not what the set's manifest lists, got SHA-256 {got[:12]}…, expected "
                    f"{expected[:12]}…; upload the set again, its manifest last"
                )
            return got

        label = name.replace("/", "-")[-80:]
        file_name = f"{_key(remote_file, -1)}-{label}"
        return self._cache.file(file_name, remote_file.nbytes, write, closed=self._store.stopped)

    def _remote_file(self, name: str) -> _RemoteFile:
        remote_file = self._remote_files.get(name)
        if remote_file is None:
            try:
                listed = self._listed[name]
                remote_file = self._remote_file_of(name, int(listed["bytes"]), f"sha256:{listed['sha256']}")
            except (KeyError, TypeError, ValueError):
                remote_file = self._remote_file_of(name, *self._store.info(name))
            self._remote_files[name] = remote_file
        return remote_file

    def _remote_file_of(self, name: str, nbytes: int, identity: str) -> _RemoteFile:
        seed = hashlib.sha256(json.dumps([self._url, name, identity, nbytes, self._settings.chunk_bytes]).encode())
        return _RemoteFile(nbytes, identity, seed)

    def _chunk_bytes_of(self, remote_file: _RemoteFile, index: int) -> int:
        step = self._settings.chunk_bytes
        return min(step, remote_file.nbytes - index * step)

    @contextmanager
    def _missing(self, name: str) -> Iterator[None]:
        """Turn a `FileNotFoundError` into `Missing`."""
        try:
            yield
        except FileNotFoundError:
            raise Missing(f"{self.where(name)}: not found, expected a file of the set; upload the set again") from None

    def release(self) -> None:
        self._opened.clear()

    def interrupt(self) -> None:
        self._pool.cancel()
        self._store.interrupt()

    def close(self) -> None:
        self._store.stop()
        self._pool.close()
        self.release()
        self._cache.close()
        self._store.close()


def _key(remote_file: _RemoteFile, index: int) -> str:
    """Cache key, 40 hex digits, of a chunk; `index` -1 is the complete file."""
    digest = remote_file.seed.copy()
    digest.update(str(index).encode())
    return str(digest.hexdigest()[:40])


def _sha256(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()
