"""The files of a shard set behind a URL, read through the machine's cache.

What a request brings (`store.py`) goes through the machine's cache (`cache.py`). A file's place there is named by
its URL and by what it is: its SHA-256 in the set's manifest, else what the store tells of it (size and ETag, or
whatever it has), so that a set that changed never gets the bytes of the old one. The manifest is fetched anew each
time it is asked for.

Connections belong to one process: make `Remote` in each rank, never before a fork.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from pipeline.errors import FileEndsEarly, Missing, ResoluteError

from .disk_cache import HEADER, TOUCH_S, Cache, CacheSettings
from .files import DaemonPool, Files, OpenFile
from .object_store import Store

__all__ = ["Remote"]

_OPEN_FILES = 256  # well under the usual limit of 1024 a process


@dataclass(frozen=True)
class _Object:
    """What a remote file is: its bytes, a name for its content, and the beginning of its chunks' keys."""

    nbytes: int
    identity: str
    seed: Any  # a hashlib object; copied, never changed


class Remote(Files):
    """The files of a shard set behind a URL. Use as a context manager."""

    remote = True

    def __init__(self, url: str, cache: CacheSettings | None = None) -> None:
        """Raises `ResoluteError` if the URL's driver is not installed or the cache cannot be used."""
        self._url, self._settings = url.rstrip("/"), cache or CacheSettings()
        self._store = Store(
            self._url, tries=self._settings.tries, first_wait_s=self._settings.first_wait_s,
            stall_s=self._settings.stall_s,
        )  # fmt: skip
        self._cache = Cache(self._settings.folder, self._settings.limit_bytes)
        self._lock = threading.Lock()
        self._wanted_bytes = 0
        self._objects: dict[str, _Object] = {}
        self._listed: dict[str, Any] = {}  # the manifest's files
        self._wanted: set[str] = set()
        self._opened: dict[tuple[str, int], tuple[OpenFile, float]] = {}  # chunks, and when that was
        self._pool = DaemonPool(self._settings.requests, name="resolute-fetch", files=self)

    def __reduce__(self) -> tuple[object, ...]:
        return Remote, (self._url, self._settings)

    @property
    def root(self) -> str:
        return self._store.root

    @property
    def chunk_bytes(self) -> int:
        """Reads and wishes are served in ranges of this size, from the start of each file."""
        return self._settings.chunk_bytes

    def counts(self) -> dict[str, int]:
        """What happened so far: requests and how many of them were new tries, bytes fetched; of the cache, files
        found damaged and files removed to make room (by this process).
        """
        return {
            "requests": self._store.requests, "retries": self._store.retries,
            "fetched_bytes": self._store.fetched_bytes, "damaged": self._cache.damaged,
            "evicted": self._cache.room.evicted,
        }  # fmt: skip

    def where(self, name: str) -> str:
        return f"{self._store.root}/{name}"

    def identity(self, name: str) -> tuple[int, str] | None:
        try:
            return self._store.info(name)
        except FileNotFoundError:
            return None

    def local(self, name: str) -> Path:
        if name == "manifest.json":
            text = self._store.whole(name)
            with suppress(ValueError, TypeError, KeyError):  # why: whoever reads a manifest says what is wrong with it
                self._listed = dict(json.loads(text)["files"])
                self._objects.clear()
                self._opened.clear()
            return self._file(name, self._object_of(name, len(text), f"sha256:{_sha256(text)}"), text)
        return self._file(name, self._object(name), None)

    def read(self, name: str, offset: int, nbytes: int, *, fresh: bool = False) -> bytes:
        try:
            known = self._object(name)
        except FileNotFoundError:
            raise self._missing(name) from None
        stop, step = offset + nbytes, self._settings.chunk_bytes
        if fresh:
            self._opened.clear()
        if stop > known.nbytes:
            raise FileEndsEarly(
                f"{self.where(name)}: ends too early, got {known.nbytes} bytes, expected {stop} or more; "
                "upload the set again", max(0, known.nbytes - offset),
            )  # fmt: skip
        parts = [
            self._chunk(name, known, index, max(offset - index * step, 0), min(stop - index * step, step), fresh)
            for index in range(offset // step, -(-stop // step))
        ]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def place(self, name: str, offset: int, nbytes: int) -> tuple[OpenFile, int] | None:
        index, step, now = offset // self._settings.chunk_bytes, self._settings.chunk_bytes, time.monotonic()
        if not 0 < nbytes <= (index + 1) * step - offset:
            return None
        file, since = self._opened.get((name, index), (None, 0.0))
        if file is None or now - since > TOUCH_S:
            file = self._open(name, index)
            if file is None:
                return None
            if len(self._opened) >= _OPEN_FILES:  # why these go: they may hold what was removed
                self._opened = {key: held for key, held in list(self._opened.items()) if now - held[1] <= TOUCH_S}
            if len(self._opened) < _OPEN_FILES:
                self._opened[name, index] = file, now
        return file, HEADER.size + offset - index * step

    def _open(self, name: str, index: int) -> OpenFile | None:
        try:
            known = self._object(name)
            at = index * self._settings.chunk_bytes
            nbytes = min(self._settings.chunk_bytes, known.nbytes - at)
            if nbytes <= 0:
                return None
            return self._cache.open(
                _key(known, index), nbytes, lambda: self._store.part(name, at, nbytes), closed=self._store.stopped
            )
        except FileNotFoundError:
            raise self._missing(name) from None

    def want(self, name: str, offset: int, nbytes: int) -> bool:
        """Fetch the chunks that hold these bytes in the background, at most `requests` at a time.

        False if more than `ahead_bytes` would be under way (or a quarter of the cache, so that nothing that was
        wanted is gone before it is read); what of it was taken stays so.
        """
        step, most = self._settings.chunk_bytes, min(self._settings.ahead_bytes, self._settings.limit_bytes // 4)
        try:
            known = self._object(name)
        except (FileNotFoundError, ResoluteError):
            return True  # why: `read` tells it
        for index in range(offset // step, -(-min(offset + nbytes, known.nbytes) // step)):
            key, size_bytes = _key(known, index), min(step, known.nbytes - index * step)
            if key in self._wanted or self._cache.has(key):
                continue
            with self._lock:
                if self._wanted_bytes and self._wanted_bytes + size_bytes > most:
                    return False
                self._wanted.add(key)
                self._wanted_bytes += size_bytes
            try:
                future = self._pool.submit(partial(self._fulfil, name, known, index))
            except RuntimeError:  # closed meanwhile
                self._fulfilled(key, size_bytes)
            else:
                future.add_done_callback(lambda _, key=key, size=size_bytes: self._fulfilled(key, size))  # type: ignore[misc]
        return True

    def under_way(self) -> int:
        """Bytes that were wanted and are not there yet."""
        return self._wanted_bytes

    def _fulfil(self, name: str, known: _Object, index: int) -> None:
        with suppress(FileNotFoundError, ResoluteError):  # why: `read` meets it again, and raises
            self._chunk(name, known, index, 0, 0, False)

    def _fulfilled(self, key: str, size_bytes: int) -> None:
        with self._lock:
            self._wanted.discard(key)
            self._wanted_bytes -= size_bytes

    def _chunk(self, name: str, known: _Object, index: int, start: int, stop: int, fresh: bool) -> bytes:
        at, step = index * self._settings.chunk_bytes, self._settings.chunk_bytes
        nbytes = min(step, known.nbytes - at)

        def fetch() -> bytes:
            return self._store.part(name, at, nbytes)

        try:
            return self._cache.read(
                _key(known, index), start, stop, nbytes, fetch, fresh=fresh, closed=self._store.stopped
            )
        except FileNotFoundError:
            raise self._missing(name) from None

    def _file(self, name: str, known: _Object, text: bytes | None) -> Path:
        """The whole file in the cache: `text` if it is at hand, else fetched, many ranges at once."""
        step = self._settings.chunk_bytes

        def write(handle: int) -> str:
            if text is not None:
                os.pwrite(handle, text, 0)
                return _sha256(text)

            def one(at: int) -> None:
                data = memoryview(self._store.part(name, at, min(step, known.nbytes - at)))
                while data:
                    done = os.pwrite(handle, data, at)
                    data, at = data[done:], at + done

            with DaemonPool(self._settings.requests, name="resolute-fetch-file", files=self) as pool:
                for part in [pool.submit(partial(one, at)) for at in range(0, known.nbytes, step)]:
                    part.result()
            with open(handle, "rb", closefd=False) as file:
                file.seek(0)
                got = hashlib.file_digest(file, "sha256").hexdigest()
            expected = known.identity.removeprefix("sha256:")
            if known.identity.startswith("sha256:") and got != expected:
                raise ResoluteError(
                    f"{self.where(name)}: not what the set's manifest lists, got SHA-256 {got[:12]}…, expected "
                    f"{expected[:12]}…; upload the set again, its manifest last"
                )
            return got

        label = name.replace("/", "-")[-80:]
        return self._cache.file(f"{_key(known, -1)}-{label}", known.nbytes, write, closed=self._store.stopped)

    def _object(self, name: str) -> _Object:
        known = self._objects.get(name)
        if known is None:
            try:
                listed = self._listed[name]
                known = self._object_of(name, int(listed["bytes"]), f"sha256:{listed['sha256']}")
            except (KeyError, TypeError, ValueError):
                known = self._object_of(name, *self._store.info(name))
            self._objects[name] = known
        return known

    def _object_of(self, name: str, nbytes: int, identity: str) -> _Object:
        seed = hashlib.sha256(json.dumps([self._url, name, identity, nbytes, self._settings.chunk_bytes]).encode())
        return _Object(nbytes, identity, seed)

    def _missing(self, name: str) -> Missing:
        return Missing(f"{self.where(name)}: not found, expected a file of the set; upload the set again")

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

    def __enter__(self) -> Remote:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _key(known: _Object, index: int) -> str:
    """40 hexadecimal digits for a chunk of a file; -1 is the whole file."""
    digest = known.seed.copy()
    digest.update(str(index).encode())
    return str(digest.hexdigest()[:40])


def _sha256(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()
