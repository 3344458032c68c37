"""Files and folders on this machine or in any store that a URL names: listing, opening, patterns.

Every failure is a one-line error: a `StorageError` if storage is unavailable, otherwise a `ResoluteError`.
"""

from __future__ import annotations

import errno
import glob
import io
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from braceexpand import braceexpand

from resolute.errors import ResoluteError, StorageError, is_unavailable, strip_credentials
from resolute.pipeline.storage.drivers import file_system
from resolute.pipeline.storage.request_errors import GONE, http_status
from resolute.prep.storage.retry import is_outage, is_retryable, retry
from resolute.urls import is_url

from .names import ignore_reason, is_image

__all__ = [
    "Entry",
    "common_root",
    "expand_pattern",
    "file_name",
    "file_size",
    "is_pattern",
    "is_version",
    "list_folder",
    "open_file",
    "path_kind",
    "read_errors",
    "version_stamp",
    "without_query",
]

_HTTP = ("http://", "https://")


class Entry(NamedTuple):
    """An entry of a folder; `kind` is file, folder or other (pipes, devices); `nbytes` is as in `file_size`.

    `is_link`: a link to a folder of this machine.
    """

    name: str
    kind: str
    nbytes: int | None
    is_link: bool = False

    @property
    def sort_key(self) -> bytes:
        """Sorting by it at every level gives full paths in ascending order of bytes."""
        return os.fsencode(self.name) + (b"/" if self.kind == "folder" else b"")


@contextmanager
def read_errors(path: str, what: str = "read") -> Iterator[None]:
    """Turn errors of the system, of drivers and of file formats while reading `path` into a `ResoluteError`."""
    unavailable = False
    try:
        yield
    except (OSError, EOFError, ValueError) as error:
        unavailable = isinstance(error, OSError) and error.errno is not None and is_unavailable(error)
        unavailable |= http_status(error) not in (None, *GONE)
        message = getattr(error, "strerror", None) or str(error) or type(error).__name__
        where = getattr(error, "filename", None) or path
    except ImportError as error:
        message, where = str(error), path
    except Exception as error:
        # why: drivers and decompressors raise their own types; bugs of ours must stay visible
        if type(error).__module__.split(".")[0] in ("builtins", "resolute"):
            raise
        message, where = str(error) or type(error).__name__, path
    else:
        return
    expected = "a readable folder" if what == "listed" else "a complete, readable file"
    # why: a driver's message may hold the URL's password
    words = strip_credentials(f"{where}: cannot be {what}, got {' '.join(str(message).split())[:300]}")
    raise (StorageError if unavailable else ResoluteError)(
        f"{words}, expected {expected}; correct the path, its permissions or the store's settings"
    )


def file_name(path: str) -> str:
    """The last part of a path or URL, without the query (and thus the signature) of a web address."""
    return without_query(path).rpartition("/")[2]


def common_root(paths: Sequence[str]) -> str:
    """The root that messages and names of files are relative to: a single file itself, else the folder of the first."""
    return paths[0] if len(paths) == 1 else paths[0].rpartition("/")[0] or "."


def without_query(path: str) -> str:
    """A web address up to its question mark; other paths unchanged, because there it is part of a name."""
    return path.partition("?")[0] if path.startswith(_HTTP) else path


def list_folder(folder: str) -> list[Entry]:
    """The entries of a folder, ascending by `sort_key`. Raises `ResoluteError` if it cannot be listed."""
    with read_errors(folder, "listed"):
        listed = _remote_entries(folder) if is_url(folder) else retry(folder, lambda: list(_local_entries(folder)))
        return sorted(listed, key=lambda entry: entry.sort_key)


def _local_entries(folder: str) -> Iterator[Entry]:
    with os.scandir(folder) as listing:
        for entry in listing:
            if entry.is_symlink():
                yield _link_target_entry(f"{folder.rstrip('/')}/{entry.name}", entry.name)
            elif entry.is_dir():
                yield Entry(entry.name, "folder", 0)
            elif entry.is_file():
                yield Entry(entry.name, "file", entry.stat().st_size)
            else:
                yield Entry(entry.name, "other", 0)


def _link_target_entry(path: str, name: str) -> Entry:
    """The entry that a link leads to; a dangling link counts as a file, which later becomes a reject."""
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116  # why not Path: called for every link
    except FileNotFoundError:
        # why: a dangling link that is never read is not an error
        return Entry(name, "file", file_size(path) if is_image(name) and not ignore_reason(name) else None)
    except OSError as error:
        if is_retryable(error):
            raise
        return Entry(name, "file", 0)
    if stat.S_ISDIR(mode):
        return Entry(name, "folder", 0, is_link=True)
    return Entry(name, "file", file_size(path)) if stat.S_ISREG(mode) else Entry(name, "other", 0)


def file_size(path: str) -> int | None:
    """Size of a local file in bytes; None if it is missing from an existing folder; 0 if `path` cannot name a file.

    For a link, the folder is that of its target. Raises `StorageError` if the folder is missing too, as after a lost
    mount, or if storage is unavailable.
    """
    try:
        return retry(path, lambda: _file_size(path))
    except (OSError, ValueError):  # ValueError: a NUL in the name; reading it gives a reject
        return 0


def _file_size(path: str) -> int | None:
    try:
        return os.stat(path).st_size  # noqa: PTH116
    except FileNotFoundError:
        Path(path).resolve().parent.stat()
        return None


def _remote_entries(folder: str) -> Iterator[Entry]:
    if folder.startswith(_HTTP):
        raise ValueError("folders cannot be listed over HTTP: use an archive, a list of files or a {0..9} pattern")
    fs, path = file_system(folder)
    path = path.rstrip("/")
    for info in fs.ls(path, detail=True):
        full = info["name"].rstrip("/")
        if full != path:  # why: stores may hold an empty object for the folder itself
            is_folder = info["type"] == "directory"
            yield Entry(full.rpartition("/")[2], "folder" if is_folder else "file", int(info.get("size") or 0))


def path_kind(path: str) -> str:
    """ "file", "folder", or "" if nothing is there; over HTTP, which has no folders, always "file"."""
    if path.startswith(_HTTP):
        return "file"
    if is_url(path):
        with read_errors(path, "listed"):
            fs, inner = file_system(path)
            try:  # why not isfile: it is also false if the store refuses or fails
                return {"file": "file", "directory": "folder"}.get(fs.info(inner)["type"], "")
            except FileNotFoundError as error:
                if http_status(error) in (None, *GONE):
                    return ""
                raise
    with read_errors(path):
        try:
            mode = retry(path, lambda: _mode(path))
        except OSError as error:
            if is_unavailable(error):
                raise
            return ""
    return "folder" if stat.S_ISDIR(mode) else "file" if mode else ""


def _mode(path: str) -> int:
    try:
        return os.stat(path).st_mode  # noqa: PTH116
    except FileNotFoundError:
        return 0


@contextmanager
def open_file(path: str, *, forward: bool = False) -> Iterator[BinaryIO]:
    """Open a file for reading; `forward`: without seeking, which also works with servers without byte ranges.

    Short outages of a local disk are bridged. Raises `ResoluteError` for any error while it is open.
    """
    with read_errors(path):
        if not is_url(path):
            with io.BufferedReader(_Bridging(path)) as local:
                yield local
            return
        fs, inner = file_system(path)
        with fs.open(inner, "rb", **({"block_size": 0} if forward and path.startswith(_HTTP) else {})) as file:
            yield file


class _Bridging(io.RawIOBase):
    """A local file; after an outage it is read with a new descriptor, since a stale one (ESTALE) stays stale.

    A file that is missing or refused is so at once.
    """

    def __init__(self, path: str) -> None:
        self._path, self._at, self._descriptor = path, 0, -1
        self._descriptor = retry(path, lambda: os.open(path, os.O_RDONLY | os.O_CLOEXEC), when=is_outage)
        if stat.S_ISDIR(os.fstat(self._descriptor).st_mode):
            self.close()
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        end = os.fstat(self._descriptor).st_size if whence == os.SEEK_END else 0
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: end}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = retry(self._path, lambda: self._read(len(buffer)), when=is_outage)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def _read(self, nbytes: int) -> bytes:
        try:
            return os.pread(self._descriptor, nbytes, self._at)
        except OSError:
            again = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            os.dup2(again, self._descriptor, inheritable=False)
            os.close(again)
            raise

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        super().close()


def version_stamp(path: str) -> str:
    """A string that changes with the file; "" if the store offers none. Raises `ResoluteError` if it is missing."""
    with read_errors(path):
        if not is_url(path):
            info = Path(path).stat()
            return f"{info.st_size} {info.st_mtime_ns}"
        fs, inner = file_system(path)
        about = fs.info(inner)
        marks = _marks(about)
        return " ".join([f"{about.get('size')}", *marks]) if marks else ""


def is_version(about: Mapping[str, Any], stamp: str) -> bool:
    """Whether what a store says about a file, as in fsspec's `info`, shows that it is the one with `version_stamp`.

    False also means that it says too little.
    """
    marks, size = _marks(about), about.get("size")
    sizes = [] if size is None else [f"{size}"]
    return bool(marks) and all(f" {mark} " in f" {stamp} " for mark in [*sizes, *marks])


def _marks(about: Mapping[str, Any]) -> list[str]:
    """What tells versions of a file apart."""
    keys = ("ETag", "etag", "md5Hash", "blob_id", "Last-Modified", "LastModified", "mtime", "created")
    return [f"{about[key]}" for key in keys if about.get(key)]


def is_pattern(src: str) -> bool:
    """Whether `src` stands for several files: it holds braces or wildcards and does not itself exist."""
    # why: a question mark in a web address begins its query
    wildcards = "*{" if src.startswith(_HTTP) else "*?[{"
    if not any(sign in src for sign in wildcards):
        return False
    if is_url(src):  # why not over HTTP: there, a server says only of a file whether it exists
        return src.startswith(_HTTP) or not path_kind(src)
    return not os.path.lexists(src)


def expand_pattern(src: str) -> list[str]:
    """The files that a pattern with braces (`x-{000..146}.tar`) or wildcards names, sorted; at least one.

    Files named by braces are not checked for existence. Raises `ResoluteError` if no file matches a wildcard.
    """
    paths: set[str] = set()
    for pattern in braceexpand(src):
        if not is_pattern(pattern):
            paths.add(pattern)
        elif is_url(pattern):
            with read_errors(pattern, "listed"):
                fs, path = file_system(pattern)
                paths.update(fs.unstrip_protocol(name) for name in fs.glob(path))
        else:
            paths.update(glob.glob(pattern, recursive=True))  # noqa: PTH207  # why: Path's needs a root
    if not paths:
        raise ResoluteError(f"{src}: no such file, got no match of the pattern, expected at least one; correct it")
    return sorted(paths)
