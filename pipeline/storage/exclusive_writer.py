"""One writer per file among many threads and processes; the others wait until the file exists.

`NAME.part` beside the file is both the temporary file and the lock: whoever holds its flock(2) writes it and renames
it. A lock ends with its process, so another process takes over from a killed one. A disk without locks is an error.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.errors import Interrupted, StorageError

__all__ = ["PART_SUFFIX", "cache_error", "exclusive_writer", "same_file", "try_lock"]

PART_SUFFIX = ".part"
_POLLS_S = (0.001, 0.01)  # between attempts to lock a .part file: first and longest


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


def try_lock(handle: int) -> bool:
    """Try to lock an open file exclusively; False if another process holds the lock. The lock ends with the process.

    Raises `OSError` if the file cannot be locked at all (ENOLCK).
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def same_file(path: Path | str, handle: int) -> bool:
    """Whether `path` still names the open file `handle`."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))  # noqa: PTH116
    except FileNotFoundError:
        return False


@contextmanager
def exclusive_writer(path: Path, patience_s: float, closed: threading.Event | None) -> Iterator[int | None]:
    """Yield the handle of `path`'s .part file, open, empty and locked; the block fills and renames it.

    Yields None if `path` appears while waiting for the lock, or after `patience_s` seconds. A .part file that the
    block does not rename is removed at its end. Raises `StorageError` if the disk fails, `Interrupted` if `closed` is
    set while waiting.
    """
    part = f"{path}{PART_SUFFIX}"
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
        handle = _open(part)
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


def _open(part: str) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(part, flags, 0o666)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(part), exist_ok=True)  # noqa: PTH103, PTH120
        return os.open(part, flags, 0o666)
