"""How do an image's bytes come here, from a file, a place in an archive, or an object store?

What is one file's own fault becomes a `Reject`; a store that cannot be reached is an error of the whole run.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from fsspec.core import url_to_fs

from pipeline.errors import ResoluteError

from .decode import Reject
from .found import ZIPPED, Location, is_url
from .zip import HEADER_BYTES, TAIL_BYTES, content_start, unzip

__all__ = ["MAX_BYTES", "fetch", "fetch_many"]

MAX_BYTES = 1 << 30
_WAITS_S = (0.5, 2.0, 8.0)  # before each new try of a remote store
_HEADER_SLACK = 512  # bytes fetched for a zip header's name and extra fields, whose lengths only it knows
_OPEN_CONTAINERS = 64
# A file that the system cannot give us is its own fault; any other error (memory, descriptors) is ours.
_UNREADABLE = frozenset(
    {errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.EIO, errno.ENXIO, errno.ELOOP,
     errno.ENAMETOOLONG, errno.EILSEQ}
)  # fmt: skip
_ITS_OWN_FAULT = frozenset({401, 403, 404, 410})  # HTTP status


def fetch(location: Location) -> bytes:
    """The image file's bytes. Raises `Reject` if it is the problem, `ResoluteError` if its store is."""
    (data,) = fetch_many([location])
    if isinstance(data, Reject):
        raise data
    return data


def fetch_many(locations: Sequence[Location]) -> list[bytes | Reject]:
    """The bytes of each, or why not, in order; remote ones are asked for all at once.

    Raises `ResoluteError` if a remote store fails in a way that is not one object's, after a few more tries.
    """
    done: list[bytes | Reject] = [b""] * len(locations)
    remote: list[int] = []
    for i, location in enumerate(locations):
        try:
            if location.nbytes > MAX_BYTES or location.size_bytes > MAX_BYTES:
                raise Reject(f"too large: {max(location.nbytes, location.size_bytes)} bytes")
            if is_url(location.path):
                remote.append(i)
            else:
                done[i] = _whole(location.path) if location.offset < 0 else _part(location)
        except Reject as reject:
            done[i] = reject
    if remote:
        for i, data in zip(remote, _remote([locations[i] for i in remote]), strict=True):
            done[i] = data
    return done


def _open(path: str) -> int:
    """A descriptor of a regular file; never waits for the other end of a pipe. Raises `Reject`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in _UNREADABLE:
            raise Reject(f"unreadable: {error.strerror}") from None
        raise
    except ValueError as error:  # a NUL in the name
        raise Reject(f"unreadable: {error}") from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise Reject(f"unreadable: {'Is a directory' if stat.S_ISDIR(mode) else 'not a regular file'}")
    return descriptor


def _whole(path: str) -> bytes:
    descriptor = _open(path)
    try:
        nbytes = os.fstat(descriptor).st_size
        if nbytes > MAX_BYTES:
            raise Reject(f"too large: {nbytes} bytes")
        return _pread(descriptor, 0, nbytes)
    finally:
        os.close(descriptor)


def _pread(descriptor: int, offset: int, nbytes: int) -> bytes:
    """`nbytes` from `offset` on, or fewer where the file ends."""
    parts = []
    while nbytes > 0:
        try:
            part = os.pread(descriptor, nbytes, offset)
        except OSError as error:
            if error.errno in _UNREADABLE:
                raise Reject(f"unreadable: {error.strerror}") from None
            raise
        if not part:
            break
        parts.append(part)
        offset, nbytes = offset + len(part), nbytes - len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


class _Container:
    """An open archive; closed when the last user drops it, so that the cache never closes it in a read."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


@lru_cache(maxsize=_OPEN_CONTAINERS)
def _container(path: str, version: tuple[int, ...]) -> _Container:
    return _Container(_open(path))


def _part(location: Location) -> bytes:
    path, offset, nbytes, packed, size_bytes = location
    try:
        info = os.stat(path)  # noqa: PTH116  # why: half of Path's overhead, per image
    except OSError as error:
        raise Reject(f"unreadable: {error.strerror}") from None
    # why: a path may come to mean another file while this process lives
    container = _container(path, (info.st_dev, info.st_ino, info.st_mtime_ns))
    if packed == ZIPPED:
        header = _pread(container.descriptor, offset, HEADER_BYTES)
        rest_bytes = content_start(header) - HEADER_BYTES + nbytes + TAIL_BYTES
        return unzip(header + _pread(container.descriptor, offset + HEADER_BYTES, rest_bytes), nbytes, size_bytes)
    return _complete(_pread(container.descriptor, offset, nbytes), nbytes)


def _complete(data: bytes, nbytes: int) -> bytes:
    if len(data) < nbytes:
        raise Reject(f"truncated: its archive ends after {len(data)} of {nbytes} bytes")
    return data


def _remote(locations: Sequence[Location]) -> list[bytes | Reject]:
    spans: list[tuple[str, int | None, int | None]] = []
    for path, offset, nbytes, packed, _ in locations:
        slack = HEADER_BYTES + _HEADER_SLACK + TAIL_BYTES if packed == ZIPPED else 0
        spans.append((path, None, None) if offset < 0 else (path, offset, offset + nbytes + slack))
    done = _spans(spans)
    for i, location in enumerate(locations):
        try:
            data = done[i]
            if isinstance(data, bytes) and location.offset >= 0:
                done[i] = _unpacked(location, data)
        except Reject as reject:
            done[i] = reject
    return done


def _unpacked(location: Location, data: bytes) -> bytes:
    path, offset, nbytes, packed, size_bytes = location
    if packed != ZIPPED:
        return _complete(data, nbytes)
    needed = content_start(data) + nbytes
    if len(data) < needed:  # an unusually long header
        (again,) = _spans([(path, offset, offset + needed + TAIL_BYTES)])
        if isinstance(again, Reject):
            raise again
        data = again
    return unzip(data, nbytes, size_bytes)


def _spans(spans: Sequence[tuple[str, int | None, int | None]]) -> list[bytes | Reject]:
    """Bytes [start, end) of each URL, all of it where they are None; empty spans are not asked for."""
    done: list[bytes | Reject] = [b""] * len(spans)
    left = [i for i, (_, start, end) in enumerate(spans) if start is None or start != end]
    problem: object = None
    for wait_s in (0.0, *_WAITS_S):
        time.sleep(wait_s)
        failed = []
        for i, result in zip(left, _ask([spans[i] for i in left]), strict=True):
            verdict = _verdict(result, spans[i])
            if verdict is None:
                failed.append(i)
                problem = result
            else:
                done[i] = verdict
        left = failed
        if not left:
            return done
    raise ResoluteError(
        f"{spans[left[0]][0]}: cannot be fetched, got {_told(problem)} {len(_WAITS_S) + 1} times, expected its "
        "bytes; check the network and the store, then run the same command again"
    )


def _ask(spans: Sequence[tuple[str, int | None, int | None]]) -> list[object]:
    """What each store answers, bytes or an exception, one concurrent request a store."""
    answers: list[object] = [None] * len(spans)
    stores: dict[int, tuple[Any, list[int], list[str]]] = {}
    for i, (url, _, _) in enumerate(spans):
        fs, path = url_to_fs(url)
        _, numbers, paths = stores.setdefault(id(fs), (fs, [], []))
        numbers.append(i)
        paths.append(path)
    for fs, numbers, paths in stores.values():
        starts, ends = [spans[i][1] for i in numbers], [spans[i][2] for i in numbers]
        try:
            results = fs.cat_ranges(paths, starts, ends, on_error="return")
        except Exception as error:  # why: drivers raise anything; `_verdict` sorts it
            results = [error] * len(numbers)
        for i, result in zip(numbers, results, strict=True):
            answers[i] = result
    return answers


def _verdict(result: object, span: tuple[str, int | None, int | None]) -> bytes | Reject | None:
    """The bytes; a `Reject` if the object itself is to blame; None if another try may help."""
    url, start, end = span
    if isinstance(result, bytes):
        if start is not None and end is not None and len(result) > end - start:
            raise ResoluteError(
                f"{url}: its server sends whole files only, got {len(result)} bytes, expected {end - start}; "
                "use a server that serves byte ranges, or download the file"
            )
        return result
    if isinstance(result, FileNotFoundError | PermissionError | IsADirectoryError):
        return Reject(f"unreadable: {_told(result)}")
    if getattr(result, "status", None) in _ITS_OWN_FAULT:
        return Reject(f"unreadable: {_told(result)}")
    return None


def _told(problem: object) -> str:
    """One line without the URL's credentials: HTTP status, or the system's words."""
    status, words = getattr(problem, "status", None), getattr(problem, "strerror", None)
    if isinstance(problem, FileNotFoundError):
        return "No such file or directory"
    if isinstance(problem, PermissionError):
        return "Permission denied"
    text = f"HTTP status {status}" if status else words or str(problem)
    return f"'{' '.join(str(text).split())[:200] or type(problem).__name__}'"
