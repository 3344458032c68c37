"""Where do the files of a shard set come from: a folder, or a store behind a URL?

`open_files(root)` answers for both. A folder is read in place; a URL is read through a cache on a local disk
(`pipeline/remote.py`, `pipeline/cache.py`), which is imported only when there is one.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from .errors import ResoluteError
from .source_record import repair_hint

if TYPE_CHECKING:
    from .cache import CacheSettings

__all__ = ["Files", "Folder", "OpenFile", "is_url", "open_files"]

_OPEN_FILES = 256  # well under the usual limit of 1024 a process


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
        """Its bytes; None if it is not there. A remote store is asked each time."""

    def identity(self, name: str) -> tuple[int, str] | None:
        """Its bytes, and what else tells that it changed (a time, an ETag); None if it is not there."""
        nbytes = self.size(name)
        return None if nbytes is None else (nbytes, "")

    def local(self, name: str) -> Path:
        """A complete local copy of a small file (manifest, index); of a folder the file itself.

        The copy stays until `close`. Raises `FileNotFoundError` if it is not there, `ResoluteError` if its store fails.
        """

    def read(self, name: str, offset: int, nbytes: int, *, fresh: bool = False) -> bytes:
        """`nbytes` bytes of a file from `offset` on. `fresh`: drop what a cache holds of them and fetch them again.

        Raises `ResoluteError` if they cannot be read or the file ends before them.
        """

    def place(self, name: str, offset: int, nbytes: int) -> tuple[OpenFile, int] | None:
        """An open file on this machine that holds these bytes, and where in it; None: ask `read`.

        The file stays open for as long as the object lives. Of a remote store they are fetched first.
        Raises `ResoluteError` if that fails.
        """
        return None

    def want(self, name: str, offset: int, nbytes: int) -> bool:
        """A hint that these bytes will be read soon: start to fetch them. False: too much is under way, ask later."""

    def release(self) -> None:
        """Close what is kept open for the next `place` or `read`, which opens it again."""

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
        base = self._base  # why: with `self` in there, what is open would outlive its last user
        self._open: Callable[[str], OpenFile] = functools.lru_cache(_OPEN_FILES)(lambda n: OpenFile(f"{base}/{n}"))

    def __reduce__(self) -> tuple[object, ...]:
        return Folder, (self._given,)

    @property
    def root(self) -> str:
        return self._given

    def where(self, name: str) -> str:
        return os.path.join(self._base, name)  # noqa: PTH118  # why: a third of Path's cost, and this is per sample

    def size(self, name: str) -> int | None:
        known = self.identity(name)
        return None if known is None else known[0]

    def identity(self, name: str) -> tuple[int, str] | None:
        try:
            stat = os.stat(self.where(name))  # noqa: PTH116
            return stat.st_size, str(stat.st_mtime_ns)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise self._unreadable(name, error) from None

    def local(self, name: str) -> Path:
        path = Path(self.where(name))
        if not path.exists():
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return path

    def read(self, name: str, offset: int, nbytes: int, *, fresh: bool = False) -> bytes:
        try:
            file = self._open(name)  # why: the name keeps it open until the read is done
            data = os.pread(file.fd, nbytes, offset)
            while len(data) < nbytes and (more := os.pread(file.fd, nbytes - len(data), offset + len(data))):
                data += more  # why: a network disk may answer in parts
        except OSError as error:
            raise self._unreadable(name, error) from None
        if len(data) != nbytes:
            raise ResoluteError(
                f"{self.where(name)}: ends too early, got {len(data)} bytes at offset {offset}, expected {nbytes}; "
                + repair_hint(self.root)
            )
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

    def close(self) -> None:
        self.release()

    def _unreadable(self, name: str, error: OSError) -> ResoluteError:
        return ResoluteError(
            f"{self.where(name)}: cannot be read, got '{error.strerror or error}', expected a shard set's file; "
            f"check the disk, or {repair_hint(self.root)}"
        )

    def __enter__(self) -> Folder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
