"""Reads an image's bytes from a file, a place in an archive, or an object store.

What is wrong with one file (damaged, too large, no regular file) is a `Reject`. Storage that does not deliver, a file
that has vanished since it was listed included, is tried again and then ends the run with a `StorageError`: it is never
a `Reject`. No more than `MAX_BYTES` are read for one image.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from fsspec.core import url_to_fs

from pipeline.errors import ResoluteError, StorageError, is_unavailable, strip_credentials
from pipeline.storage.read_at import read_at
from prep.convert.reject import NOT_THERE, Reject
from prep.storage.retry import WAITS_S, is_retryable, unavailable

from .image_ref import MAX_BYTES, MISSING, UNSEEN, ZIPPED, Location, is_url
from .zip_directory import HEADER_BYTES, TAIL_BYTES, content_start, unzip

__all__ = ["MAX_BYTES", "fetch", "fetch_many"]

_REMOTE_WAITS_S = (0.5, 2.0, 8.0)  # before each new try of a remote store
_HEADER_SLACK = 512  # bytes fetched for a zip header's name and extra fields, whose lengths only it knows
_OPEN_CONTAINERS = 64
_GONE = frozenset({404, 410})  # HTTP status
_EMPTY_RANGE = 416  # HTTP status: no byte of the range exists; of one that starts at 0, the file is empty


def fetch(location: Location) -> bytes:
    """The image file's bytes, at most `MAX_BYTES`. Raises `Reject` if it is to blame, `StorageError` if storage is."""
    (data,) = fetch_many([location])
    if isinstance(data, Reject):
        raise data
    assert data is not None
    return data


def fetch_many(locations: Sequence[Location], *, ahead_bytes: int = MAX_BYTES) -> list[bytes | Reject | None]:
    """The bytes of each, or why not, in order; remote ones are asked for all at once.

    None stands for an image of more than `ahead_bytes`, which is left for `fetch`: whoever reads ahead holds no more
    than that of each. Raises `StorageError` if storage does not deliver, after a few more tries.
    """
    done: list[bytes | Reject | None] = [None] * len(locations)
    local: list[int] = []
    remote: list[int] = []
    for i, location in enumerate(locations):
        nbytes = max(location.nbytes, location.size_bytes)
        if location.packed == MISSING:
            done[i] = Reject(NOT_THERE)
        elif nbytes > MAX_BYTES:
            done[i] = _too_large(nbytes)
        elif nbytes <= ahead_bytes:
            (remote if is_url(location.path) else local).append(i)
    for i, data in zip(local, _local([locations[i] for i in local], ahead_bytes), strict=True):
        done[i] = data
    if remote:
        for i, data in zip(remote, _remote([locations[i] for i in remote], ahead_bytes), strict=True):
            done[i] = data
    return done


def _too_large(nbytes: int) -> Reject:
    return Reject(f"too large: {nbytes} bytes")


def _local(locations: Sequence[Location], ahead_bytes: int) -> list[bytes | Reject | None]:
    done: list[bytes | Reject | None] = [None] * len(locations)
    left = list(range(len(locations)))
    for wait_s in (*WAITS_S, None):
        failed = []
        for i in left:
            try:
                done[i] = _whole(locations[i], ahead_bytes) if locations[i].offset < 0 else _part(locations[i])
            except Reject as reject:
                done[i] = reject
            except OSError as error:
                if not is_retryable(error):
                    raise
                _container.cache_clear()  # why: a stale handle stays stale; the file has to be opened anew
                failed.append(i)
                problem = error
        if not failed:
            return done
        if wait_s is None:
            raise unavailable(locations[failed[-1]].path, problem)
        time.sleep(wait_s)
        left = failed
    raise AssertionError("the last try returns or raises")


@contextmanager
def _damage() -> Iterator[None]:
    """Turn an error that says that the path can never name a readable file into a `Reject`."""
    try:
        yield
    except OSError as error:
        if is_unavailable(error):
            raise
        raise Reject(f"unreadable: {error.strerror}") from None
    except ValueError as error:  # a NUL in the name
        raise Reject(f"unreadable: {error}") from None


def _open(path: str) -> int:
    """A descriptor of a regular file; never waits for the other end of a pipe. Raises `Reject` and `OSError`."""
    with _damage():
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            if error.errno == errno.ENXIO and not stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116
                raise Reject("unreadable: not a regular file") from None
            raise
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise Reject(f"unreadable: {'Is a directory' if stat.S_ISDIR(mode) else 'not a regular file'}")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _whole(location: Location, ahead_bytes: int) -> bytes | None:
    descriptor = _open(location.path)
    try:
        nbytes = os.fstat(descriptor).st_size
        if nbytes > MAX_BYTES:
            raise _too_large(nbytes)
        if nbytes > ahead_bytes:
            return None
        data = _pread(descriptor, 0, nbytes)
    finally:
        os.close(descriptor)
    expected = location.nbytes or nbytes  # why: 0 is also what callers say that do not know the size
    if (nbytes, len(data)) != (expected, expected):
        raise ResoluteError(
            f"{location.path}: has changed since it was listed, got {len(data)} bytes, expected {expected}; wait until "
            "nobody writes there, then run the same command again"
        )
    return data


def _pread(descriptor: int, offset: int, nbytes: int) -> bytes:
    """`nbytes` from `offset` on, or fewer where the file ends."""
    with _damage():
        return read_at(descriptor, nbytes, offset)


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
    with _damage():
        info = os.stat(path)  # noqa: PTH116  # why: half of Path's overhead, per image
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


def _remote(locations: Sequence[Location], ahead_bytes: int) -> list[bytes | Reject | None]:
    spans: list[tuple[Location, int | None, int | None]] = []
    for location in locations:
        slack = HEADER_BYTES + _HEADER_SLACK + TAIL_BYTES if location.packed == ZIPPED else 0
        if location.packed == UNSEEN:  # why: one byte more tells that there is more
            spans.append((location, 0, ahead_bytes + 1))
        elif location.offset < 0:
            spans.append((location, None, None))
        else:
            spans.append((location, location.offset, location.offset + location.nbytes + slack))
    done: list[bytes | Reject | None] = [*_spans(spans)]
    for i, location in enumerate(locations):
        data = done[i]
        if not isinstance(data, bytes):
            continue
        try:
            if location.offset >= 0:
                done[i] = _unpacked(location, data)
            elif len(data) > MAX_BYTES:
                raise _too_large(len(data))
            elif location.packed == UNSEEN and len(data) == ahead_bytes + 1:
                done[i] = None
        except Reject as reject:
            done[i] = reject
    return done


def _unpacked(location: Location, data: bytes) -> bytes:
    _, offset, nbytes, packed, size_bytes = location
    if packed != ZIPPED:
        return _complete(data, nbytes)
    needed = content_start(data) + nbytes
    if len(data) < needed:  # an unusually long header
        (again,) = _spans([(location, offset, offset + needed + TAIL_BYTES)])
        if isinstance(again, Reject):
            raise again
        data = again
    return unzip(data, nbytes, size_bytes)


def _spans(spans: Sequence[tuple[Location, int | None, int | None]]) -> list[bytes | Reject]:
    """Bytes [start, end) of each file, all of it where they are None; empty spans are not asked for."""
    done: list[bytes | Reject] = [b""] * len(spans)
    left = [i for i, (_, start, end) in enumerate(spans) if start is None or start != end]
    problem: object = None
    for wait_s in (0.0, *_REMOTE_WAITS_S):
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
    raise StorageError(
        strip_credentials(
            f"{spans[left[-1]][0].path}: cannot be fetched, got {_told(problem)} {len(_REMOTE_WAITS_S) + 1} times, "
            "expected its bytes; check the network, the store and your access to it, then run the same command again: "
            "finished shards are kept"
        )
    )


def _ask(spans: Sequence[tuple[Location, int | None, int | None]]) -> list[object]:
    """What each store answers, bytes or an exception, one concurrent request a store."""
    answers: list[object] = [None] * len(spans)
    stores: dict[int, tuple[Any, list[int], list[str]]] = {}
    for i, (location, _, _) in enumerate(spans):
        fs, path = url_to_fs(location.path)
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


def _verdict(result: object, span: tuple[Location, int | None, int | None]) -> bytes | Reject | None:
    """The bytes; a `Reject` if the object itself is to blame; None if another try may help."""
    location, start, end = span
    unseen = location.packed == UNSEEN
    if isinstance(result, bytes):
        if start is not None and end is not None and len(result) > end - start and not unseen:
            raise ResoluteError(
                f"{strip_credentials(location.path)}: its server sends whole files only, got {len(result)} bytes, "
                f"expected {end - start}; use a server that serves byte ranges, or download the file"
            )
        return result
    if isinstance(result, IsADirectoryError):
        return Reject(f"unreadable: {_told(result)}")
    status = getattr(result, "status", None)
    if unseen and (isinstance(result, FileNotFoundError) or status in _GONE):
        return Reject(f"not there: {_told(result)}")
    if unseen and (status == _EMPTY_RANGE or "InvalidRange" in f"{result} {getattr(result, '__cause__', None)}"):
        return b""
    return None


def _told(problem: object) -> str:
    """One line without the URL's credentials: HTTP status, or the system's words."""
    status, words = getattr(problem, "status", None), getattr(problem, "strerror", None)
    if isinstance(problem, FileNotFoundError):
        return "No such file or directory"
    if isinstance(problem, PermissionError):
        return "Permission denied"
    text = f"HTTP status {status}" if status else words or str(problem)
    return f"'{strip_credentials(' '.join(str(text).split()))[:200] or type(problem).__name__}'"
