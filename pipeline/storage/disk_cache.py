"""Disk cache of remote files, shared by all processes of a machine.

    CACHE/v1/used               bytes reserved; locked while bytes are reserved (see disk_quota.py)
    CACHE/v1/chunks/KK/KEY      a header (magic, key, SHA-256), then one range of a tar
    CACHE/v1/files/KK/KEY-NAME  a complete file (an index), locked by the processes that use it; .sha256 beside it
    *.part                      a file being written by the process that holds its lock

On a miss a process locks the .part file, fetches, writes and renames it, while all others wait; a lock ends with its
process, so another process takes over from a killed one. Each process checks the SHA-256 of each file when it first
opens it. Recency is the file's access time, which the cache sets itself. A damaged file is dropped and fetched again;
a cache that cannot be used is a `StorageError`, never a damaged sample.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import hashlib
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pipeline.errors import StorageError

from .cache_settings import HEADER, CacheSettings
from .disk_quota import DIGEST, DiskQuota
from .exclusive_writer import cache_error, exclusive_writer, same_file
from .files import OpenFile
from .read_at import read_at

__all__ = ["HEADER", "TOUCH_S", "Cache", "CacheSettings"]

_MAGIC = b"RSLTCHK1"
TOUCH_S = 5.0  # each process updates a chunk's access time at most this often
_VERSION = "v1"
_DAMAGED = (errno.EIO, errno.ESTALE)  # read errors after which a cached file is dropped


class Cache:
    """The files in a cache folder. Thread-safe, and safe to share between processes."""

    def __init__(self, folder: Path, limit_bytes: int, *, patience_s: float = 120.0) -> None:
        """`patience_s`: how long to wait for another process that fetches the same chunk. Raises `StorageError`."""
        self._base, self._patience_s = folder / _VERSION, patience_s
        try:
            self._base.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cache_error(folder, error) from None
        self.quota = DiskQuota(self._base, limit_bytes)
        self.damaged = 0  # damaged files dropped so far
        self._seen: dict[str, tuple[int, int, float]] = {}  # verified chunks: inode, mtime in ns, last touch
        self._seen_max = 100_000
        self._pins: dict[Path, OpenFile] = {}
        self._lock = threading.Lock()

    def read(self, key: str, start: int, stop: int, nbytes: int, fetch: Callable[[], bytes], *, fresh: bool = False,
             closed: threading.Event | None = None) -> bytes:  # fmt: skip
        """Return bytes [start, stop) of the chunk `key` (40 hex digits, `nbytes` long); `fetch()` downloads all of it.

        `fresh` drops the cached chunk first. `closed` ends the wait for another process.
        Raises `StorageError` if the cache cannot be used, `Interrupted` if `closed` is set, and what `fetch` raises.
        """
        path = self._chunk(key)
        if fresh:
            path.unlink(missing_ok=True)
        elif (data := self._cached_range(key, path, start, stop, nbytes)) is not None:
            return data
        with exclusive_writer(path, self._patience_s, closed) as part:
            # why: another process may have fetched it while this one waited
            if (data := self._cached_range(key, path, start, stop, nbytes)) is not None:
                return data
            chunk = fetch()
            if part is not None:
                head = HEADER.pack(_MAGIC, bytes.fromhex(key), nbytes, hashlib.sha256(chunk).digest())
                self._write(part, path, HEADER.size + nbytes, lambda: _put(part, head, chunk))
                stat = os.fstat(part)
                self._remember(key, stat.st_ino, stat.st_mtime_ns)
        return chunk[start:stop]

    def open(
        self, key: str, nbytes: int, fetch: Callable[[], bytes], *, closed: threading.Event | None = None
    ) -> OpenFile | None:
        """Open the chunk; its payload starts at `HEADER.size`. None if it cannot be kept here. Raises as `read`."""
        for _ in range(2):
            if (file := self._open_verified(key, self._chunk(key), nbytes)) is not None:
                return file
            self.read(key, 0, 0, nbytes, fetch, closed=closed)
        return None

    def has(self, key: str) -> bool:
        """Whether the chunk is cached now; it may be damaged, or be evicted a moment later."""
        return os.path.exists(self._chunk(key))  # noqa: PTH110

    def file(
        self, name: str, nbytes: int, write: Callable[[int], str], *, closed: threading.Event | None = None
    ) -> Path:
        """Return the path of a complete file of `nbytes`; it is not evicted until `close`.

        `name` begins with 40 hex digits. `write(handle)` fills the open file and returns its SHA-256 in hex.
        Raises as `read`.
        """
        path = self._base / "files" / name[:2] / name
        until = time.monotonic() + 10 * self._patience_s
        while not self._pin(path, nbytes):
            with exclusive_writer(path, self._patience_s, closed) as part:
                if path.exists():
                    continue
                if part is not None:
                    fill = functools.partial(_fill, part, path, write)
                    self._write(part, path, nbytes, fill)
                elif time.monotonic() > until:
                    raise StorageError(
                        f"{path}: another process has been fetching it for {10 * self._patience_s:.0f} s, expected it "
                        "to end; look for a suspended one, or set RESOLUTE_CACHE to another folder"
                    )
        return path

    def close(self) -> None:
        """Unpin the complete files: they may be evicted from now on."""
        with self._lock:
            self._pins.clear()

    def _pin(self, path: Path, nbytes: int) -> bool:
        """Lock a complete file against eviction if it is cached and intact; drop a damaged one."""
        with self._lock:
            if path in self._pins:
                return True
        if (file := _open(path)) is None:
            return False
        try:
            fcntl.flock(file.fd, fcntl.LOCK_SH)
            if not same_file(path, file.fd):  # evicted while this process waited for the lock
                return False
            stat, intact = os.fstat(file.fd), False
            with suppress(FileNotFoundError), open(file.fd, "rb", closefd=False) as stream:
                if stat.st_size == nbytes:
                    digest = hashlib.file_digest(stream, "sha256").hexdigest().encode()
                    intact = digest == _digest_file(path).read_bytes()
            if intact:
                with suppress(PermissionError):
                    os.utime(file.fd, ns=(time.time_ns(), stat.st_mtime_ns))
                with self._lock:
                    self._pins.setdefault(path, file)
                return True
        except OSError as error:
            if error.errno not in _DAMAGED:
                raise cache_error(path, error) from None
        self._drop(path)
        return False

    def _write(self, part: int, path: Path, nbytes: int, fill: Callable[[], object]) -> None:
        """Reserve space, fill the .part file and rename it. If the disk is full, evict other files and try again."""
        self.quota.reserve(part, nbytes)
        try:
            while True:
                try:
                    fill()
                    break
                except FileNotFoundError:
                    raise
                except OSError as error:
                    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                    if not full or not self.quota.shrink(nbytes):
                        raise cache_error(path, error) from None
            self.quota.publish(path)
        except BaseException:
            self.quota.release(part, nbytes)
            raise

    def _chunk(self, key: str) -> Path:
        return self._base / "chunks" / key[:2] / key

    def _cached_range(self, key: str, path: Path, start: int, stop: int, nbytes: int) -> bytes | None:
        """Bytes [start, stop) if the chunk is cached and intact; drops a damaged one."""
        if (file := self._open_verified(key, path, nbytes)) is None:
            return None
        try:
            data = read_at(file.fd, stop - start, HEADER.size + start)
        except OSError as error:
            if error.errno not in _DAMAGED:
                raise cache_error(path, error) from None
            data = b""
        if len(data) == stop - start:
            return data
        self._drop(path)
        return None

    def _open_verified(self, key: str, path: Path, nbytes: int) -> OpenFile | None:
        """The open chunk if it is cached and intact; drops a damaged one."""
        if (file := _open(path)) is None:
            return None
        try:
            stat = os.fstat(file.fd)
            seen = self._seen.get(key)
            if seen is None or seen[:2] != (stat.st_ino, stat.st_mtime_ns):
                seen = None
                if not _is_intact(file.fd, key, nbytes):
                    self._drop(path)
                    return None
            if seen is None or time.monotonic() - seen[2] > TOUCH_S:
                with suppress(PermissionError):  # owned by another user, in a shared folder
                    os.utime(file.fd, ns=(time.time_ns(), stat.st_mtime_ns))
                self._remember(key, stat.st_ino, stat.st_mtime_ns)
        except OSError as error:
            if error.errno not in _DAMAGED:
                raise cache_error(path, error) from None
            self._drop(path)
            return None
        return file

    def _remember(self, key: str, inode: int, mtime_ns: int) -> None:
        if len(self._seen) >= self._seen_max:
            self._seen.clear()  # why: at worst some chunks are verified again
        self._seen[key] = (inode, mtime_ns, time.monotonic())

    def _drop(self, path: Path) -> None:
        with self._lock:
            self.damaged += 1
        with suppress(FileNotFoundError):
            path.unlink()


def _open(path: Path) -> OpenFile | None:
    try:
        return OpenFile(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise cache_error(path, error) from None


def _put(handle: int, *pieces: bytes) -> None:
    at = 0
    for piece in pieces:
        view = memoryview(piece)
        while view:  # why: pwrite may write fewer bytes than asked
            done = os.pwrite(handle, view, at)
            view, at = view[done:], at + done


def _fill(part: int, path: Path, write: Callable[[int], str]) -> None:
    _digest_file(path).write_text(write(part))


def _is_intact(handle: int, key: str, nbytes: int) -> bool:
    """Whether header and payload are complete and match the SHA-256."""
    if os.fstat(handle).st_size != HEADER.size + nbytes:  # why first: never read a file of the wrong size
        return False
    with open(handle, "rb", closefd=False) as file:
        data = file.read()
    head = HEADER.pack(_MAGIC, bytes.fromhex(key), nbytes, hashlib.sha256(memoryview(data)[HEADER.size :]).digest())
    return data[: HEADER.size] == head and len(data) == HEADER.size + nbytes


def _digest_file(path: Path) -> Path:
    return Path(f"{path}{DIGEST}")
