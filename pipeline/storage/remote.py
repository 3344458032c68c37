"""`Remote`: the files of a shard set behind a URL, read through the machine's disk cache.

A cached file is known by its URL and its identity: the SHA-256 from the set's manifest, else what the store reports
(size and ETag, or similar). A changed set therefore never gets bytes of the old one. The manifest itself is fetched
every time it is opened.

What a process finds out about a file of the store (it is too short, has other bytes than the manifest lists, or was
downloaded again because a sample was damaged) is noted in the cache. All processes that had opened the set by then use
the note, and ask the store no more. A set that is opened later is looked at afresh.

Connections must not be shared between processes: create one `Remote` per rank, never before a fork.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from resolute.errors import FileEndsEarly, Missing, ResoluteError, StorageError

from .base import MAX_OPEN_FILES, Files, OpenFile, Write
from .cache import DAMAGED, Cache, CacheSettings, cache_errors
from .cancel import CancelScope
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


@dataclass
class _Prefetch:
    """A download ahead of time, which ends when the last of its owners has closed."""

    nbytes: int
    owners: set[Files]
    scope: CancelScope
    future: Future[OpenFile] | None = None


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
        self._prefetching: dict[str, _Prefetch] = {}
        self._since_ns = time.time_ns()  # of notes in the cache that count, see above
        self._all_reads = CancelScope()  # those of all readers, which `close` cancels
        self._reads = self._all_reads.child()  # own ones; replaced by `interrupt`
        self._pool = DaemonPool(self._settings.requests, name="resolute-fetch", cancel=self.interrupt)

    def __reduce__(self) -> tuple[object, ...]:
        return Remote, (self._url, self._settings)

    def for_reader(self) -> Remote:
        own = object.__new__(Remote)
        own.__dict__.update(self.__dict__, _reads=self._all_reads.child())
        return own

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
            return self._client.info(name, scope=self._reads)
        except Missing:
            return None

    def local(self, name: str) -> Path:
        try:
            if name != "manifest.json":
                return self._keep(self._file(name), partial(self._download, self._file(name), scope=self._reads))
            text = bytearray()

            def write(data: memoryview, offset: int) -> None:
                text[offset:] = data

            since_ns = time.time_ns()
            sha256 = self._client.download(name, write, most=_MAX_MANIFEST_BYTES, scope=self._reads)
        except Missing as error:
            raise FileNotFoundError(2, str(error), self.where(name)) from None
        with suppress(ValueError, TypeError, KeyError):  # why: `read_manifest` reports what is wrong with it
            self._listed = dict(json.loads(text)["files"])
            self._files.clear()
            self._since_ns = since_ns
            self.release()
        return self._keep(self._known(name, len(text), sha256), lambda write: write(memoryview(text), 0))

    def expect(self, listed: Mapping[str, Any]) -> None:
        self._listed = dict(listed)

    def read(self, name: str, offset: int, nbytes: int, *, fresh: bool = False) -> bytes:
        file = self._file(name)
        if offset + nbytes > file.nbytes:
            raise FileEndsEarly(
                f"{self.where(name)}: ends too early, got {file.nbytes} bytes, expected {offset + nbytes} or more; "
                "upload the set again",
                max(0, file.nbytes - offset),
                file.nbytes,
            )
        path = self._cache.path(file.cached)
        for _ in range(2):
            with cache_errors(path):
                if fresh:
                    with self._lock:
                        self._opened.pop(name, None)
                opened = self._cached(file, fresh=fresh) if fresh else self.open(name)
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
                for key in [key for key, each in self._opened.items() if now - each[1] > TOUCH_S]:
                    del self._opened[key]
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
            ahead = self._prefetching.get(name)
            if ahead is not None and not ahead.scope.cancelled():
                ahead.owners.add(self)
                return True
            if self._cache.has(file.cached):
                return True
            pending = self.pending_bytes()
            if pending and pending + file.nbytes > min(self._settings.ahead_bytes, self._settings.limit_bytes // 4):
                return False
            ahead = self._prefetching[name] = _Prefetch(file.nbytes, {self}, self._all_reads.child())
            try:
                ahead.future = self._pool.submit(partial(self._cached, file, scope=ahead.scope))
                # its errors are ignored. why: `read` will raise them
                ahead.future.add_done_callback(lambda _: self._prefetched(name, ahead))
            except RuntimeError:  # closed meanwhile
                self._prefetched(name, ahead)
            except BaseException:  # Ctrl-C
                self._prefetched(name, ahead)
                raise
        return True

    def _prefetched(self, name: str, ahead: _Prefetch) -> None:
        with self._lock:
            if self._prefetching.get(name) is ahead:
                del self._prefetching[name]

    def pending_bytes(self) -> int:
        """Bytes of prefetches that are not complete yet, those of other readers included."""
        with self._lock:
            return sum(ahead.nbytes for ahead in self._prefetching.values())

    def _cached(self, file: _RemoteFile, *, fresh: bool = False, scope: CancelScope | None = None) -> OpenFile:
        """The file, downloaded if it is not cached.

        `fresh`: also if it is, once: if the file is damaged in the store too, each of its samples is read afresh.
        """
        scope = scope or self._reads
        if not self._cache.has(file.cached):
            self._check_readable(file)  # why: other files would be evicted to make room
        download = partial(self._download, file, scope=scope, fresh=fresh)
        is_stale = (lambda: not self._note(file)) if fresh else None
        try:
            return self._cache.open(file.cached, file.nbytes, download, scope=scope, is_stale=is_stale)
        except _OtherBytesError as error:
            # why not refused: the reader finds the samples that are damaged. why another name: of what the bytes are
            actual = self._files[file.name] = self._known(file.name, file.nbytes, error.sha256, listed=False)
            return self._cached(actual, scope=scope)

    def _note(self, file: _RemoteFile) -> dict[str, Any]:
        return self._cache.read_note(file.cached, since_ns=self._since_ns)

    def _check_readable(self, file: _RemoteFile) -> dict[str, Any]:
        """The note about a file. Raises `FileEndsEarly` if it says that the store has another size."""
        note = self._note(file)
        if "ends_early" in note:
            raise FileEndsEarly(str(note["ends_early"]), 0, 0)
        return note

    def _keep(self, file: _RemoteFile, download: Callable[[Write], object]) -> Path:
        """Path of a file that stays in the cache until `close`."""
        path = self._cache.path(file.cached)
        if path not in self._kept:
            try:
                self._kept[path] = self._cache.open(
                    file.cached, file.nbytes, download, scope=self._reads, keep=True, sha256=file.sha256
                )
            except _OtherBytesError as error:
                raise ResoluteError(
                    f"{self.where(file.name)}: not what the set's manifest lists, got SHA-256 {error.sha256[:12]}…, "
                    f"expected {str(file.sha256)[:12]}…; upload the set again, its manifest last"
                ) from None
        return path

    def _download(self, file: _RemoteFile, write: Write, *, scope: CancelScope, fresh: bool = False) -> None:
        if "other_sha256" in (note := self._check_readable(file)):  # why again: this process waited for another
            raise _OtherBytesError(str(note["other_sha256"]))
        try:
            for _ in range(2):  # why: bytes may change on the way
                got = self._client.download(file.name, write, file.nbytes, scope=scope)
                if file.sha256 in (None, got):
                    if fresh:
                        self._cache.write_note(file.cached, renewed=True)
                    return
        except FileEndsEarly as error:
            self._cache.write_note(file.cached, ends_early=str(error))
            raise
        self._cache.write_note(file.cached, other_sha256=got)
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
                file = self._known(name, *self._client.info(name, scope=self._reads), listed=False)
            self._files[name] = file
        return file

    def _known(self, name: str, nbytes: int, identity: str, *, listed: bool = True) -> _RemoteFile:
        key = hashlib.sha256(json.dumps([self._url, name, nbytes, identity]).encode()).hexdigest()[:40]
        return _RemoteFile(name, nbytes, identity if listed else None, f"{key}-{name.replace('/', '-')[-80:]}")

    def release(self) -> None:
        with self._lock:
            self._opened.clear()

    def interrupt(self) -> None:
        before, self._reads = self._reads, self._all_reads.child()
        before.cancel()
        with self._lock:
            for ahead in list(self._prefetching.values()):
                ahead.owners.discard(self)
                if not ahead.owners and ahead.future is not None:
                    ahead.scope.cancel()
                    ahead.future.cancel()  # if it has not begun

    def close(self) -> None:
        self._all_reads.cancel()
        self._pool.close()
        self.release()
        self._kept.clear()
