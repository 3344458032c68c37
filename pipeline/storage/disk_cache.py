"""A cache of remote files on a local disk, shared by all processes of a machine.

    CACHE/v1/used               bytes reserved; its lock makes reserving one step (see room.py)
    CACHE/v1/chunks/KK/KEY      a header (what it is, its SHA-256), then a range of a tar
    CACHE/v1/files/KK/KEY-NAME  a whole file (an index), which its users hold a lock on; .sha256 beside it
    ....part                    one that is being written, by the process that holds its lock

A process that needs what is not there locks its part, fetches, writes and renames it, and all others wait for it; a
lock ends with its process, so that the next one takes over from one that was killed. Nothing is trusted for being
there: a process checks the SHA-256 of each file when it first opens it. Recency is a file's access time, set by us.
A damaged file is dropped and fetched again; a cache that cannot be used is a `StorageError`, never a bad sample.
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
from .disk_quota import DIGEST, Room
from .exclusive_writer import owned_part, refused, same_file
from .files import OpenFile
from .read_at import read_at

__all__ = ["HEADER", "TOUCH_S", "Cache", "CacheSettings"]

_MAGIC = b"RSLTCHK1"
TOUCH_S = 5.0  # a chunk's use is written down this often, by each process
_VERSION = "v1"
_DAMAGED = (errno.EIO, errno.ESTALE)  # what a read of ours may fail with: then the file is dropped


class Cache:
    """The files in a cache folder. Thread-safe; any number of processes use one folder at a time."""

    def __init__(self, folder: Path, limit_bytes: int, *, patience_s: float = 120.0) -> None:
        """`patience_s`: who fetches the same for longer is not waited for. Raises `StorageError` if unusable."""
        self._base, self._patience_s = folder / _VERSION, patience_s
        try:
            self._base.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise refused(folder, error) from None
        self.room = Room(self._base, limit_bytes)
        self.damaged = 0  # files found damaged and dropped
        self._seen: dict[str, tuple[int, int, float]] = {}  # of checked chunks: inode, mtime in ns, when touched
        self._seen_max = 100_000
        self._pins: dict[Path, OpenFile] = {}
        self._lock = threading.Lock()

    def read(self, key: str, start: int, stop: int, nbytes: int, fetch: Callable[[], bytes], *, fresh: bool = False,
             closed: threading.Event | None = None) -> bytes:  # fmt: skip
        """Bytes [start, stop) of the chunk `key` (40 hexadecimal digits), which has `nbytes`; `fetch()` gets it all.

        `fresh`: what is held of it is dropped first.
        """
        path = self._chunk(key)
        if fresh:
            path.unlink(missing_ok=True)
        elif (data := self._piece(key, path, start, stop, nbytes)) is not None:
            return data
        with owned_part(path, self._patience_s, closed) as part:
            # why: another may have fetched it while we waited
            if (data := self._piece(key, path, start, stop, nbytes)) is not None:
                return data
            whole = fetch()
            if part is not None:
                head = HEADER.pack(_MAGIC, bytes.fromhex(key), nbytes, hashlib.sha256(whole).digest())
                self._write(part, path, HEADER.size + nbytes, lambda: _put(part, head, whole))
                stat = os.fstat(part)
                self._saw(key, stat.st_ino, stat.st_mtime_ns)
        return whole[start:stop]

    def open(
        self, key: str, nbytes: int, fetch: Callable[[], bytes], *, closed: threading.Event | None = None
    ) -> OpenFile | None:
        """The chunk as a file, its bytes from `HEADER.size` on; None if it cannot be kept here. Otherwise as `read`."""
        for _ in range(2):
            if (file := self._held(key, self._chunk(key), nbytes)) is not None:
                return file
            self.read(key, 0, 0, nbytes, fetch, closed=closed)
        return None

    def has(self, key: str) -> bool:
        """Whether the chunk is there; it may be damaged, or gone a moment later."""
        return os.path.exists(self._chunk(key))  # noqa: PTH110

    def file(
        self, name: str, nbytes: int, write: Callable[[int], str], *, closed: threading.Event | None = None
    ) -> Path:
        """A whole file of `nbytes`, `name` beginning with 40 hexadecimal digits; it stays until `close`.

        `write(handle)` fills the open file and returns its SHA-256 in hexadecimal.
        """
        path = self._base / "files" / name[:2] / name
        until = time.monotonic() + 10 * self._patience_s
        while not self._pinned(path, nbytes):
            with owned_part(path, self._patience_s, closed) as part:
                if path.exists():
                    continue
                if part is not None:
                    fill = functools.partial(_fill, part, path, write)
                    self._write(part, path, nbytes, fill)
                elif time.monotonic() > until:
                    raise StorageError(
                        f"{path}: another process has been fetching it for {10 * self._patience_s:.0f} s, expected it "
                        "to end; look for a stopped one, or set RESOLUTE_CACHE to another folder"
                    )
        return path

    def close(self) -> None:
        """Let the whole files go: they may be removed from now on."""
        with self._lock:
            self._pins.clear()

    def _pinned(self, path: Path, nbytes: int) -> bool:
        """Lock a whole file against removal, if it is here and sound. A damaged one is dropped."""
        with self._lock:
            if path in self._pins:
                return True
        if (file := _opened(path)) is None:
            return False
        try:
            fcntl.flock(file.fd, fcntl.LOCK_SH)
            if not same_file(path, file.fd):  # removed while we waited for the lock
                return False
            stat, sound = os.fstat(file.fd), False
            with suppress(FileNotFoundError), open(file.fd, "rb", closefd=False) as whole:
                if stat.st_size == nbytes:
                    sound = hashlib.file_digest(whole, "sha256").hexdigest().encode() == _digest_file(path).read_bytes()
            if sound:
                with suppress(PermissionError):
                    os.utime(file.fd, ns=(time.time_ns(), stat.st_mtime_ns))
                with self._lock:
                    self._pins.setdefault(path, file)
                return True
        except OSError as error:
            if error.errno not in _DAMAGED:
                raise refused(path, error) from None
        self._drop(path)
        return False

    def _write(self, part: int, path: Path, nbytes: int, fill: Callable[[], object]) -> None:
        """Reserve, fill and name a part of ours. A disk that is full before the bound is reached gets room first."""
        self.room.reserve(part, nbytes)
        try:
            while True:
                try:
                    fill()
                    break
                except FileNotFoundError:
                    raise
                except OSError as error:
                    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                    if not full or not self.room.shrink(nbytes):
                        raise refused(path, error) from None
            self.room.publish(path)
        except BaseException:
            self.room.give_back(part, nbytes)
            raise

    def _chunk(self, key: str) -> Path:
        return self._base / "chunks" / key[:2] / key

    def _piece(self, key: str, path: Path, start: int, stop: int, nbytes: int) -> bytes | None:
        """Bytes [start, stop) if the chunk is here and sound. A damaged one is dropped."""
        if (file := self._held(key, path, nbytes)) is None:
            return None
        try:
            data = read_at(file.fd, stop - start, HEADER.size + start)
        except OSError as error:
            if error.errno not in _DAMAGED:
                raise refused(path, error) from None
            data = b""
        if len(data) == stop - start:
            return data
        self._drop(path)
        return None

    def _held(self, key: str, path: Path, nbytes: int) -> OpenFile | None:
        """The chunk if it is here and sound. A damaged one is dropped."""
        if (file := _opened(path)) is None:
            return None
        try:
            stat = os.fstat(file.fd)
            seen = self._seen.get(key)
            if seen is None or seen[:2] != (stat.st_ino, stat.st_mtime_ns):
                seen = None
                if not _is_sound(file.fd, key, nbytes):
                    self._drop(path)
                    return None
            if seen is None or time.monotonic() - seen[2] > TOUCH_S:
                with suppress(PermissionError):  # another user's, in a folder that users share
                    os.utime(file.fd, ns=(time.time_ns(), stat.st_mtime_ns))
                self._saw(key, stat.st_ino, stat.st_mtime_ns)
        except OSError as error:
            if error.errno not in _DAMAGED:
                raise refused(path, error) from None
            self._drop(path)
            return None
        return file

    def _saw(self, key: str, inode: int, mtime_ns: int) -> None:
        if len(self._seen) >= self._seen_max:
            self._seen.clear()  # why: then some are checked again; nothing else
        self._seen[key] = (inode, mtime_ns, time.monotonic())

    def _drop(self, path: Path) -> None:
        with self._lock:
            self.damaged += 1
        with suppress(FileNotFoundError):
            path.unlink()


def _opened(path: Path) -> OpenFile | None:
    try:
        return OpenFile(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise refused(path, error) from None


def _put(handle: int, *pieces: bytes) -> None:
    at = 0
    for piece in pieces:
        view = memoryview(piece)
        while view:  # why: a write may take only a part
            done = os.pwrite(handle, view, at)
            view, at = view[done:], at + done


def _fill(part: int, path: Path, write: Callable[[int], str]) -> None:
    _digest_file(path).write_text(write(part))


def _is_sound(handle: int, key: str, nbytes: int) -> bool:
    """Whether header and bytes are all there, and as they were written."""
    if os.fstat(handle).st_size != HEADER.size + nbytes:  # why first: a file of another size is never read
        return False
    with open(handle, "rb", closefd=False) as file:
        whole = file.read()
    head = HEADER.pack(_MAGIC, bytes.fromhex(key), nbytes, hashlib.sha256(memoryview(whole)[HEADER.size :]).digest())
    return whole[: HEADER.size] == head and len(whole) == HEADER.size + nbytes


def _digest_file(path: Path) -> Path:
    return Path(f"{path}{DIGEST}")
