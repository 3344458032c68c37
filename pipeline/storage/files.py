"""`Files`: uniform access to the files of a shard set, in a local folder or behind a URL.

A folder is read in place; a URL is read through a local disk cache (`remote.py`, `disk_cache.py`; imported only for
URLs). Errors are of two kinds: `StorageError` if the storage does not deliver (after retries), `DamagedSample` if a
file exists but is too short. Contents are checked by the reader, not here.
"""

from __future__ import annotations

import functools
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pipeline.errors import FileEndsEarly, Missing, ResoluteError

from .read_at import read_at
from .retry import retry_call

if TYPE_CHECKING:
    from .disk_cache import CacheSettings

__all__ = ["DaemonPool", "Files", "Folder", "OpenFile", "end_threads", "is_url", "open_files", "retry_local"]

Answer = TypeVar("Answer")

_OPEN_FILES = 256  # well below the usual limit of 1024 open files per process
# Attempts of a local read that fails (EIO, ESTALE, ...) and the first wait: 25 to 50 s in all, about the time a file
# server takes to restart.
_TRIES, _FIRST_WAIT_S = 10, 0.1
_JOIN_S = 1.5  # why bounded: a system call on a dead mount never returns


class Files(Protocol):
    """The files of one shard set, by POSIX path relative to its root. All methods are thread-safe."""

    @property
    def root(self) -> str: ...  # folder or URL for messages, without credentials
    @property
    def remote(self) -> bool: ...  # True: `local` and `read` may send requests

    @property
    def chunk_bytes(self) -> int: ...  # reads are fetched in aligned ranges of this size; 0: exactly as requested

    def where(self, name: str) -> str:
        """Path or URL of a file, for messages."""

    def size(self, name: str) -> int | None:
        """The file's size in bytes, never cached; None if it does not exist. Raises `StorageError`."""
        identity = self.identity(name)
        return None if identity is None else identity[0]

    def identity(self, name: str) -> tuple[int, str] | None:
        """(size in bytes, change marker: mtime or ETag); None if the file does not exist. Raises `StorageError`."""

    def local(self, name: str) -> Path:
        """Path of the file, or of a complete local copy of a small remote file (manifest, index).

        A copy stays until `close`. Raises `FileNotFoundError` if the file does not exist, `StorageError` on failure.
        """

    def read(self, name: str, offset: int, nbytes: int, *, fresh: bool = False) -> bytes:
        """Read `nbytes` bytes from `offset` on. `fresh`: bypass cached data and open handles.

        Raises `StorageError` if the storage fails after retries (`Missing` if the file does not exist),
        `FileEndsEarly` if the file exists but ends too early.
        """

    def locate(self, name: str, offset: int, nbytes: int) -> tuple[OpenFile, int] | None:
        """(open local file, offset) at which these bytes can be read; None: use `read`. Remote bytes are fetched first.

        The file stays open for as long as the `OpenFile` lives. Raises as `read`.
        """
        return None

    def prefetch(self, name: str, offset: int, nbytes: int) -> bool:
        """Hint that these bytes will be read soon: start fetching them. False: too much is pending, ask again later."""

    def release(self) -> None:
        """Close cached file handles; the next `locate` or `read` opens them again."""

    def interrupt(self) -> None:
        """End running reads, their retries and pending prefetches with `Interrupted`; later reads work."""

    def close(self) -> None:
        """End threads, connections and open files. A read that is still running either completes or fails."""


def is_url(root: str | Path) -> bool:
    return "://" in str(root)


def open_files(root: str | Path, *, cache: CacheSettings | None = None) -> Files:
    """Open a folder, a `file://` URL or an fsspec URL (`s3://`, `gs://`, `http(s)://`, ...).

    `cache` is only for remote URLs; None: the defaults of `CacheSettings`.
    Raises `ResoluteError` if the URL's driver is not installed, the cache cannot be written, or `cache` is set for a
    folder.
    """
    if is_url(root) and not str(root).startswith(("file://", "local://")):
        from .remote import Remote

        return Remote(str(root), cache)
    if cache is not None:
        raise ResoluteError(f"{root}: got a cache for a folder, expected it for a URL only; leave it out")
    return Folder(str(root))


class OpenFile:
    """An open file that closes with its last reference, so a thread can still read it after its eviction."""

    def __init__(self, path: str | Path) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)


class Folder(Files):
    """A folder on a local or mounted disk; files are read in place."""

    remote = False
    chunk_bytes = 0

    def __init__(self, root: str) -> None:
        self._root = root
        self._base = root.partition("://")[2] if is_url(root) else root
        self._stop = threading.Event()  # replaced by `interrupt`: set for the reads that began before
        base = self._base  # why: a reference to `self` in the cache would keep the folder's files open for ever
        self._open: Callable[[str], OpenFile] = functools.lru_cache(_OPEN_FILES)(lambda n: OpenFile(f"{base}/{n}"))

    def __reduce__(self) -> tuple[object, ...]:
        return Folder, (self._root,)

    @property
    def root(self) -> str:
        return self._root

    def where(self, name: str) -> str:
        return os.path.join(self._base, name)  # noqa: PTH118  # why: per sample, and a third of Path's cost

    def identity(self, name: str) -> tuple[int, str] | None:
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
                "run `make verify` on the set that it belongs to", len(data),
            )  # fmt: skip
        return data

    def locate(self, name: str, offset: int, nbytes: int) -> tuple[OpenFile, int] | None:
        try:
            return self._open(name), offset
        except OSError:
            return None

    def prefetch(self, name: str, offset: int, nbytes: int) -> bool:
        return True  # the operating system reads ahead by itself

    def release(self) -> None:
        self._open.cache_clear()  # type: ignore[attr-defined]  # an lru_cache

    def interrupt(self) -> None:
        stopped, self._stop = self._stop, threading.Event()
        stopped.set()

    def close(self) -> None:
        self.interrupt()
        self.release()

    def _retry(self, name: str, ask: Callable[[], Answer]) -> Answer:
        return retry_local(ask, self.where(name), stop=self._stop)

    def __enter__(self) -> Folder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def retry_local(ask: Callable[[], Answer], where: object, *, stop: threading.Event | None = None) -> Answer:
    """Return `ask()`, a read from a disk, retried for up to a minute if it fails (EIO, ESTALE, ...).

    Raises `FileNotFoundError` immediately; `StorageError` if access is refused or all retries failed; `Interrupted` if
    `stop` is set.
    """

    def checked() -> Answer:
        try:
            return ask()
        except NotADirectoryError:  # a parent folder was replaced by a file
            raise FileNotFoundError(2, "No such file or directory", str(where)) from None

    return retry_call(
        checked, where=str(where), tries=_TRIES, first_wait_s=_FIRST_WAIT_S, stop=stop or threading.Event(),
        source="disk or the mount", retried=OSError,
    )  # fmt: skip


class DaemonPool:
    """A pool of daemon threads that start submitted work in order and never keep the process from exiting.

    why not ThreadPoolExecutor: at interpreter exit it first finishes all submitted work. As a context manager, an
    exception in the block drops work that has not begun and interrupts running reads.
    """

    def __init__(self, threads: int, *, name: str, files: Files) -> None:
        """`files`: what the submitted work reads from; `close` interrupts its reads."""
        self._max_threads, self._name, self._files = threads, name, files
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, work: Callable[[], Answer]) -> Future[Answer]:
        """Run `work()` in the pool. Raises `RuntimeError` after `close`."""
        future: Future[Answer] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("closed")
            self._tasks.put((future, work))
            if len(self._threads) < self._max_threads:
                name = f"{self._name}-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
                self._threads[-1].start()
        return future

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, work = task
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:  # re-raised by `Future.result`
                    future.set_exception(error)
            del task, future, work  # why: do not keep their memory alive until the next task

    def cancel(self) -> None:
        """Cancel work that has not begun."""
        with suppress(queue.Empty):
            while True:
                if (task := self._tasks.get_nowait()) is not None:
                    task[0].cancel()

    def close(self, *, interrupt: bool = True) -> None:
        """End the threads: after all submitted work, or, with `interrupt`, without it and within 2 s."""
        with self._lock:
            self._closed = True
        if interrupt:
            self.cancel()
        for _ in self._threads:
            self._tasks.put(None)
        if interrupt:
            end_threads(self._threads, self._files.interrupt)
        else:
            for thread in self._threads:
                thread.join()

    def __enter__(self) -> DaemonPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(interrupt=kind is not None)


def end_threads(threads: Sequence[threading.Thread], interrupt: Callable[[], None]) -> None:
    """Join threads that have been asked to end, calling `interrupt()` until they do.

    Daemon threads that are stuck in a system call for longer than 1.5 s are abandoned.
    """
    until = time.monotonic() + _JOIN_S
    for thread in threads:
        thread.join(0.02)
        while thread.is_alive() and time.monotonic() < until:
            interrupt()
            thread.join(0.02)
