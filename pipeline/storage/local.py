"""`Folder`: the files of a shard set in a local or mounted folder, read in place; retries of local reads."""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from resolute.errors import FileEndsEarly, Missing, StorageError

from .base import MAX_OPEN_FILES, Files, OpenFile
from .cancel import CancelScope
from .read_at import read_at
from .retries import backoff, with_retries

__all__ = ["Folder", "retry_local"]

Answer = TypeVar("Answer")

# Attempts of a local read that fails (EIO, ESTALE, ...) and the first wait: 25 to 50 s in all, about the time a file
# server takes to restart.
_TRIES, _FIRST_WAIT_S = 10, 0.1
_FINAL_ERRNO = (
    errno.EACCES,
    errno.EINVAL,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ENOSYS,
    errno.EPERM,
)  # that a retry cannot change


class Folder(Files):
    """A folder on a local or mounted disk; files are read in place."""

    remote = False

    def __init__(self, root: str) -> None:
        self._root = root
        self._reads = CancelScope()  # replaced by `interrupt`: of the reads that have begun since
        base = root  # why: a reference to `self` in the cache would keep the folder's files open for ever
        self._open: Callable[[str], OpenFile] = functools.lru_cache(MAX_OPEN_FILES)(lambda n: OpenFile(f"{base}/{n}"))

    def __reduce__(self) -> tuple[object, ...]:
        return Folder, (self._root,)

    def for_reader(self) -> Folder:
        own = Folder(self._root)
        own._open = self._open
        return own

    @property
    def root(self) -> str:
        return self._root

    def where(self, name: str) -> str:
        return os.path.join(self._root, name)  # noqa: PTH118  # why: per sample, and a third of Path's cost

    def file_version(self, name: str) -> tuple[int, str] | None:
        def stat_file() -> tuple[int, str]:
            stat = os.stat(self.where(name))  # noqa: PTH116
            return stat.st_size, str(stat.st_mtime_ns)

        try:
            return self._retry(name, stat_file)
        except FileNotFoundError:
            return None

    def local(self, name: str) -> Path:
        path = Path(self.where(name))
        self._retry(name, path.stat)
        return path

    def read(self, name: str, offset: int, nbytes: int, *, fresh: bool = False) -> bytes:
        if fresh:
            self.release()

        def read_file() -> bytes:
            try:
                file = self._open(name)  # why a variable: keeps it open until the read is done
                data = read_at(file.fd, nbytes, offset)
            except OSError:
                self.release()  # why: after ESTALE the file must be opened again
                raise
            return data

        try:
            data = self._retry(name, read_file)
        except FileNotFoundError:
            raise Missing(
                f"{self.where(name)}: not found, expected a file of the set; put it back or mount its volume, then run "
                "the same command again: it continues"
            ) from None
        if len(data) != nbytes:
            raise FileEndsEarly(
                f"{self.where(name)}: ends too early, got {len(data)} bytes at offset {offset}, expected {nbytes}; "
                "run `resolute verify` on the set that it belongs to",
                len(data),
                offset + len(data),
            )
        return data

    def open(self, name: str) -> OpenFile | None:
        try:
            return self._open(name)
        except OSError:
            return None

    def prefetch(self, name: str) -> bool:
        return True  # the operating system reads ahead by itself

    def release(self) -> None:
        self._open.cache_clear()  # type: ignore[attr-defined]  # an lru_cache

    def interrupt(self) -> None:
        before, self._reads = self._reads, CancelScope()
        before.cancel()

    def close(self) -> None:
        self.interrupt()
        self.release()

    def _retry(self, name: str, request: Callable[[], Answer]) -> Answer:
        return retry_local(request, self.where(name), scope=self._reads)


def retry_local(request: Callable[[], Answer], where: object, *, scope: CancelScope | None = None) -> Answer:
    """Return `request()`, a read from a disk, retried for up to a minute if it fails (EIO, ESTALE, ...).

    Raises `FileNotFoundError` immediately; `StorageError` if access is refused or all retries failed; `Interrupted` if
    `scope` is cancelled.
    """
    try:
        waits_s = backoff(_TRIES, _FIRST_WAIT_S)
        return with_retries(request, waits_s=waits_s, may_pass=_may_pass, scope=scope, where=where)
    except FileNotFoundError:
        raise
    except NotADirectoryError:  # a parent folder was replaced by a file
        raise FileNotFoundError(2, "No such file or directory", str(where)) from None
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        if error.errno in _FINAL_ERRNO:
            raise StorageError(
                f"{where}: access is refused, got '{reason}', expected its bytes; check the address and the "
                "permissions, then run the same command again"
            ) from None
        raise StorageError(
            f"{where}: cannot be read, got '{reason}' at the last of {_TRIES} tries, expected its bytes; check "
            "the disk or the mount, then run the same command again: it continues"
        ) from None


def _may_pass(error: Exception) -> bool:
    is_final = isinstance(error, FileNotFoundError | NotADirectoryError) or getattr(error, "errno", 0) in _FINAL_ERRNO
    return isinstance(error, OSError) and not is_final
