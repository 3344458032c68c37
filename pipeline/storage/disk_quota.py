"""Byte quota of a folder that many processes fill, with eviction of what was used longest ago.

Invariant: the sum of the files' sizes is at most `limit_bytes`. One counter of reserved bytes, in a file whose lock
makes reserving one step for all processes; a file is reserved before it is written and has its full size from then on,
so a killed process can only leave the counter too high. When the counter says full, the files are counted, and the
least recently used ones removed until a twentieth of the quota is free. A disk without file locks is an error.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pipeline.errors import ResoluteError

from .exclusive_writer import PART, lock_now, refused, same_file

__all__ = ["DIGEST", "Room"]

DIGEST = ".sha256"  # beside a whole file: its checksum, in hexadecimal
_FREE_PART = 20  # one of so many parts of the bound is freed at once
_WORD = 8
_PATIENCE_S, _POLL_S = 60.0, 0.005  # with files that others are writing


class Room:
    """The bound of the files in `folder`, in bytes. Thread-safe, and safe between processes."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder, self.limit_bytes, self.evicted = folder, limit_bytes, 0
        self._counter = folder / "used"
        self._remove_abandoned()
        if self.used() > limit_bytes:  # why: the bound was larger the last time
            with self._locked() as counter:
                self._write(counter, self._make_room(0)[0])

    def used(self) -> int:
        """Bytes reserved, by all processes; counted if nobody did so before."""
        with self._locked() as counter:
            used = self._read(counter)
            if used is None:
                used, _ = self._make_room(0)
                self._write(counter, used)
            return used

    def reserve(self, handle: int, nbytes: int) -> None:
        """Make room for `nbytes` and give the open file `handle`, empty until now, that size (without writing).

        Where files that are being written take all the room there is, waits until one of them is done and may go.
        Raises `ResoluteError` when the bound cannot be kept.
        """
        until = time.monotonic() + _PATIENCE_S
        while not self._reserved(handle, nbytes, wait=time.monotonic() < until):
            time.sleep(_POLL_S)

    def _reserved(self, handle: int, nbytes: int, *, wait: bool) -> bool:
        with self._locked() as counter:
            used, writing = self._read(counter), 0
            if used is None or used + nbytes > self.limit_bytes:
                used, writing = self._make_room(nbytes)
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
        """Give the part of `path` its name."""
        # why here: whoever counts would miss a file that changes its name between two looks
        with self._locked():
            os.rename(f"{path}{PART}", path)  # noqa: PTH104

    def give_back(self, handle: int, nbytes: int) -> None:
        """Undo `reserve`."""
        with self._locked() as counter:
            os.ftruncate(handle, 0)
            self._write(counter, max(0, (self._read(counter) or 0) - nbytes))

    def shrink(self, nbytes: int) -> int:
        """Remove at least `nbytes` of what was used longest ago, if there is as much; what was removed, in bytes."""
        with self._locked() as counter:
            before = self._count()[0]
            after, _ = self._make_room(max(0, self.limit_bytes - before + nbytes))
            self._write(counter, after)
            return before - after

    @contextmanager
    def _locked(self) -> Iterator[int]:
        try:
            counter = os.open(self._counter, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise refused(self._counter, error) from None
        try:
            try:
                fcntl.flock(counter, fcntl.LOCK_EX)
            except OSError as error:
                raise refused(self._counter, error) from None
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
        except OSError as error:  # its block may be the one that a full disk has not got
            raise refused(self._counter, error) from None

    def _make_room(self, nbytes: int) -> tuple[int, int]:
        """Count, and remove if `nbytes` do not fit; hold the lock. Bytes left, and those of them being written."""
        used, writing, found = self._count()
        if used + nbytes > self.limit_bytes:
            target = self.limit_bytes - nbytes - self.limit_bytes // _FREE_PART
            for _, size_bytes, path in sorted(found):
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
                elif entry.name.endswith(PART):
                    _remove(entry.path)

    def _files(self) -> Iterator[os.DirEntry[str]]:
        for kind in ("chunks", "files"):
            for folder in _entries(self.folder / kind):
                yield from _entries(folder)

    def _count(self) -> tuple[int, int, list[tuple[int, int, str]]]:
        """Bytes of all files, of those being written, and (when last used in ns, bytes, path) of each that may go."""
        used, writing, found = 0, 0, []
        for entry in self._files():
            if entry.name.endswith(DIGEST):
                _remove_orphan(entry.path)
                continue
            try:
                stat = entry.stat()
            except OSError:  # removed since
                continue
            if not entry.name.endswith(PART):
                found.append((stat.st_atime_ns, stat.st_size, entry.path))
            elif _remove(entry.path):  # its writer was killed
                continue
            else:
                writing += stat.st_size
            used += stat.st_size
        return used, writing, found


def _entries(folder: os.DirEntry[str] | Path) -> list[os.DirEntry[str]]:
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        return list(entries)
    return []


def _remove_orphan(digest: str) -> None:
    """Remove a checksum whose file's writer was killed. The room's lock keeps the part from being renamed meanwhile."""
    file = digest.removesuffix(DIGEST)
    if not os.path.exists(file) and not os.path.exists(file + PART):  # noqa: PTH110
        with suppress(OSError):
            os.unlink(digest)  # noqa: PTH108


def _remove(path: str) -> bool:
    """Remove a file unless another process holds its lock: a part that is being written, a whole file in use.

    Raises `StorageError` if the disk cannot lock.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # removed since, or another user's
        return False
    try:
        try:
            locked = lock_now(handle)
        except OSError as error:
            raise refused(path, error) from None
        # why: a part is renamed by its holder alone, so that the name is still this file's while we hold it
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
