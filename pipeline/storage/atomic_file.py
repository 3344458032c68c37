"""Files that appear whole or not at all, and leave nothing behind that a later run would trust.

A file is written under a unique temporary name beside its destination, synced and renamed. The writer holds a
flock(2) on it, so that `delete_partial` can tell what a killed process left from what is being written now.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from pipeline.errors import ResoluteError

__all__ = ["PARTIAL", "atomic_file", "atomic_link", "atomic_write", "check_output", "delete_partial",
           "explain_write_error", "output_file", "sync_folder", "used_folder"]  # fmt: skip

PARTIAL = re.compile(r"\..+\.[0-9a-f]{12}\.partial")


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """An empty file, open for reading and writing, that replaces `path` when the block ends without an exception.

    Durable when the block has ended. Raises `OSError` as the disk does; nothing is left behind then.
    """
    partial = _partial_name(path)
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


def atomic_link(source: Path, path: Path) -> None:
    """Make `path` another name of the file `source`, a copy where the disk has no hard links. Raises `OSError`."""
    partial = _partial_name(path)
    try:
        os.link(source, partial)
    except OSError:
        with source.open("rb") as original, atomic_file(path) as copy:
            shutil.copyfileobj(original, copy, 1 << 20)
        return
    try:
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)  # why: rename(2) does nothing where both are names of one file already
    sync_folder(path.parent)


def check_output(path: Path, *, setting: str, suffixes: Sequence[str]) -> None:
    """Whether `output_file(path)` will succeed, for commands to ask before their work; nothing is left behind.

    One rule for the output files of all commands: the folder is there and can be written, the name ends in one of
    `suffixes`, and what has that name already, if anything, is a file that may be replaced.
    `setting` is what the path is called in messages. Raises `ResoluteError`.
    """
    if path.suffix.lower() not in suffixes:
        raise ResoluteError(f"{setting}: got {path}, expected a name that ends in {' or '.join(suffixes)}; rename it")
    with explain_write_error(path):
        if not path.parent.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "No such folder", str(path.parent))
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if os.path.lexists(path) and not path.is_file():
            raise OSError(errno.ENOTDIR, "not a regular file", str(path))
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, "read-only file", str(path))
        partial = _partial_name(path)  # why: permissions alone do not tell, on disks that others manage
        os.close(os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        partial.unlink(missing_ok=True)  # it may have been deleted as a killed writer's


@contextlib.contextmanager
def output_file(path: Path) -> Iterator[BinaryIO]:
    """`atomic_file` for the files that commands write: raises one line, a `ResoluteError`, in place of `OSError`.

    Deletes what killed writers of the same file left beside it.
    """
    with explain_write_error(path), atomic_file(path) as file:
        yield file
    with contextlib.suppress(OSError):  # a folder that may be written but not listed
        delete_partial(path.parent, of=path.name)


@contextlib.contextmanager
def explain_write_error(path: Path) -> Iterator[None]:
    """Around a write of `path` that replaces it whole or not at all: an `OSError` becomes a `ResoluteError`."""
    try:
        yield
    except OSError as error:
        kept = ", the old one is kept" if path.is_file() else ""
        advice = {
            errno.ENOSPC: "make room and run again", errno.EDQUOT: "make room and run again",
            errno.ENOENT: "create its folder, or name another place", errno.EACCES: "name a place that you may write",
            errno.EPERM: "name a place that you may write", errno.EROFS: "name a place that you may write",
            errno.EISDIR: "name a file", errno.ENOTDIR: "name a file in a folder that is there",
        }.get(error.errno or 0, "run again when the disk can be written")  # fmt: skip
        raise ResoluteError(f"{path}: not written ({error.strerror or error}){kept}; {advice}") from None


@contextlib.contextmanager
def used_folder(folder: Path) -> Iterator[None]:
    """`folder` and its parents are there in the block; those made for it that are empty at its end are removed.

    So a command that is refused before it writes anything leaves nothing. Raises `OSError`.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            for path in made:  # the deepest first
                path.rmdir()


def delete_partial(folder: Path, *, of: str = "") -> None:
    """Delete what killed writers left in `folder`, of all files or of `of` alone; files that are being written stay."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if PARTIAL.fullmatch(path.name) and (not of or path.name.startswith(f".{of}.")):
            with contextlib.suppress(OSError):
                _delete_unlocked(path)


def _partial_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.partial")


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
