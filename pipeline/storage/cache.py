"""Disk cache of remote files, shared by all processes of a machine: each file is downloaded once.

    CACHE/v2/KEY-NAME        a complete file of a set
    CACHE/v2/KEY-NAME.part   the same while it is downloaded, by the process that holds KEY-NAME.lock
    CACHE/v2/KEY-NAME.note   what a process found out about the store's file, for the other processes
    CACHE/v2.lock            held while files are counted, evicted, or appear

A lock ends with its process, so that another process takes over from a killed one. The files together never exceed the
quota; files being downloaded count in full. The least recently used files are evicted first, by the access time, which
the cache sets itself. Files in use may be evicted, and then exist until they are closed; kept ones (`open`) stay.
A damaged file is downloaded again; a cache that cannot be used is a `StorageError`, never a damaged sample.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from resolute.errors import ResoluteError, StorageError
from resolute.lock import same_file, try_lock

from .base import OpenFile, Write
from .cancel import CancelScope, interrupted

__all__ = ["DAMAGED", "Cache", "CacheSettings", "cache_errors"]

DAMAGED = (errno.EIO, errno.ESTALE)  # read errors after which a cached file is downloaded again
_VERSION = "v2"
_FREE_FRACTION = 20  # an eviction frees 1/20 more than it must
_POLL_S, _PATIENCE_S = 0.01, 3600.0  # waits for other processes
_FULL = (errno.ENOSPC, errno.EDQUOT)


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
    """Location and size of the cache of remote files, and limits of requests. Changes no result.

    folder        cache folder on a local disk; default $RESOLUTE_CACHE, or `resolute` in the user's cache folder
    limit_bytes   upper bound of the folder's size; default $RESOLUTE_CACHE_GIB, or 64 GiB
    requests      files that `prefetch` downloads concurrently
    ahead_bytes   `prefetch` refuses hints while more than this many bytes are being downloaded
    tries         attempts for each request, with growing waits
    stall_s       a request that receives nothing for this long has failed; all its tries take `tries` times as long
    """

    folder: Path = field(default_factory=_folder)
    limit_bytes: int = field(default_factory=_limit_bytes)
    requests: int = 16
    ahead_bytes: int = 512 << 20
    tries: int = 10
    stall_s: float = 20.0

    def __post_init__(self) -> None:
        for name, minimum in (("requests", 1), ("ahead_bytes", 0), ("tries", 1)):
            if getattr(self, name) < minimum:
                raise ResoluteError(f"cache: {name} got {getattr(self, name)}, expected at least {minimum}; raise it")
        if not 0 < self.stall_s < 3600:
            raise ResoluteError(f"cache: stall_s got {self.stall_s}, expected above 0, below 3600; change it")
        if self.limit_bytes < 1:
            raise ResoluteError(f"cache: limit_bytes got {self.limit_bytes}, expected bytes; raise RESOLUTE_CACHE_GIB")


class Cache:
    """The files in a cache folder. Thread-safe, and safe to share between processes.

    All methods raise `StorageError` if the folder cannot be used.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder, self._limit_bytes = folder / _VERSION, limit_bytes
        self.damaged = self.evicted = 0  # files dropped by this process
        with cache_errors(folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._locked(self._folder):
                self._evict(limit_bytes, sweep=True)  # why: the limit may have been larger before

    def has(self, name: str) -> bool:
        """Whether a file is cached now; it may be damaged, or be evicted a moment later."""
        return self.path(name).exists()

    def path(self, name: str) -> Path:
        return self._folder / name

    def open(
        self,
        name: str,
        nbytes: int,
        download: Callable[[Write], object],
        *,
        scope: CancelScope,
        keep: bool = False,
        sha256: str | None = None,
        is_stale: Callable[[], bool] | None = None,
    ) -> OpenFile:
        """Open a file of `nbytes`, downloaded first by `download(write)` unless it is cached.

        scope     ends waits for other processes, with `Interrupted`, once it is cancelled
        keep      the file is not evicted as long as the result lives
        sha256    drops a cached file with other content
        is_stale  drops any cached file if it returns True; no other process downloads the file meanwhile

        Raises `ResoluteError` if it is larger than the quota, and what `download` raises.
        """
        path = self.path(name)
        with cache_errors(path):
            cached = partial(self._cached, path, nbytes, keep, sha256)
            if is_stale is None and (file := cached()) is not None:
                return file
            with self._locked(path, scope):
                if is_stale is not None and is_stale():
                    self.drop(name)
                # why again: another process may have downloaded it while this one waited
                return cached() or self._download(path, nbytes, download, scope, keep)

    def write_note(self, name: str, **facts: object) -> None:
        """Note facts (JSON values) about the store's file, in place of earlier ones. Call it during a download."""
        path = self.path(f"{name}.note")
        with cache_errors(path):
            path.write_text(json.dumps({**facts, "time_ns": time.time_ns()}))

    def read_note(self, name: str, *, since_ns: int) -> dict[str, Any]:
        """The facts of a note that was written at `since_ns` (of the Unix epoch) or later; else none."""
        try:
            facts = dict(json.loads(self.path(f"{name}.note").read_bytes()))
            return facts if facts["time_ns"] >= since_ns else {}
        except (OSError, ValueError, KeyError, TypeError):  # no note, or one that is being written
            return {}

    def drop(self, name: str) -> None:
        """Forget a damaged file."""
        with cache_errors(self.path(name)), suppress(FileNotFoundError):
            self.path(name).unlink()
            self.damaged += 1

    def _cached(self, path: Path, nbytes: int, keep: bool, sha256: str | None) -> OpenFile | None:
        try:
            file = OpenFile(path)
            if keep:
                fcntl.flock(file.fd, fcntl.LOCK_SH)
                if not same_file(path, file.fd):  # evicted while this process waited for the lock
                    return None
            stat = os.fstat(file.fd)
            if stat.st_size == nbytes and (sha256 is None or _sha256_of(file.fd) == sha256):
                with suppress(PermissionError):  # owned by another user, in a shared folder
                    os.utime(file.fd, ns=(time.time_ns(), stat.st_mtime_ns))
                return file
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in DAMAGED:
                raise
        self.drop(path.name)
        return None

    def _download(
        self, path: Path, nbytes: int, download: Callable[[Write], object], scope: CancelScope, keep: bool
    ) -> OpenFile:
        part = Path(f"{path}.part")
        part.unlink(missing_ok=True)  # of a killed process
        handle = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            self._reserve(handle, nbytes, scope)
            download(partial(self._write, handle))
            file = OpenFile(part)  # why before it appears: it may be evicted at once
            if keep:
                fcntl.flock(file.fd, fcntl.LOCK_SH)
            with self._locked(self._folder):  # why: a concurrent count would miss a file that is renamed meanwhile
                part.rename(path)
            return file
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        finally:
            os.close(handle)

    def _reserve(self, handle: int, nbytes: int, scope: CancelScope) -> None:
        """Set the size of a new file, evicting others; waits if the quota is full of files being downloaded."""
        used, waits = 0, nbytes <= self._limit_bytes
        while waits:
            with self._locked(self._folder):
                used, waits = self._evict(self._limit_bytes - nbytes)
                if used + nbytes <= self._limit_bytes:
                    os.ftruncate(handle, nbytes)
                    return
            if waits and scope.wait(5 * _POLL_S):
                raise interrupted(self._folder)
        raise ResoluteError(
            f"{self._folder}: the cache is too small, got a bound of {self._limit_bytes} bytes with {used} in use, "
            f"expected room for a file of {nbytes}; raise RESOLUTE_CACHE_GIB"
        )

    def _write(self, handle: int, data: memoryview, offset: int) -> None:
        """Write all of `data`; evicts files if the disk is full."""
        while data:
            try:
                done = os.pwrite(handle, data, offset)
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                with self._locked(self._folder):
                    used = self._count()[0]
                    if self._evict(used - len(data))[0] == used:  # nothing is left to evict
                        raise
                continue
            data, offset = data[done:], offset + done

    def _evict(self, target_bytes: int, *, sweep: bool = False) -> tuple[int, bool]:
        """Evict files if more than `target_bytes` are in use; returns the bytes in use and whether some are being
        downloaded. Then, and with `sweep`, what killed processes left is removed first. The caller holds the lock.
        """
        used, files, unfinished = self._count()
        if sweep or used > target_bytes:
            for name in [name for name in unfinished if _remove_abandoned(name)]:
                used -= unfinished.pop(name)
        if used > target_bytes:
            target_bytes -= used // _FREE_FRACTION
            for _, nbytes, path in sorted(files):
                if used <= target_bytes:
                    break
                if _remove(path):
                    used, self.evicted = used - nbytes, self.evicted + 1
        return used, any(unfinished.values())

    def _count(self) -> tuple[int, list[tuple[int, int, str]], dict[str, int]]:
        """Bytes of all files; (last use, bytes, path) of each complete file; bytes of others, by path."""
        used, files, unfinished = 0, [], dict[str, int]()
        for entry in list(os.scandir(self._folder)):
            with suppress(FileNotFoundError):  # removed meanwhile
                stat = entry.stat()
                used += stat.st_size
                name, _, kind = entry.path.rpartition(".")
                if kind in ("part", "lock"):
                    unfinished[name] = unfinished.get(name, 0) + stat.st_size
                else:
                    files.append((stat.st_atime_ns, stat.st_size, entry.path))
        return used, files, unfinished

    @contextmanager
    def _locked(self, path: Path, scope: CancelScope | None = None) -> Iterator[None]:
        """Hold the lock of a file, or of the folder."""
        lock = _lock(path)
        try:
            lock.acquire(_PATIENCE_S, poll_interval=_POLL_S, cancel_check=scope.cancelled if scope else None)
        except Timeout:
            if scope is not None and scope.cancelled():
                raise interrupted(path) from None
            raise StorageError(
                f"{path}: another process has been downloading it for {_PATIENCE_S:.0f} s, expected it to end; look "
                "for a suspended one, or set RESOLUTE_CACHE to another folder"
            ) from None
        try:
            yield
        finally:
            if path != self._folder:
                Path(lock.lock_file).unlink(missing_ok=True)  # why before the release: afterwards it may be another's
            lock.release()


def _lock(path: Path | str) -> FileLock:
    # mode: for a folder that users share. A soft lock would not end with its process
    return FileLock(f"{path}.lock", mode=0o666, fallback_to_soft=False)


def _remove_abandoned(name: str) -> bool:
    """Remove the .part file and the lock of a process that was killed; False if one holds the lock."""
    lock = _lock(name)
    try:
        lock.acquire(0)
    except (Timeout, PermissionError):
        return False
    for kind in ("part", "lock"):
        with suppress(OSError):
            os.unlink(f"{name}.{kind}")  # noqa: PTH108
    lock.release()
    return True


def _remove(path: str) -> bool:
    """Remove a file unless it is kept. Returns whether it was removed."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # why to write: NFS locks other files for readers only
    except OSError:  # removed meanwhile, or owned by another user
        return False
    try:
        if not try_lock(handle):
            return False
        with suppress(FileNotFoundError):
            os.unlink(path)  # noqa: PTH108
    except PermissionError:
        return False
    finally:
        os.close(handle)
    return True


def _sha256_of(handle: int) -> str:
    with open(handle, "rb", closefd=False) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def cache_errors(path: Path) -> Iterator[None]:
    """Turn errors of the cache's disk into a `StorageError`. why so explicit: users may not know it."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StorageError(
                f"{path}: the disk of the cache is full, got '{error.strerror}' with nothing left to remove, expected "
                "room; free some space or set RESOLUTE_CACHE to a folder on another disk"
            ) from None
        raise StorageError(
            f"{path}: the cache cannot be used, got '{error.strerror or error}', expected a folder that can be "
            "written, on a disk with file locks; set RESOLUTE_CACHE to one"
        ) from None
