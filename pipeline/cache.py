"""How do many processes of a machine share one local copy of what they read from a store?

    CACHE/v1/used               bytes reserved; its lock makes reserving one step (see room.py)
    CACHE/v1/chunks/KK/KEY      a header (what it is, its SHA-256), then a range of a tar
    CACHE/v1/files/KK/KEY-NAME  a whole file (an index), which its users hold a lock on; .sha256 beside it
    ....part                    one that is being written, by the process that holds its lock

Whoever needs what is not there locks its part, fetches, writes and renames it, and is waited for by all others; a
lock ends with its process, so that the next one takes over from one that was killed. Nothing is trusted for being
there: a process checks the SHA-256 of each file when it first opens it. Recency is a file's access time, set by us.
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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from .errors import ResoluteError
from .part import owned_part, refused, same_file
from .room import DIGEST, Room

__all__ = ["HEADER", "Cache", "CacheSettings"]

HEADER = struct.Struct("<8s20sQ32s")  # what it is, its key, its bytes, their SHA-256
_MAGIC = b"RSLTCHK1"
_TOUCH_S = 5.0  # a chunk's use is written down this often, by each process
_VERSION = "v1"


def _folder() -> Path:
    given = os.environ.get("RESOLUTE_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(given or f"{base}/resolute").expanduser()


def _limit_bytes() -> int:
    given = os.environ.get("RESOLUTE_CACHE_GIB", "64")
    try:
        return int(float(given) * 2**30)
    except (ValueError, OverflowError):
        raise ResoluteError(f"RESOLUTE_CACHE_GIB: got '{given}', expected GiB such as 64 or 0.5; correct it") from None


@dataclass(frozen=True, kw_only=True)
class CacheSettings:
    """Where and how much to keep of what comes from a URL, and how to ask for it. Changes no result.

    folder         a folder on a local disk; default $RESOLUTE_CACHE, or `resolute` in the user's cache folder
    limit_bytes    bound of its size; default $RESOLUTE_CACHE_GIB, or 64 GiB
    chunk_bytes    a tar is fetched in ranges of this size. why 4 MiB: long against a request's first byte, and
                   fine enough for batches that jump between blocks
    requests       chunks that `want` fetches at once; state: requests * chunk_bytes
    ahead_bytes    hints of `want` beyond so many bytes under way are not taken
    tries          of a request that fails, with `first_wait_s` before the second and doubling from there
    stall_s        a request that brings nothing for so long has failed
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
        for name, least in (("chunk_bytes", 1), ("requests", 1), ("ahead_bytes", 0), ("tries", 1)):
            if getattr(self, name) < least:
                raise ResoluteError(f"cache: {name} got {getattr(self, name)}, expected at least {least}; raise it")
        for name in ("first_wait_s", "stall_s"):
            if not 0 < getattr(self, name) < 3600:
                raise ResoluteError(f"cache: {name} got {getattr(self, name)}, expected above 0, below 3600; change it")
        if self.limit_bytes < 2 * (self.chunk_bytes + HEADER.size):
            raise ResoluteError(
                f"cache: limit_bytes got {self.limit_bytes}, expected room for two chunks of {self.chunk_bytes} bytes "
                "at least, and for the set's index; raise RESOLUTE_CACHE_GIB"
            )


class Cache:
    """The files in a cache folder. Thread-safe; any number of processes use one folder at a time."""

    def __init__(self, folder: Path, limit_bytes: int, *, patience_s: float = 120.0) -> None:
        """`patience_s`: who fetches the same for longer is not waited for. Raises `ResoluteError` if unusable."""
        self._base, self._patience_s = folder / _VERSION, patience_s
        try:
            self._base.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise refused(folder, error) from None
        self.room = Room(self._base, limit_bytes)
        self.damaged = 0  # files found damaged and dropped
        self._seen: dict[str, tuple[int, int, float]] = {}  # of checked chunks: inode, mtime in ns, when touched
        self._seen_max = 100_000
        self._pins: dict[Path, int] = {}
        self._lock = threading.Lock()

    def read(self, key: str, start: int, stop: int, nbytes: int, fetch: Callable[[], bytes], *, fresh: bool = False,
             closed: threading.Event | None = None) -> bytes:  # fmt: skip
        """Bytes [start, stop) of the chunk `key` (40 hexadecimal digits), which has `nbytes`; `fetch()` gets it all.

        `fresh`: what is held of it is dropped first.
        """
        path = self._base / "chunks" / key[:2] / key
        if fresh:
            path.unlink(missing_ok=True)
        elif (data := self._held(key, path, start, stop, nbytes)) is not None:
            return data
        with owned_part(path, self._patience_s, closed) as part:
            # why: another may have fetched it while we waited
            if (data := self._held(key, path, start, stop, nbytes)) is not None:
                return data
            whole = fetch()
            if part is not None:
                head = HEADER.pack(_MAGIC, bytes.fromhex(key), nbytes, hashlib.sha256(whole).digest())
                self._write(part, path, HEADER.size + nbytes, lambda: _put(part, head, whole))
                stat = os.fstat(part)
                self._saw(key, stat.st_ino, stat.st_mtime_ns)
        return whole[start:stop]

    def has(self, key: str) -> bool:
        """Whether the chunk is there; it may be damaged, or gone a moment later."""
        return os.path.exists(self._base / "chunks" / key[:2] / key)  # noqa: PTH110

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
                    raise ResoluteError(
                        f"{path}: another process has been fetching it for {10 * self._patience_s:.0f} s, expected it "
                        "to end; look for a stopped one, or set RESOLUTE_CACHE to another folder"
                    )
        return path

    def close(self) -> None:
        """Let the whole files go: they may be removed from now on."""
        with self._lock:
            while self._pins:
                os.close(self._pins.popitem()[1])

    def _pinned(self, path: Path, nbytes: int) -> bool:
        """Lock a whole file against removal, if it is here and sound. A damaged one is dropped."""
        with self._lock:
            if path in self._pins:
                return True
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise refused(path, error) from None
        kept = False
        try:
            fcntl.flock(handle, fcntl.LOCK_SH)
            if not same_file(path, handle):  # removed while we waited for the lock
                return False
            stat = os.fstat(handle)
            with suppress(FileNotFoundError), open(handle, "rb", closefd=False) as file:
                if stat.st_size == nbytes:
                    kept = hashlib.file_digest(file, "sha256").hexdigest() == _digest_file(path).read_text()
            if kept:
                with suppress(PermissionError):
                    os.utime(handle, ns=(time.time_ns(), stat.st_mtime_ns))
                with self._lock:
                    kept = self._pins.setdefault(path, handle) == handle
                return True
        except OSError as error:
            if error.errno not in (errno.EIO, errno.ESTALE):
                raise refused(path, error) from None
        finally:
            if not kept:
                os.close(handle)
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

    def _held(self, key: str, path: Path, start: int, stop: int, nbytes: int) -> bytes | None:
        """The bytes if the chunk is here and sound. A damaged one is dropped."""
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise refused(path, error) from None
        try:
            stat = os.fstat(handle)
            seen = self._seen.get(key)
            if seen is None or seen[:2] != (stat.st_ino, stat.st_mtime_ns):
                whole = _checked(handle, key, nbytes)
                data = None if whole is None else whole[start:stop]
            else:
                data = os.pread(handle, stop - start, HEADER.size + start)
            if data is not None and len(data) == stop - start:
                if seen is None or time.monotonic() - seen[2] > _TOUCH_S:
                    with suppress(PermissionError):  # another user's, in a folder that users share
                        os.utime(handle, ns=(time.time_ns(), stat.st_mtime_ns))
                    self._saw(key, stat.st_ino, stat.st_mtime_ns)
                return data
        except OSError as error:
            if error.errno not in (errno.EIO, errno.ESTALE):
                raise refused(path, error) from None
        finally:
            os.close(handle)
        self._drop(path)
        return None

    def _saw(self, key: str, inode: int, mtime_ns: int) -> None:
        if len(self._seen) >= self._seen_max:
            self._seen.clear()  # why: then some are checked again; nothing else
        self._seen[key] = (inode, mtime_ns, time.monotonic())

    def _drop(self, path: Path) -> None:
        with self._lock:
            self.damaged += 1
        with suppress(FileNotFoundError):
            path.unlink()


def _put(handle: int, *pieces: bytes) -> None:
    at = 0
    for piece in pieces:
        view = memoryview(piece)
        while view:  # why: a write may take only a part
            done = os.pwrite(handle, view, at)
            view, at = view[done:], at + done


def _fill(part: int, path: Path, write: Callable[[int], str]) -> None:
    _digest_file(path).write_text(write(part))


def _checked(handle: int, key: str, nbytes: int) -> bytes | None:
    """What follows the header if it is all there and as it was written, else None."""
    with open(handle, "rb", closefd=False) as file:
        whole = file.read()
    head = HEADER.pack(_MAGIC, bytes.fromhex(key), nbytes, hashlib.sha256(memoryview(whole)[HEADER.size :]).digest())
    return whole[HEADER.size :] if whole[: HEADER.size] == head and len(whole) == HEADER.size + nbytes else None


def _digest_file(path: Path) -> Path:
    return Path(f"{path}{DIGEST}")
