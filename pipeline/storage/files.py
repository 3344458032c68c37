"""The files of a shard set, in a folder or in a store behind a URL.

A folder is read in place; a URL is read through a cache on a local disk (`remote.py`, `disk_cache.py`), which is
imported only for URLs. Both keep two kinds of error apart: `StorageError` if the storage does not deliver
(after retries), `DamagedSample` if a file is there and too short. What a file holds is checked by its reader.
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
from .retry import ask_again

if TYPE_CHECKING:
    from .disk_cache import CacheSettings

__all__ = ["DaemonPool", "Files", "Folder", "OpenFile", "end_threads", "is_url", "open_files", "retry_local"]

Answer = TypeVar("Answer")

_OPEN_FILES = 256  # well under the usual limit of 1024 a process
# Tries of a local read that failed (EIO, ESTALE, ...), and the wait before the second: 25 to 50 s in all, about what a
# file server takes to start again.
_TRIES, _FIRST_WAIT_S = 10, 0.1
_PATIENCE_S = 1.5  # with threads that end: a system call on a dead mount never does


class Files(Protocol):
    """The files of one shard set by name, POSIX paths relative to its root. All methods are thread-safe."""

    @property
    def root(self) -> str: ...  # as the user gave it, without a password, for messages
    @property
    def remote(self) -> bool: ...  # True: `local` and `read` may ask a server

    @property
    def chunk_bytes(self) -> int: ...  # what is read comes in aligned ranges of this size; 0: just as it is asked for

    def where(self, name: str) -> str:
        """Path or URL of a file, for messages."""

    def size(self, name: str) -> int | None:
        """Its bytes; None if it is not there. A remote store is asked each time. Raises `StorageError`."""
        known = self.identity(name)
        return None if known is None else known[0]

    def identity(self, name: str) -> tuple[int, str] | None:
        """Its bytes, and what else shows that it changed (a time, an ETag); None if it is not there."""

    def local(self, name: str) -> Path:
        """A complete local copy of a small file (manifest, index); of a folder the file itself.

        The copy stays until `close`. Raises `FileNotFoundError` if it is not there, `StorageError` if its store fails.
        """

    def read(self, name: str, offset: int, nbytes: int, *, fresh: bool = False) -> bytes:
        """`nbytes` bytes of a file from `offset` on. `fresh`: drop what is cached or open of it, and read it anew.

        Raises `StorageError` if they cannot be read after retries (`Missing` if the file is not there),
        `FileEndsEarly` if the file is there and ends before them.
        """

    def place(self, name: str, offset: int, nbytes: int) -> tuple[OpenFile, int] | None:
        """An open file on this machine that holds these bytes, and where in it; None: ask `read`.

        The file stays open for as long as the object lives. Of a remote store they are fetched first.
        Raises as `read` if that fails.
        """
        return None

    def want(self, name: str, offset: int, nbytes: int) -> bool:
        """A hint that these bytes will be read soon: start to fetch them. False: too much is under way, ask later."""

    def release(self) -> None:
        """Close what is kept open for the next `place` or `read`, which opens it again."""

    def interrupt(self) -> None:
        """End the reads that are under way, their retries and unmet hints, with `Interrupted`; later reads work."""

    def close(self) -> None:
        """End threads, connections and open files. A read under way ends as if it had come before or fails."""


def is_url(root: str | Path) -> bool:
    return "://" in str(root)


def open_files(root: str | Path, *, cache: CacheSettings | None = None) -> Files:
    """The files at a folder, `file://` or an fsspec URL (`s3://`, `gs://`, `http(s)://`, ...).

    `cache` is for URLs: where and how much to keep on this machine, see `CacheSettings`.
    Raises `ResoluteError` for a URL whose driver is not installed, a cache that cannot be written, or a cache
    given for a folder.
    """
    if is_url(root) and not str(root).startswith(("file://", "local://")):
        from .remote import Remote

        return Remote(str(root), cache)
    if cache is not None:
        raise ResoluteError(f"{root}: got a cache for a folder, expected it for a URL only; leave it out")
    return Folder(str(root))


class OpenFile:
    """An open file that closes with its last reference, also when a thread still reads while it is evicted."""

    def __init__(self, path: str | Path) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)


class Folder(Files):
    """A folder on a disk, local or mounted: every file is read in place."""

    remote = False
    chunk_bytes = 0

    def __init__(self, root: str) -> None:
        self._given = root
        self._base = root.partition("://")[2] if is_url(root) else root
        self._stop = threading.Event()  # ends the reads that began while it was this one
        base = self._base  # why: with `self` in there, what is open would outlive its last user
        self._open: Callable[[str], OpenFile] = functools.lru_cache(_OPEN_FILES)(lambda n: OpenFile(f"{base}/{n}"))

    def __reduce__(self) -> tuple[object, ...]:
        return Folder, (self._given,)

    @property
    def root(self) -> str:
        return self._given

    def where(self, name: str) -> str:
        return os.path.join(self._base, name)  # noqa: PTH118  # why: a third of Path's cost, and this is per sample

    def identity(self, name: str) -> tuple[int, str] | None:
        def ask() -> tuple[int, str]:
            stat = os.stat(self.where(name))  # noqa: PTH116
            return stat.st_size, str(stat.st_mtime_ns)

        try:
            return self._again(name, ask)
        except FileNotFoundError:
            return None

    def local(self, name: str) -> Path:
        path = Path(self.where(name))
        self._again(name, path.stat)
        return path

    def read(self, name: str, offset: int, nbytes: int, *, fresh: bool = False) -> bytes:
        if fresh:
            self.release()

        def ask() -> bytes:
            try:
                file = self._open(name)  # why: the name keeps it open until the read is done
                data = read_at(file.fd, nbytes, offset)
            except OSError:
                self.release()  # why: after ESTALE only a file that is opened again can be read
                raise
            return data

        try:
            data = self._again(name, ask)
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

    def place(self, name: str, offset: int, nbytes: int) -> tuple[OpenFile, int] | None:
        try:
            return self._open(name), offset
        except OSError:
            return None

    def want(self, name: str, offset: int, nbytes: int) -> bool:
        return True  # why: the system reads ahead by itself

    def release(self) -> None:
        self._open.cache_clear()  # type: ignore[attr-defined]  # an lru_cache

    def interrupt(self) -> None:
        stopped, self._stop = self._stop, threading.Event()
        stopped.set()

    def close(self) -> None:
        self.interrupt()
        self.release()

    def _again(self, name: str, ask: Callable[[], Answer]) -> Answer:
        """`ask()`, again where the disk fails. Raises `FileNotFoundError` at once, `StorageError` in the end."""

        return retry_local(ask, self.where(name), stop=self._stop)

    def __enter__(self) -> Folder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def retry_local(ask: Callable[[], Answer], where: object, *, stop: threading.Event | None = None) -> Answer:
    """The result of a read from a disk, read again for up to a minute where that fails (EIO, ESTALE, ...).

    Raises `FileNotFoundError` at once, `StorageError` in the end or for a refusal, `Interrupted` if `stop` is set.
    """

    def checked() -> Answer:
        try:
            return ask()
        except NotADirectoryError:  # a folder on the way was replaced by a file
            raise FileNotFoundError(2, "No such file or directory", str(where)) from None

    return ask_again(
        checked, where=str(where), tries=_TRIES, first_wait_s=_FIRST_WAIT_S, stop=stop or threading.Event(),
        source="disk or the mount", retried=OSError,
    )  # fmt: skip


class DaemonPool:
    """Threads that do submitted work in order, and that never keep the process from ending.

    why not ThreadPoolExecutor: at the interpreter's exit it first does all that was ever submitted. Use as a context
    manager: an exception in the block drops what has not begun and interrupts the reads under way.
    """

    def __init__(self, threads: int, *, name: str, files: Files) -> None:
        """`files` are those that the work reads: `close` interrupts them."""
        self._most, self._name, self._files = threads, name, files
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, work: Callable[[], Answer]) -> Future[Answer]:
        """The result of `work()`, later. Raises `RuntimeError` after `close`."""
        future: Future[Answer] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("closed")
            self._tasks.put((future, work))
            if len(self._threads) < self._most:
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
                except BaseException as error:  # why: it is raised where the result is awaited
                    future.set_exception(error)
            del task, future, work  # why: what they hold shall not live until the next task

    def cancel(self) -> None:
        """Cancel what has not begun."""
        with suppress(queue.Empty):
            while True:
                if (task := self._tasks.get_nowait()) is not None:
                    task[0].cancel()

    def close(self, *, interrupt: bool = True) -> None:
        """End the threads; with `interrupt` without the work that is submitted, and in 2 s."""
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
    """Wait for threads that were told to end. `interrupt()` is called until they have: each may have one more request
    to make. Daemon threads that a system call holds for longer than 1.5 s are left behind.
    """
    until = time.monotonic() + _PATIENCE_S
    for thread in threads:
        thread.join(0.02)
        while thread.is_alive() and time.monotonic() < until:
            interrupt()
            thread.join(0.02)
