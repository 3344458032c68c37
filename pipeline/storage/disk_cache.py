"""Disk cache of remote files, shared by all processes of a machine: settings, quota, one writer per file.

    CACHE/v1/used               bytes reserved; locked while bytes are reserved (`DiskQuota`)
    CACHE/v1/chunks/KK/KEY      a header (magic, key, payload bytes, SHA-256), then one range of a tar
    CACHE/v1/files/KK/KEY-NAME  a complete file (an index), locked by the processes that use it
    *.part                      a file being written by the process that holds its lock (`exclusive_writer`)

On a miss a process locks the .part file, fetches, writes and renames it, while all others wait; a lock ends with its
process, so another process takes over from a killed one. Each process checks the SHA-256 of each file when it first
opens it. Recency is the file's access time, which the cache sets itself. A damaged file is dropped and fetched again;
a cache that cannot be used (no space, no file locks) is a `StorageError`, never a damaged sample.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import hashlib
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from resolute.errors import Interrupted, ResoluteError, StorageError
from resolute.lock import same_file, try_lock

from .base import OpenFile
from .read_at import read_at

__all__ = ["HEADER", "TOUCH_S", "Cache", "CacheSettings", "cache_error", "exclusive_writer", "sha256_of",
           "write_at"]  # fmt: skip

HEADER = struct.Struct("<8s20sQ32s")  # of a chunk file: magic, key, payload bytes, payload SHA-256
TOUCH_S = 5.0  # each process updates a chunk's access time at most this often
_MAGIC = b"RSLTCHK1"
_VERSION = "v1"
_PART = ".part"  # suffix of a file being written
_DAMAGED = (errno.EIO, errno.ESTALE)  # read errors after which a cached file is dropped
_SEEN_MAX = 100_000  # verified chunks that a process remembers
_FREE_FRACTION = 20  # an eviction frees 1/20 of the quota
_WORD = 8  # bytes of the counter
_PATIENCE_S, _POLL_S = 60.0, 0.005  # wait for files that other processes are writing
_POLLS_S = (0.001, 0.01)  # between attempts to lock a .part file: first and longest


def _folder() -> Path:
    value = os.environ.get("RESOLUTE_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(value or f"{base}/resolute").expanduser()


def _limit_bytes() -> int:
    value = os.environ.get("RESOLUTE_CACHE_GIB", "64")
    try:
        return int(float(value) * 2**30)
    except (ValueError, OverflowError):
        raise ResoluteError(f"RESOLUTE_CACHE_GIB: got '{value}', expected GiB such as 64 or 0.5; correct it") from None


@dataclass(frozen=True, kw_only=True)
class CacheSettings:
    """Location, size and request limits of the cache of remote data. Changes no result.

    folder         cache folder on a local disk; default $RESOLUTE_CACHE, or `resolute` in the user's cache folder
    limit_bytes    upper bound of the folder's size; default $RESOLUTE_CACHE_GIB, or 64 GiB
    chunk_bytes    size of the ranges a tar is fetched in. why 4 MiB: a request's latency is small against it, and
                   batches that jump between blocks do not fetch much more than they read
    requests       chunks that `prefetch` fetches concurrently; memory: requests * chunk_bytes
    ahead_bytes    `prefetch` refuses hints while more than this many bytes are being fetched
    tries          attempts for each request; the wait before the second is `first_wait_s` and then doubles
    stall_s        a request that receives nothing for this long has failed
    """

    folder: Path = field(default_factory=_folder)
    limit_bytes: int = field(default_factory=_limit_bytes)
    chunk_bytes: int = 4 << 20
    requests: int = 16
    ahead_bytes: int = 512 << 20
    tries: int = 8
    first_wait_s: float = 0.25
    stall_s: float = 20.0

    def __post_init__(self) -> None:
        for name, minimum in (("chunk_bytes", 1), ("requests", 1), ("ahead_bytes", 0), ("tries", 1)):
            if getattr(self, name) < minimum:
                raise ResoluteError(f"cache: {name} got {getattr(self, name)}, expected at least {minimum}; raise it")
        for name in ("first_wait_s", "stall_s"):
            if not 0 < getattr(self, name) < 3600:
                raise ResoluteError(f"cache: {name} got {getattr(self, name)}, expected above 0, below 3600; change it")
        if self.limit_bytes < 2 * (self.chunk_bytes + HEADER.size):
            raise ResoluteError(
                f"cache: limit_bytes got {self.limit_bytes}, expected room for at least two chunks of "
                f"{self.chunk_bytes} bytes and the set's index; raise RESOLUTE_CACHE_GIB"
            )


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
        self, name: str, nbytes: int, sha256: str | None, write: Callable[[int], None], *,
        closed: threading.Event | None = None,
    ) -> Path:  # fmt: skip
        """Return the path of a complete file of `nbytes`; it is not evicted until `close`.

        `name` begins with 40 hex digits. `sha256` (hex): of the content; None: a cached file is only checked for its
        size. `write(handle)` fills the open file. Raises as `read`.
        """
        path = self._base / "files" / name[:2] / name
        until = time.monotonic() + 10 * self._patience_s
        while not self._pin(path, nbytes, sha256):
            with exclusive_writer(path, self._patience_s, closed) as part:
                if path.exists():
                    continue
                if part is not None:
                    self._write(part, path, nbytes, functools.partial(write, part))
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

    def _pin(self, path: Path, nbytes: int, sha256: str | None) -> bool:
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
            stat = os.fstat(file.fd)
            if stat.st_size == nbytes and (sha256 is None or sha256_of(file.fd) == sha256):
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
        if len(self._seen) >= _SEEN_MAX:
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


def write_at(handle: int, data: bytes, offset: int) -> None:
    """Write all of `data` to an open file; a single pwrite(2) may write less. Raises `OSError`."""
    rest = memoryview(data)
    while rest:
        done = os.pwrite(handle, rest, offset)
        rest, offset = rest[done:], offset + done


def _put(part: int, head: bytes, chunk: bytes) -> None:
    write_at(part, head, 0)
    write_at(part, chunk, len(head))


def sha256_of(handle: int) -> str:
    """SHA-256, in hex, of an open file. Raises `OSError`."""
    with open(handle, "rb", closefd=False) as file:
        file.seek(0)
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_intact(handle: int, key: str, nbytes: int) -> bool:
    """Whether header and payload are complete and match the SHA-256."""
    if os.fstat(handle).st_size != HEADER.size + nbytes:  # why first: never read a file of the wrong size
        return False
    with open(handle, "rb", closefd=False) as file:
        data = file.read()
    head = HEADER.pack(_MAGIC, bytes.fromhex(key), nbytes, hashlib.sha256(memoryview(data)[HEADER.size :]).digest())
    return data[: HEADER.size] == head and len(data) == HEADER.size + nbytes


class DiskQuota:
    """Keeps the files in `folder` at or below `limit_bytes`. Thread-safe, and safe to share between processes."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder, self.limit_bytes, self.evicted = folder, limit_bytes, 0
        self._counter = folder / "used"
        self._remove_abandoned()
        if self.used() > limit_bytes:  # why: the limit was larger in an earlier run
            with self._locked() as counter:
                self._write(counter, self._evict(0)[0])

    def used(self) -> int:
        """Bytes reserved by all processes; the files are counted if there is no counter yet."""
        with self._locked() as counter:
            used = self._read(counter)
            if used is None:
                used, _ = self._evict(0)
                self._write(counter, used)
            return used

    def reserve(self, handle: int, nbytes: int) -> None:
        """Reserve `nbytes`, evicting other files if necessary, and set the size of the empty open file `handle`.

        If files that are being written fill the quota, waits until one of them is complete and can be evicted.
        Raises `ResoluteError` if the quota is too small.
        """
        until = time.monotonic() + _PATIENCE_S
        while not self._try_reserve(handle, nbytes, wait=time.monotonic() < until):
            time.sleep(_POLL_S)

    def _try_reserve(self, handle: int, nbytes: int, *, wait: bool) -> bool:
        with self._locked() as counter:
            used, writing = self._read(counter), 0
            if used is None or used + nbytes > self.limit_bytes:
                used, writing = self._evict(nbytes)
                self._write(counter, used)
            if used + nbytes <= self.limit_bytes:
                os.ftruncate(handle, nbytes)
                self._write(counter, used + nbytes)
                return True
        if writing and wait:
            return False
        raise ResoluteError(
            f"{self.folder}: the cache is too small, got a bound of {self.limit_bytes} bytes and {used} in use, "
            f"expected room for {nbytes} more; raise RESOLUTE_CACHE_GIB"
        )

    def publish(self, path: Path) -> None:
        """Rename the finished .part file to `path`."""
        # why under the lock: a concurrent count would miss a file that is renamed while it lists the folder
        with self._locked():
            os.rename(f"{path}{_PART}", path)  # noqa: PTH104

    def release(self, handle: int, nbytes: int) -> None:
        """Undo `reserve`."""
        with self._locked() as counter:
            os.ftruncate(handle, 0)
            self._write(counter, max(0, (self._read(counter) or 0) - nbytes))

    def shrink(self, nbytes: int) -> int:
        """Evict at least `nbytes` (if there is that much) of the least recently used files; returns the bytes freed."""
        with self._locked() as counter:
            before = self._count()[0]
            after, _ = self._evict(max(0, self.limit_bytes - before + nbytes))
            self._write(counter, after)
            return before - after

    @contextmanager
    def _locked(self) -> Iterator[int]:
        try:
            counter = os.open(self._counter, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise cache_error(self._counter, error) from None
        try:
            try:
                fcntl.flock(counter, fcntl.LOCK_EX)
            except OSError as error:
                raise cache_error(self._counter, error) from None
            yield counter
        finally:
            os.close(counter)

    @staticmethod
    def _read(counter: int) -> int | None:
        word = os.pread(counter, _WORD, 0)
        return int.from_bytes(word, "little") if len(word) == _WORD else None

    def _write(self, counter: int, used: int) -> None:
        try:
            os.pwrite(counter, used.to_bytes(_WORD, "little"), 0)
        except OSError as error:  # a full disk may lack even the block of the counter
            raise cache_error(self._counter, error) from None

    def _evict(self, nbytes: int) -> tuple[int, int]:
        """Count the files and evict if `nbytes` do not fit. Returns (bytes left, bytes of them being written).

        The caller holds the lock.
        """
        used, writing, evictable = self._count()
        if used + nbytes > self.limit_bytes:
            target = self.limit_bytes - nbytes - self.limit_bytes // _FREE_FRACTION
            for _, size_bytes, path in sorted(evictable):
                if used <= target:
                    break
                if _remove(path):
                    used -= size_bytes
                    self.evicted += 1
        return used, writing

    def _remove_abandoned(self) -> None:
        """Remove the files of killed writers. Their bytes stay reserved until the next count."""
        with self._locked():
            for entry in self._files():
                if entry.name.endswith(_PART):
                    _remove(entry.path)

    def _files(self) -> Iterator[os.DirEntry[str]]:
        for kind in ("chunks", "files"):
            for folder in _entries(self.folder / kind):
                yield from _entries(folder)

    def _count(self) -> tuple[int, int, list[tuple[int, int, str]]]:
        """Bytes of all files, bytes being written, and (last use in ns, bytes, path) of each evictable file."""
        used, writing, evictable = 0, 0, []
        for entry in self._files():
            try:
                stat = entry.stat()
            except OSError:  # removed meanwhile
                continue
            if not entry.name.endswith(_PART):
                evictable.append((stat.st_atime_ns, stat.st_size, entry.path))
            elif _remove(entry.path):  # its writer was killed
                continue
            else:
                writing += stat.st_size
            used += stat.st_size
        return used, writing, evictable


def _entries(folder: os.DirEntry[str] | Path) -> list[os.DirEntry[str]]:
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        return list(entries)
    return []


def _remove(path: str) -> bool:
    """Remove a file unless another process holds its lock (a .part being written, a complete file in use).

    Returns whether it was removed. Raises `StorageError` if the disk has no file locks.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # removed meanwhile, or owned by another user
        return False
    try:
        try:
            locked = try_lock(handle)
        except OSError as error:
            raise cache_error(path, error) from None
        # why: only the lock holder renames a .part file, so the name stays valid while the lock is held here
        if not locked or not same_file(path, handle):
            return False
        os.unlink(path)  # noqa: PTH108
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


@contextmanager
def exclusive_writer(path: Path, patience_s: float, closed: threading.Event | None) -> Iterator[int | None]:
    """Yield the handle of `path`'s .part file, open, empty and locked; the block fills and renames it.

    Yields None if `path` appears while waiting for the lock, or after `patience_s` seconds. A .part file that the
    block does not rename is removed at its end. Raises `StorageError` if the disk fails, `Interrupted` if `closed` is
    set while waiting.
    """
    part = f"{path}{_PART}"
    try:
        handle = _wait(path, part, patience_s, closed)
    except OSError as error:
        raise cache_error(part, error) from None
    if handle is None:
        yield None
        return
    try:
        yield handle
    finally:
        # why the check: the block may have renamed it
        if same_file(part, handle):
            os.unlink(part)  # noqa: PTH108
        os.close(handle)


def _wait(path: Path, part: str, patience_s: float, closed: threading.Event | None) -> int | None:
    # why polling: a blocking flock would end neither when `closed` is set nor after `patience_s`, and a suspended
    # process must not block all others
    until = time.monotonic() + patience_s
    poll_s = _POLLS_S[0]
    while True:
        handle = _open_part(part)
        try:
            if try_lock(handle) and same_file(part, handle):
                os.ftruncate(handle, 0)  # drop what a killed writer left
                locked, handle = handle, -1  # so that `finally` does not close it
                return locked
        finally:
            if handle >= 0:
                os.close(handle)
        if path.exists() or time.monotonic() > until:
            return None
        if closed is None:
            time.sleep(poll_s)
        elif closed.wait(poll_s):
            raise Interrupted(f"{path}: the wait for it was interrupted, expected open files; open them again")
        poll_s = min(2 * poll_s, _POLLS_S[1])


def _open_part(part: str) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(part, flags, 0o666)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(part), exist_ok=True)  # noqa: PTH103, PTH120
        return os.open(part, flags, 0o666)


def cache_error(path: Path | str, error: OSError) -> StorageError:
    """The error for a cache that cannot be written. why so explicit: users of a URL may not know there is a cache."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(
            f"{path}: the disk of the cache is full, got '{error.strerror}' with nothing left to remove, expected "
            "room; free some space or set RESOLUTE_CACHE to a folder on another disk"
        )
    return StorageError(
        f"{path}: the cache cannot be used, got '{error.strerror or error}', expected a folder that can be written, "
        "on a disk with file locks; set RESOLUTE_CACHE to one"
    )
