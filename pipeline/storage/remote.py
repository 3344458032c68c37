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
from functools import partial
from pathlib import Path
from typing import Any

from resolute.errors import FileEndsEarly, Missing, ResoluteError

from .base import MAX_OPEN_FILES, Files, OpenFile
from .disk_cache import HEADER, TOUCH_S, Cache, CacheSettings, sha256_of, write_at
from .object_store import Store
from .threads import DaemonPool

__all__ = ["Remote"]

_SHA256 = "sha256:"  # begins an identity that is the content's SHA-256


class _RemoteFile:
    """Size, content identity and cache keys of a remote file, which is fetched in chunks of `step` bytes."""

    def __init__(self, url: str, name: str, nbytes: int, identity: str, step: int) -> None:
        self.name, self.nbytes, self._step = name, nbytes, step
        self.sha256 = identity.removeprefix(_SHA256) if identity.startswith(_SHA256) else None  # of the content, hex
        self._seed = hashlib.sha256(json.dumps([url, name, identity, nbytes, step]).encode())

    def key(self, index: int) -> str:
        """Cache key, 40 hex digits, of a chunk; `index` -1 is the complete file."""
        digest = self._seed.copy()
        digest.update(str(index).encode())
        return digest.hexdigest()[:40]

    def span(self, index: int) -> tuple[int, int]:
        """Offset and bytes of a chunk; the last one may be short."""
        return index * self._step, min(self._step, self.nbytes - index * self._step)


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
            identity = f"{_SHA256}{hashlib.sha256(text).hexdigest()}"
            return self._file(self._remote_file_of(name, len(text), identity), text)
        return self._file(self._remote_file(name))

    def read(self, name: str, offset: int, nbytes: int, *, fresh: bool = False) -> bytes:
        with self._missing(name):
            file = self._remote_file(name)
        stop, step = offset + nbytes, self._settings.chunk_bytes
        if fresh:
            self._opened.clear()
        if stop > file.nbytes:
            raise FileEndsEarly(
                f"{self.where(name)}: ends too early, got {file.nbytes} bytes, expected {stop} or more; "
                "upload the set again", max(0, file.nbytes - offset),
            )  # fmt: skip
        parts = [
            self._chunk(file, index, max(offset - index * step, 0), min(stop - index * step, step), fresh)
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
            file = self._remote_file(name)
            _, nbytes = file.span(index)
            if nbytes <= 0:
                return None
            fetch = partial(self._fetch, file, index)
            return self._cache.open(file.key(index), nbytes, fetch, closed=self._store.stopped)

    def prefetch(self, name: str, offset: int, nbytes: int) -> bool:
        """Fetch the chunks that hold these bytes in the background, at most `requests` at a time.

        False if more than `ahead_bytes` would be pending (or a quarter of the cache, so that no prefetched chunk is
        evicted before it is read); the chunks accepted up to then are fetched.
        """
        step, max_bytes = self._settings.chunk_bytes, min(self._settings.ahead_bytes, self._settings.limit_bytes // 4)
        try:
            file = self._remote_file(name)
        except (FileNotFoundError, ResoluteError):
            return True  # why: `read` will raise it
        for index in range(offset // step, -(-min(offset + nbytes, file.nbytes) // step)):
            key, (_, size_bytes) = file.key(index), file.span(index)
            if key in self._prefetching or self._cache.has(key):
                continue
            with self._lock:
                if self._pending_bytes and self._pending_bytes + size_bytes > max_bytes:
                    return False
                self._prefetching.add(key)
                self._pending_bytes += size_bytes
            try:
                future = self._pool.submit(partial(self._prefetch_chunk, file, index))
            except RuntimeError:  # closed meanwhile
                self._prefetch_done(key, size_bytes)
            else:
                future.add_done_callback(lambda _, key=key, size=size_bytes: self._prefetch_done(key, size))  # type: ignore[misc]
        return True

    def pending_bytes(self) -> int:
        """Bytes of prefetches that are not complete yet."""
        return self._pending_bytes

    def _prefetch_chunk(self, file: _RemoteFile, index: int) -> None:
        with suppress(FileNotFoundError, ResoluteError):  # why: `read` will raise it
            self._chunk(file, index, 0, 0, False)

    def _prefetch_done(self, key: str, size_bytes: int) -> None:
        with self._lock:
            self._prefetching.discard(key)
            self._pending_bytes -= size_bytes

    def _fetch(self, file: _RemoteFile, index: int) -> bytes:
        return self._store.read_range(file.name, *file.span(index))

    def _chunk(self, file: _RemoteFile, index: int, start: int, stop: int, fresh: bool) -> bytes:
        """Bytes [start, stop) of a chunk."""
        _, nbytes = file.span(index)
        fetch = partial(self._fetch, file, index)
        with self._missing(file.name):
            return self._cache.read(
                file.key(index), start, stop, nbytes, fetch, fresh=fresh, closed=self._store.stopped
            )

    def _file(self, file: _RemoteFile, text: bytes | None = None) -> Path:
        """A complete file in the cache: `text` if it was already fetched, else downloaded in parallel ranges."""

        def write(handle: int) -> None:
            if text is not None:
                write_at(handle, text, 0)
                return

            def fetch_chunk(index: int) -> None:
                write_at(handle, self._fetch(file, index), file.span(index)[0])

            chunks = range(-(-file.nbytes // self._settings.chunk_bytes))
            with DaemonPool(self._settings.requests, name="resolute-fetch-file", files=self) as pool:
                for part in [pool.submit(partial(fetch_chunk, index)) for index in chunks]:
                    part.result()
            if file.sha256 is not None and (got := sha256_of(handle)) != file.sha256:
                raise ResoluteError(
                    f"{self.where(file.name)}: not what the set's manifest lists, got SHA-256 {got[:12]}…, expected "
                    f"{file.sha256[:12]}…; upload the set again, its manifest last"
                )

        label = file.name.replace("/", "-")[-80:]
        return self._cache.file(f"{file.key(-1)}-{label}", file.nbytes, file.sha256, write, closed=self._store.stopped)

    def _remote_file(self, name: str) -> _RemoteFile:
        if (file := self._remote_files.get(name)) is None:
            try:
                listed = self._listed[name]
                nbytes, identity = int(listed["bytes"]), f"{_SHA256}{listed['sha256']}"
            except (KeyError, TypeError, ValueError):
                nbytes, identity = self._store.info(name)
            file = self._remote_files[name] = self._remote_file_of(name, nbytes, identity)
        return file

    def _remote_file_of(self, name: str, nbytes: int, identity: str) -> _RemoteFile:
        return _RemoteFile(self._url, name, nbytes, identity, self._settings.chunk_bytes)

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
