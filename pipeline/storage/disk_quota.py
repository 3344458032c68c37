"""Cross-process byte quota of a folder with LRU eviction.

Invariant: reserved bytes are at most `limit_bytes`, and the files' sizes at most the reserved bytes; a killed process
can only leave the counter too high. The counter is a file whose lock makes a reservation atomic; a file gets its full
size when it is reserved, before it is written. When the counter says the folder is full, the files are counted anew
and the least recently used ones evicted until a twentieth of the quota is free. A disk without file locks is an error.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pipeline.errors import ResoluteError

from .exclusive_writer import PART_SUFFIX, cache_error, same_file, try_lock

__all__ = ["DIGEST", "DiskQuota"]

DIGEST = ".sha256"  # suffix of the file beside a complete file that holds its SHA-256 in hex
_FREE_FRACTION = 20  # an eviction frees 1/20 of the quota
_WORD = 8
_PATIENCE_S, _POLL_S = 60.0, 0.005  # wait for files that other processes are writing


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
            os.rename(f"{path}{PART_SUFFIX}", path)  # noqa: PTH104

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
                if entry.name.endswith(DIGEST):
                    _remove_orphan(entry.path)
                elif entry.name.endswith(PART_SUFFIX):
                    _remove(entry.path)

    def _files(self) -> Iterator[os.DirEntry[str]]:
        for kind in ("chunks", "files"):
            for folder in _entries(self.folder / kind):
                yield from _entries(folder)

    def _count(self) -> tuple[int, int, list[tuple[int, int, str]]]:
        """Bytes of all files, bytes being written, and (last use in ns, bytes, path) of each evictable file."""
        used, writing, evictable = 0, 0, []
        for entry in self._files():
            if entry.name.endswith(DIGEST):
                _remove_orphan(entry.path)
                continue
            try:
                stat = entry.stat()
            except OSError:  # removed meanwhile
                continue
            if not entry.name.endswith(PART_SUFFIX):
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


def _remove_orphan(digest: str) -> None:
    """Remove a checksum whose file was never finished. The quota's lock keeps a .part from being renamed meanwhile."""
    file = digest.removesuffix(DIGEST)
    if not os.path.exists(file) and not os.path.exists(file + PART_SUFFIX):  # noqa: PTH110
        with suppress(OSError):
            os.unlink(digest)  # noqa: PTH108


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
        with suppress(FileNotFoundError):
            os.unlink(path + DIGEST)  # noqa: PTH108
    except OSError:
        return False
    finally:
        os.close(handle)
    return True
