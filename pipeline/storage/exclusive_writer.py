"""One writer per file among many threads and processes: the others wait until the file is there.

A part is `NAME.part` beside the file, and its own lock: its holder writes the part and renames it. Locks end with
their process, so that the next in line takes over from one that was killed. A disk without locks is an error.
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

__all__ = ["PART", "lock_now", "owned_part", "refused", "same_file"]

PART = ".part"
_POLLS_S = (0.001, 0.01)  # between looks at a part that another holds: first and longest


def refused(path: Path | str, error: OSError) -> StorageError:
    """The disk's refusal in words. why: a user who trains on shards from a URL may not know that there is a cache."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(
            f"{path}: the disk of the cache is full, got '{error.strerror}' with nothing left to remove, expected "
            "room; free some space or set RESOLUTE_CACHE to a folder on another disk"
        )
    return StorageError(
        f"{path}: the cache cannot be used, got '{error.strerror or error}', expected a folder that can be written, "
        "on a disk that knows file locks; set RESOLUTE_CACHE to one"
    )


def lock_now(handle: int) -> bool:
    """Take a lock that ends with the process, however that ends; False if another holds it.

    Raises `OSError` if the file cannot be locked (ENOLCK), which must never pass for "another holds it".
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def same_file(path: Path | str, handle: int) -> bool:
    """Whether the name is still that of the open file."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))  # noqa: PTH116
    except FileNotFoundError:
        return False


@contextmanager
def owned_part(path: Path, patience_s: float, closed: threading.Event | None) -> Iterator[int | None]:
    """The part of `path`: open, empty and locked. None if `path` came to be there, or after `patience_s` s of waiting.

    What the block does not rename is removed at its end. Raises `StorageError` if the disk refuses, `Interrupted` if
    `closed` is set meanwhile.
    """
    part = f"{path}{PART}"
    try:
        handle = _wait(path, part, patience_s, closed)
    except OSError as error:
        raise refused(part, error) from None
    if handle is None:
        yield None
        return
    try:
        yield handle
    finally:
        # why: only its holder renames or removes a part, so that the name is still this file's or nobody's
        if same_file(part, handle):
            os.unlink(part)  # noqa: PTH108
        os.close(handle)


def _wait(path: Path, part: str, patience_s: float, closed: threading.Event | None) -> int | None:
    # why polling: a wait for a lock of the system's ends neither with `closed` nor with our patience, and a
    # process that was stopped must not stop all others
    until = time.monotonic() + patience_s
    poll_s = _POLLS_S[0]
    while True:
        handle = _open(part)
        try:
            if lock_now(handle) and same_file(part, handle):
                os.ftruncate(handle, 0)  # what one that was killed left there
                handle, taken = -1, handle
                return taken
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
