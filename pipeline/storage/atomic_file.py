"""Files that appear whole or not at all, and leave nothing behind that a later run would trust.

A file is written under a unique temporary name beside its destination, synced and renamed. The writer holds a
flock(2) on it, so that `delete_partial` can tell what a killed process left from what is being written now.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

__all__ = ["PARTIAL", "atomic_file", "atomic_write", "delete_partial", "sync_folder"]

PARTIAL = re.compile(r"\..+\.[0-9a-f]{12}\.partial")


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """An empty file, open for reading and writing, that replaces `path` when the block ends without an exception.

    Durable when the block has ended. Raises `OSError` as the disk does; nothing is left behind then.
    """
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.partial")
    # why not tempfile: its mode 0600 would keep other users from reading the finished file
    descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with open(descriptor, "w+b") as file:  # noqa: PTH123  # why: it is open already
            with contextlib.suppress(OSError):  # a disk without locks: `delete_partial` leaves such files alone too
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield file
            file.flush()
            os.fsync(descriptor)
            partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    sync_folder(path.parent)


def atomic_write(path: Path, data: bytes | str) -> None:
    """Write a whole file (text as UTF-8). Raises `OSError`."""
    with atomic_file(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def delete_partial(folder: Path) -> None:
    """Delete what killed writers left in `folder`; files that are being written stay."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if PARTIAL.fullmatch(path.name):
            with contextlib.suppress(OSError):
                _delete_unlocked(path)


def _delete_unlocked(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` durable. Raises `OSError`."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
