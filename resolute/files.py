"""Atomic file writes: a reader sees the old file or the complete new one, never a part of it.

A file is written under a unique temporary name beside its destination, synced, then renamed. The writer holds a
flock(2) on the temporary file, so `delete_partial` never deletes one that is still being written.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from resolute.errors import ResoluteError

from .lock import same_file, try_lock

__all__ = [
    "PARTIAL",
    "atomic_file",
    "atomic_link",
    "atomic_write",
    "check_output",
    "delete_partial",
    "output_file",
    "sync_folder",
    "used_folder",
    "write_errors",
]

PARTIAL = re.compile(r"\.(.+)\.[0-9a-f]{12}\.partial")


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open an empty binary file that atomically replaces `path` when the block ends without an exception.

    The file is durable once the block has ended. After an exception the temporary file is gone and `path` unchanged.
    Raises `OSError`.
    """
    partial, descriptor = _create_locked(path)
    try:
        with open(descriptor, "w+b") as file:  # noqa: PTH123  # why: a descriptor, not a path
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
    """Atomically write `data` (text as UTF-8) to `path`. Raises `OSError`."""
    with atomic_file(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def atomic_link(source: Path, path: Path) -> None:
    """Hard-link `path` to `source`, or copy it where the disk has no hard links. Raises `OSError`."""
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
        partial.unlink(missing_ok=True)  # why: rename(2) is a no-op if both names already link to the same file
    sync_folder(path.parent)


def check_output(path: Path, *, setting: str, suffixes: Sequence[str], named: bool = True) -> None:
    """Check before a long command that `output_file(path)` will succeed. Leaves nothing behind.

    The folder must exist and be writable, the name must end in one of `suffixes`, and an existing `path` must be a
    writable regular file. `setting` is the name of the option in messages. Raises `ResoluteError`.

    `named`: the user has chosen the name, so a line on stdout says that an existing file will be overwritten.
    """
    if path.suffix.lower() not in suffixes:
        raise ResoluteError(f"{setting}: got {path}, expected a name that ends in {' or '.join(suffixes)}; rename it")
    with write_errors(path, keeps_old=True):
        if not path.parent.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "No such folder", str(path.parent))
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if os.path.lexists(path) and not path.is_file():
            raise OSError(errno.ENOTDIR, "not a regular file", str(path))
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, "read-only file", str(path))
        partial = _partial_name(path)  # why: on network disks the permission bits are not the whole truth
        try:
            os.close(os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        finally:  # also after Ctrl-C
            with contextlib.suppress(OSError):  # another process may have deleted it as abandoned
                partial.unlink()
    if named and path.exists():
        print(f"{path}: exists, and will be overwritten", flush=True)


@contextlib.contextmanager
def output_file(path: Path) -> Iterator[BinaryIO]:
    """`atomic_file` for the output files of commands: an `OSError` becomes a one-line `ResoluteError`.

    Afterwards deletes the temporary files that killed writers of the same `path` left.
    """
    with write_errors(path, keeps_old=True), atomic_file(path) as file:
        yield file
    with contextlib.suppress(OSError):  # writable but not listable
        delete_partial(path.parent, of=path.name.__eq__)


@contextlib.contextmanager
def write_errors(path: Path | str, *, keeps_old: bool = False) -> Iterator[None]:
    """Turn an `OSError` from writing `path` into a one-line `ResoluteError`. Only writes belong inside the block.

    `keeps_old`: an existing file at `path` is unchanged after an error, which the message then says.
    """
    try:
        yield
    except OSError as error:
        unchanged = ", the old one is kept" if keeps_old and Path(path).is_file() else ""
        advice = {
            errno.ENOSPC: "make room and run again",
            errno.EDQUOT: "make room and run again",
            errno.ENOENT: "create its folder, or choose another path",
            errno.EACCES: "choose a writable path",
            errno.EPERM: "choose a writable path",
            errno.EROFS: "choose a writable path",
            errno.EISDIR: "choose a file name",
            errno.ENOTDIR: "choose a path in an existing folder",
        }.get(error.errno or 0, "run again when the disk can be written")
        raise ResoluteError(f"{path}: not written ({error.strerror or error}){unchanged}; {advice}") from None


@contextlib.contextmanager
def used_folder(folder: Path) -> Iterator[None]:
    """Create `folder` and its parents for the block; created folders that are still empty at its end are removed.

    A command that fails before it writes anything leaves nothing behind. Raises `OSError`.
    """
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        with contextlib.suppress(OSError):
            for path in created:  # deepest first
                path.rmdir()


def delete_partial(folder: Path, *, of: Callable[[str], object] = lambda name: True) -> None:
    """Delete what killed writers left in `folder` of files whose name satisfies `of`; files being written stay."""
    for path in folder.iterdir() if folder.is_dir() else ():
        partial = PARTIAL.fullmatch(path.name)
        if partial and of(partial[1]):
            with contextlib.suppress(OSError):
                _delete_unlocked(path)


def _partial_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.partial")


def _create_locked(path: Path) -> tuple[Path, int]:
    """Create and lock a temporary file for `path`; returns its name and its descriptor. Raises `OSError`."""
    while True:
        partial = _partial_name(path)
        # why not tempfile: its mode 0600 would keep other users from reading the finished file
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            if try_lock(descriptor) and same_file(partial, descriptor):
                return partial, descriptor
        except OSError:  # without locks `delete_partial` deletes nothing either
            return partial, descriptor
        os.close(descriptor)  # `delete_partial` of another process came between the creation and the lock
        partial.unlink(missing_ok=True)


def _delete_unlocked(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if try_lock(descriptor):
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
