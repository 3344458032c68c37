"""`Files`: uniform access to the files of a shard set, in a local folder (`local.py`) or behind a URL (`remote.py`).

A folder is read in place; a URL is read through a local disk cache (`cache.py`). Errors are of two kinds:
`StorageError` if the storage does not deliver (after retries), `DamagedSample` if a file exists but is too short.
Contents are checked by the reader, not here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, Self

__all__ = ["MAX_OPEN_FILES", "Files", "OpenFile", "Write"]

MAX_OPEN_FILES = 256  # that `Files` keeps open: well below the usual limit of 1024 per process

Write = Callable[[memoryview, int], object]  # some bytes of a file, at an offset


class Files(Protocol):
    """The files of one shard set, by POSIX path relative to its root. All methods are thread-safe."""

    @property
    def root(self) -> str: ...  # folder or URL for messages, without credentials
    @property
    def remote(self) -> bool: ...  # True: `local` and `read` may send requests

    def where(self, name: str) -> str:
        """Path or URL of a file, for messages."""

    def size(self, name: str) -> int | None:
        """The file's size in bytes, never cached; None if it does not exist. Raises `StorageError`."""
        version = self.file_version(name)
        return None if version is None else version[0]

    def file_version(self, name: str) -> tuple[int, str] | None:
        """(size in bytes, change marker: mtime or ETag); None if the file does not exist. Raises `StorageError`."""

    def local(self, name: str) -> Path:
        """Path of the file, or of a complete local copy of a small remote file (manifest, index).

        A copy stays until `close`. Raises `FileNotFoundError` if the file does not exist, `StorageError` on failure.
        """

    def expect(self, listed: Mapping[str, Any]) -> None:
        """Take {name: {bytes, sha256}} of the set's manifests for what the store has to hold."""
        return

    def read(self, name: str, offset: int, nbytes: int, *, fresh: bool = False) -> bytes:
        """Read `nbytes` bytes from `offset` on. `fresh`: bypass cached data and open handles.

        Raises `StorageError` if the storage fails after retries (`Missing` if the file does not exist),
        `FileEndsEarly` if the file exists but ends too early.
        """

    def open(self, name: str) -> OpenFile | None:
        """The file, open, with its own offsets; a remote one is downloaded first. None: use `read`. Raises as `read`.

        It stays open for as long as the `OpenFile` lives.
        """
        return None

    def prefetch(self, name: str) -> bool:
        """Hint that the file will be read soon: start downloading it. False: too much is pending, ask again later."""

    def for_reader(self) -> Files:
        """The same files, open ones shared, but with requests that only its own `interrupt` ends, and `close`."""

    def release(self) -> None:
        """Close cached file handles; the next `open` or `read` opens them again."""

    def interrupt(self) -> None:
        """End own running reads, their retries and pending prefetches with `Interrupted`; later reads work.

        A prefetch that others have asked for as well goes on.
        """

    def close(self) -> None:
        """End threads, connections and open files. A read that is still running either completes or fails."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class OpenFile:
    """An open file that closes with its last reference, so a thread can still read it after its eviction."""

    def __init__(self, path: str | Path) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # bound: `os` may be gone when Python exits
        if hasattr(self, "fd"):
            close(self.fd)
