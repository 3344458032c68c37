"""`Remote`: the files of a shard set behind a URL, read through the machine's disk cache.

A cached file is known by its URL and its identity: the SHA-256 from the set's manifest, else what the store reports
(size and ETag, or similar). A changed set therefore never gets bytes of the old one. The manifest itself is fetched
every time it is opened.

Connections must not be shared between processes: create one `Remote` per rank, never before a fork.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from resolute.errors import FileEndsEarly, Missing, ResoluteError, StorageError

from .base import MAX_OPEN_FILES, Files, OpenFile, Write
from .cache import DAMAGED, Cache, CacheSettings, cache_errors
from .client import Client
from .read_at import read_at
from .threads import DaemonPool

__all__ = ["Remote"]

TOUCH_S = 5.0  # an open file is opened again after this long: sets its access time, and lets go of an evicted one
_MAX_MANIFEST_BYTES = 256 << 20


@dataclass(frozen=True)
class _RemoteFile:
    name: str
    nbytes: int
    sha256: str | None  # of its content, if the manifest lists it
    cached: str  # its name in the cache


class _OtherBytesError(Exception):
    """The store has other bytes than the manifest lists."""

    def __init__(self, sha256: str) -> None:
        super().__init__(sha256)
        self.sha256 = sha256


class Remote(Files):
    """The files of a shard set behind a URL. Use as a context manager."""

    remote = True

    def __init__(self, url: str, cache: CacheSettings | None = None) -> None:
        """Raises `ResoluteError` if the URL's driver is not installed, `StorageError` if the cache cannot be used."""
        self._url, self._settings = url.rstrip("/"), cache or CacheSettings()
        self._client = Client(self._url, tries=self._settings.tries, stall_s=self._settings.stall_s)
        self._cache = Cache(self._settings.folder, self._settings.limit_bytes)
        self._lock = threading.RLock()  # why: `read` drops a file under it
        self._files: dict[str, _RemoteFile] = {}
        self._listed: dict[str, Any] = {}  # `files` of the manifest
        self._opened: dict[str, tuple[OpenFile, float]] = {}  # and when
        self._kept: dict[Path, OpenFile] = {}  # of `local`
        self._renewed: dict[str, tuple[int, int] | None] = {}  # downloaded again by `read`: version in the cache
        self._prefetching: dict[str, int] = {}  # bytes by name
        self._pool = DaemonPool(self._settings.requests, name="resolute-fetch", files=self)

    def __reduce__(self) -> tuple[object, ...]:
        return Remote, (self._url, self._settings)

    @property
    def root(self) -> str:
        return self._client.root

    def counts(self) -> dict[str, int]:
        """Counters of this process: requests, downloaded bytes, damaged and evicted files of the cache."""
        return {
            "requests": self._client.requests,
            "fetched_bytes": self._client.fetched_bytes,
            "damaged": self._cache.damaged,
            "evicted": self._cache.evicted,
        }

    def where(self, name: str) -> str:
        return self._client.where(name)

    def file_version(self, name: str) -> tuple[int, str] | None:
        try:
            return self._client.info(name)
        except Missing:
            return None

    def local(self, name: str) -> Path:
        try:
            if name != "manifest.json":
                return self._keep(self._file(name), partial(self._download, self._file(name)))
            text = bytearray()

            def write(data: memoryview, offset: int) -> None:
                text[offset:] = data

            sha256 = self._client.download(name, write, most=_MAX_MANIFEST_BYTES)
        except Missing as error:
            raise FileNotFoundError(2, str(error), self.where(name)) from None
        with suppress(ValueError, TypeError, KeyError):  # why: `read_manifest` reports what is wrong with it
            self._listed = dict(json.loads(text)["files"])
            self._files.clear()
            self._renewed.clear()
            self.release()
        return self._keep(self._known(name, len(text), sha256), lambda write: write(memoryview(text), 0))

    def read(self, name: str, offset: int, nbytes: int, *, fresh: bool = False) -> bytes:
        file = self._file(name)
        if offset + nbytes > file.nbytes:
            raise FileEndsEarly(
                f"{self.where(name)}: ends too early, got {file.nbytes} bytes, expected {offset + nbytes} or more; "
                "upload the set again",
                max(0, file.nbytes - offset),
            )
        if fresh:
            # why once: if the file is damaged in the store too, each of its samples is read afresh
            version = self._cache.version(file.cached)
            if version is None or self._renewed.get(name) != version:
                self._drop(file)
        path = self._cache.path(file.cached)
        for _ in range(2):
            with cache_errors(path):
                opened = self._cached(file) if fresh else self.open(name)
                if fresh:
                    self._renewed[name] = self._cache.version(file.cached)
                try:
                    data = read_at(opened.fd, nbytes, offset)
                except OSError as error:
                    if error.errno not in DAMAGED:
                        raise
                    data = b""
            if len(data) == nbytes:
                return data
            self._drop(file)
        raise StorageError(
            f"{path}: the cache cannot be used, got a file that was damaged again at once, expected a working disk; "
            "set RESOLUTE_CACHE to a folder on another one"
        )

    def open(self, name: str) -> OpenFile:
        file, since = self._opened.get(name, (None, 0.0))
        if file is None or time.monotonic() - since > TOUCH_S:
            file, now = self._cached(self._file(name)), time.monotonic()
            with self._lock:  # why the old ones go: they may keep evicted files on the disk
                self._opened = {key: each for key, each in self._opened.items() if now - each[1] <= TOUCH_S}
                if len(self._opened) >= MAX_OPEN_FILES:
                    self._opened.pop(next(iter(self._opened)))
                self._opened[name] = file, now
        return file

    def prefetch(self, name: str) -> bool:
        """Download a file in the background, at most `requests` at a time.

        False if more than `ahead_bytes` would be pending (or a quarter of the cache, so that no prefetched file is
        evicted before it is read).
        """
        if name in self._opened:
            return True
        try:
            file = self._file(name)
        except ResoluteError:
            return True  # why: `read` will raise it
        with self._lock:
            if name in self._prefetching or self._cache.has(file.cached):
                return True
            pending = sum(self._prefetching.values())
            if pending and pending + file.nbytes > min(self._settings.ahead_bytes, self._settings.limit_bytes // 4):
                return False
            self._prefetching[name] = file.nbytes
        try:
            future = self._pool.submit(partial(self._cached, file))
            # its errors are ignored. why: `read` will raise them
            future.add_done_callback(lambda _: self._prefetched(name))
        except RuntimeError:  # closed meanwhile
            self._prefetched(name)
        except BaseException:  # Ctrl-C
            self._prefetched(name)
            raise
        return True

    def _prefetched(self, name: str) -> None:
        with self._lock:
            self._prefetching.pop(name, None)

    def pending_bytes(self) -> int:
        """Bytes of prefetches that are not complete yet."""
        with self._lock:
            return sum(self._prefetching.values())

    def _cached(self, file: _RemoteFile) -> OpenFile:
        """The file, downloaded if it is not cached."""
        stopped = self._client.stopped
        try:
            download = partial(self._download, file, stopped=stopped)
            return self._cache.open(file.cached, file.nbytes, download, stopped=stopped)
        except _OtherBytesError as error:
            # why not refused: the reader finds the samples that are damaged. why another name: of what the bytes are
            actual = self._files[file.name] = self._known(file.name, file.nbytes, error.sha256, listed=False)
            return self._cached(actual)

    def _keep(self, file: _RemoteFile, download: Callable[[Write], object]) -> Path:
        """Path of a file that stays in the cache until `close`."""
        path = self._cache.path(file.cached)
        if path not in self._kept:
            try:
                self._kept[path] = self._cache.open(
                    file.cached, file.nbytes, download, stopped=self._client.stopped, keep=True, sha256=file.sha256
                )
            except _OtherBytesError as error:
                raise ResoluteError(
                    f"{self.where(file.name)}: not what the set's manifest lists, got SHA-256 {error.sha256[:12]}…, "
                    f"expected {str(file.sha256)[:12]}…; upload the set again, its manifest last"
                ) from None
        return path

    def _download(self, file: _RemoteFile, write: Write, *, stopped: threading.Event | None = None) -> None:
        for _ in range(2):  # why: bytes may change on the way
            got = self._client.download(file.name, write, file.nbytes, stopped=stopped)
            if file.sha256 in (None, got):
                return
        raise _OtherBytesError(got)

    def _drop(self, file: _RemoteFile) -> None:
        with self._lock:
            self._cache.drop(file.cached)
            self._opened.pop(file.name, None)

    def _file(self, name: str) -> _RemoteFile:
        """Raises as `read`."""
        if (file := self._files.get(name)) is None:
            try:
                listed = self._listed[name]
                file = self._known(name, int(listed["bytes"]), str(listed["sha256"]))
            except (KeyError, TypeError, ValueError):
                file = self._known(name, *self._client.info(name), listed=False)
            self._files[name] = file
        return file

    def _known(self, name: str, nbytes: int, identity: str, *, listed: bool = True) -> _RemoteFile:
        key = hashlib.sha256(json.dumps([self._url, name, nbytes, identity]).encode()).hexdigest()[:40]
        return _RemoteFile(name, nbytes, identity if listed else None, f"{key}-{name.replace('/', '-')[-80:]}")

    def release(self) -> None:
        self._opened = {}

    def interrupt(self) -> None:
        self._pool.cancel()
        self._client.interrupt()

    def close(self) -> None:
        self._client.stop()
        self._pool.close()
        self.release()
        self._kept.clear()
