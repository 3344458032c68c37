"""`Folder`: the files of a shard set in a local or mounted folder, read in place; retries of local reads."""

from __future__ import annotations

import errno
import functools
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from resolute.errors import FileEndsEarly, Interrupted, Missing, StorageError

from .base import MAX_OPEN_FILES, Files, OpenFile
from .read_at import read_at

__all__ = ["Folder", "retry_local"]

Answer = TypeVar("Answer")

# Attempts of a local read that fails (EIO, ESTALE, ...) and the first wait: 25 to 50 s in all, about the time a file
# server takes to restart.
_TRIES, _FIRST_WAIT_S, _MAX_WAIT_S = 10, 0.1, 20.0
_FINAL_ERRNO = (
    errno.EACCES,
    errno.EINVAL,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ENOSYS,
    errno.EPERM,
)  # that a retry cannot change
# why not the global generator: a flaky disk must not change the random numbers of a seeded run
_jitter = random.SystemRandom()


class Folder(Files):
    """A folder on a local or mounted disk; files are read in place."""

    remote = False

    def __init__(self, root: str) -> None:
        self._root = root
        self._stop = threading.Event()  # replaced by `interrupt`: set for the reads that began before
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
        stopped, self._stop = self._stop, threading.Event()
        stopped.set()

    def close(self) -> None:
        self.interrupt()
        self.release()

    def _retry(self, name: str, request: Callable[[], Answer]) -> Answer:
        return retry_local(request, self.where(name), stop=self._stop)


def retry_local(request: Callable[[], Answer], where: object, *, stop: threading.Event | None = None) -> Answer:
    """Return `request()`, a read from a disk, retried for up to a minute if it fails (EIO, ESTALE, ...).

    Raises `FileNotFoundError` immediately; `StorageError` if access is refused or all retries failed; `Interrupted` if
    `stop` is set.
    """

    for tried in range(1, _TRIES + 1):
        try:
            return request()
        except FileNotFoundError:
            raise
        except NotADirectoryError:  # a parent folder was replaced by a file
            raise FileNotFoundError(2, "No such file or directory", str(where)) from None
        except OSError as error:
            if stop is not None and stop.is_set():
                break
            reason = error.strerror or str(error) or type(error).__name__
            if error.errno in _FINAL_ERRNO:
                raise StorageError(
                    f"{where}: access is refused, got '{reason}', expected its bytes; check the address and the "
                    "permissions, then run the same command again"
                ) from None
            if tried == _TRIES:
                raise StorageError(
                    f"{where}: cannot be read, got '{reason}' at the last of {_TRIES} tries, expected its bytes; check "
                    "the disk or the mount, then run the same command again: it continues"
                ) from None
        # "Exponential Backoff And Jitter", AWS Architecture Blog, 2015 ("equal jitter")
        wait_s = min(_FIRST_WAIT_S * 2 ** (tried - 1), _MAX_WAIT_S) * _jitter.uniform(0.5, 1.0)
        if (stop or threading.Event()).wait(wait_s):
            break
    raise Interrupted(f"{where}: the read was interrupted, expected files that stay open; open them again")
