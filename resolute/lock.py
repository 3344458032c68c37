"""File locks (flock(2)), which end with their process, even after `kill -9`; `exclusive_lock`: one writer per folder.

The lock of a folder is on a small file that names its holder. The file is removed when the lock is released; that of a
killed process stays, unlocked, and the next holder takes it over.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from resolute.errors import ResoluteError, StorageError

__all__ = ["describe_holder", "exclusive_lock", "holder_record", "same_file", "try_lock"]

_RECORD_BYTES = 1024


def try_lock(handle: int) -> bool:
    """Try to lock an open file, exclusively; False if another process has locked it.

    The lock ends with the process. Raises `OSError` if the file cannot be locked at all (ENOLCK).
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


def holder_record() -> bytes:
    """JSON with this process's host and pid, and the current time."""
    since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since}).encode()


def describe_holder(record: bytes) -> str:
    """Describe the holder; 'an unknown process' if the record is empty or damaged."""
    try:
        holder = json.loads(record)
        return f"host {holder['host']}, pid {holder['pid']}, since {holder['since']}"
    except (ValueError, KeyError, TypeError):
        return "an unknown process"


@contextlib.contextmanager
def exclusive_lock(path: Path, *, folder: Path | str, writer: str, remedy: str) -> Iterator[Callable[[], bool]]:
    """Hold the lock file `path` for the length of the block.

    Yields a function that returns False once `path` is no longer the locked file, as after its folder was replaced.
    Raises `ResoluteError` that names the holder if another process holds it ("{folder}: another {writer} is writing
    here ...; {remedy}"), `StorageError` if the file system cannot lock. The folder of `path` must exist.
    """
    descriptor = _acquire(path, folder=folder, writer=writer, remedy=remedy)
    try:
        yield lambda: same_file(path, descriptor)
    finally:
        # why unlink before release: a waiter that has the file open sees that the name is gone and opens it anew
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(descriptor)


def _acquire(path: Path, *, folder: Path | str, writer: str, remedy: str) -> int:
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise StorageError(
                f"{path}: cannot be opened, got '{error.strerror}', expected a folder that can be written; {remedy}"
            ) from None
        try:
            is_locked = try_lock(descriptor)
        except OSError as error:
            os.close(descriptor)
            raise StorageError(
                f"{path}: cannot be locked, got '{error.strerror}', expected a file system with file locks; "
                f"mount it with locks, or {remedy}"
            ) from None
        if not is_locked:
            holder = describe_holder(os.pread(descriptor, 4096, 0))
            os.close(descriptor)
            raise ResoluteError(
                f"{folder}: another {writer} is writing here, got {holder}, expected no other; wait for it or {remedy}"
            )
        if same_file(path, descriptor):
            # why padded: it replaces any other record in one write
            os.pwrite(descriptor, holder_record().ljust(_RECORD_BYTES), 0)
            return descriptor
        os.close(descriptor)  # the holder removed it between the open and the lock here
