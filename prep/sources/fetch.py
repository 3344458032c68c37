"""Reads the bytes of an image from a file, an archive member or an object store.

A fault of the file itself (damaged, too large, not a regular file) is a `Reject`, and so is a permanent answer of a web
server to the URL of a list. Unavailable storage, including a file that has vanished since it was listed, is retried and
then ends the run with a `StorageError`; it is never a `Reject`. At most `MAX_BYTES` are read per image.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from resolute.errors import ResoluteError, StorageError, is_unavailable, strip_credentials
from resolute.pipeline.storage.drivers import GONE, file_system, http_status
from resolute.pipeline.storage.read_at import read_at
from resolute.prep.sources.reject import NOT_THERE, Reject
from resolute.prep.storage.retry import WAITS_S, is_retryable, unavailable
from resolute.prep.storage.thread_map import thread_map

from .archives.zip_directory import HEADER_BYTES, TAIL_BYTES, content_start, unzip
from .image_ref import MAX_BYTES, MISSING, UNSEEN, ZIPPED, ByteRange, is_url

__all__ = ["MAX_BYTES", "fetch", "fetch_many"]

_REMOTE_WAITS_S = (0.5, 2.0, 8.0)  # before each retry of a remote store
_PATIENCE_S = 10.0  # of an object store's client: `_fetch_spans` retries, and its tries multiply the wait
_HEADER_SLACK = 512  # bytes fetched for a zip header's name and extra fields, whose lengths it holds itself
_OPEN_CONTAINERS = 64
_THREADS = 16  # requests in flight of a driver that blocks
_REFUSED = frozenset({400, 401, 402, 403, 405, 406, 414, 451})  # HTTP status: asking again gives the same answer
_EMPTY_RANGE = 416  # HTTP status: range not satisfiable; for a range from 0 it means an empty file
_UNKNOWN_NAME = frozenset({socket.EAI_NONAME, socket.EAI_NODATA})


def fetch(byte_range: ByteRange) -> bytes:
    """The bytes of an image file, at most `MAX_BYTES`.

    Raises `Reject` for a fault of the file, `StorageError` for unavailable storage.
    """
    (data,) = fetch_many([byte_range])
    if isinstance(data, Reject):
        raise data
    assert data is not None
    return data


def fetch_many(byte_ranges: Sequence[ByteRange], *, ahead_bytes: int = MAX_BYTES) -> list[bytes | Reject | None]:
    """The bytes, or the `Reject`, of each image in order; remote images are requested concurrently.

    An image of more than `ahead_bytes` is not read, which bounds memory: its result is None, and `fetch` reads it
    later. Raises `StorageError` if storage stays unavailable after a few retries.
    """
    done: list[bytes | Reject | None] = [None] * len(byte_ranges)
    local: list[int] = []  # positions in `byte_ranges`
    remote: list[int] = []
    for i, byte_range in enumerate(byte_ranges):
        nbytes = max(byte_range.nbytes, byte_range.size_bytes)
        if byte_range.packed == MISSING:
            done[i] = Reject(NOT_THERE)
        elif nbytes > MAX_BYTES:
            done[i] = _too_large(nbytes)
        elif nbytes <= ahead_bytes:
            (remote if is_url(byte_range.path) else local).append(i)
    for positions, fetch_all in ((local, _fetch_local), (remote, _fetch_remote)):
        results = fetch_all([byte_ranges[i] for i in positions], ahead_bytes) if positions else []
        for i, data in zip(positions, results, strict=True):
            done[i] = data
    return done


def _too_large(nbytes: int) -> Reject:
    return Reject(f"too large: {nbytes} bytes")


def _fetch_local(byte_ranges: Sequence[ByteRange], ahead_bytes: int) -> list[bytes | Reject | None]:
    done: list[bytes | Reject | None] = [None] * len(byte_ranges)
    todo = list(range(len(byte_ranges)))
    for wait_s in (*WAITS_S, None):
        failed = []
        for i in todo:
            try:
                is_file = byte_ranges[i].offset < 0
                done[i] = _read_whole_file(byte_ranges[i], ahead_bytes) if is_file else _read_range(byte_ranges[i])
            except Reject as reject:
                done[i] = reject
            except OSError as error:
                if not is_retryable(error):
                    raise
                _container.cache_clear()  # why: a stale handle stays stale, so the file has to be opened again
                failed.append(i)
                problem = error
        if not failed:
            return done
        if wait_s is None:
            raise unavailable(byte_ranges[failed[-1]].path, problem)
        time.sleep(wait_s)
        todo = failed
    raise AssertionError("the last attempt returns or raises")


@contextmanager
def _path_errors() -> Iterator[None]:
    """Turn an error that means that the path can never name a readable file into a `Reject`."""
    try:
        yield
    except OSError as error:
        if is_unavailable(error):
            raise
        raise Reject(f"unreadable: {error.strerror}") from None
    except ValueError as error:  # a NUL in the name
        raise Reject(f"unreadable: {error}") from None


def _open(path: str) -> int:
    """A descriptor of a regular file; never blocks on a pipe. Raises `Reject` and `OSError`."""
    with _path_errors():
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


def _read_whole_file(byte_range: ByteRange, ahead_bytes: int) -> bytes | None:
    descriptor = _open(byte_range.path)
    try:
        nbytes = os.fstat(descriptor).st_size
        if nbytes > MAX_BYTES:
            raise _too_large(nbytes)
        if nbytes > ahead_bytes:
            return None
        data = _pread(descriptor, 0, nbytes)
    finally:
        os.close(descriptor)
    expected = byte_range.nbytes or nbytes  # why: 0 also stands for an unknown size
    if (nbytes, len(data)) != (expected, expected):
        raise ResoluteError(
            f"{byte_range.path}: changed since it was listed, got {len(data)} bytes, expected {expected}; wait until "
            "nothing writes to it, then run the same command again"
        )
    return data


def _pread(descriptor: int, offset: int, nbytes: int) -> bytes:
    """`nbytes` from `offset`, or fewer at the end of the file."""
    with _path_errors():
        return read_at(descriptor, nbytes, offset)


class _Container:
    """An open archive, closed when its last user drops it, so that cache eviction never closes it during a read."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


@lru_cache(maxsize=_OPEN_CONTAINERS)
def _container(path: str, version: tuple[int, ...]) -> _Container:
    return _Container(_open(path))


def _read_range(byte_range: ByteRange) -> bytes:
    path, offset, nbytes, packed, size_bytes = byte_range
    with _path_errors():
        info = os.stat(path)  # noqa: PTH116  # why not Path: twice the overhead, per image
    # why a version: the path may be replaced by another file while this process runs
    container = _container(path, (info.st_dev, info.st_ino, info.st_mtime_ns))
    if packed == ZIPPED:
        header = _pread(container.descriptor, offset, HEADER_BYTES)
        rest_bytes = content_start(header) - HEADER_BYTES + nbytes + TAIL_BYTES
        return unzip(header + _pread(container.descriptor, offset + HEADER_BYTES, rest_bytes), nbytes, size_bytes)
    return _require_length(_pread(container.descriptor, offset, nbytes), nbytes)


def _require_length(data: bytes, nbytes: int) -> bytes:
    if len(data) < nbytes:
        raise Reject(f"truncated: its archive ends after {len(data)} of {nbytes} bytes")
    return data


def _fetch_remote(byte_ranges: Sequence[ByteRange], ahead_bytes: int) -> list[bytes | Reject | None]:
    spans: list[tuple[ByteRange, int | None, int | None]] = []
    for byte_range in byte_ranges:
        slack = HEADER_BYTES + _HEADER_SLACK + TAIL_BYTES if byte_range.packed == ZIPPED else 0
        if byte_range.packed == UNSEEN:  # why + 1: the extra byte shows that the file is larger
            spans.append((byte_range, 0, ahead_bytes + 1))
        elif byte_range.offset < 0:
            spans.append((byte_range, None, None))
        else:
            spans.append((byte_range, byte_range.offset, byte_range.offset + byte_range.nbytes + slack))
    done: list[bytes | Reject | None] = [*_fetch_spans(spans)]
    for i, byte_range in enumerate(byte_ranges):
        data = done[i]
        if not isinstance(data, bytes):
            continue
        try:
            if byte_range.offset >= 0:
                done[i] = _unpack(byte_range, data)
            elif len(data) > MAX_BYTES:
                raise _too_large(len(data))
            elif byte_range.packed == UNSEEN and len(data) == ahead_bytes + 1:
                done[i] = None
        except Reject as reject:
            done[i] = reject
    return done


def _unpack(byte_range: ByteRange, data: bytes) -> bytes:
    _, offset, nbytes, packed, size_bytes = byte_range
    if packed != ZIPPED:
        return _require_length(data, nbytes)
    needed = content_start(data) + nbytes
    if len(data) < needed:  # the header is unusually long
        (longer,) = _fetch_spans([(byte_range, offset, offset + needed + TAIL_BYTES)])
        if isinstance(longer, Reject):
            raise longer
        data = longer
    return unzip(data, nbytes, size_bytes)


def _fetch_spans(spans: Sequence[tuple[ByteRange, int | None, int | None]]) -> list[bytes | Reject]:
    """Bytes [start, end) of each file, or all of it if both are None; empty spans are not requested."""
    done: list[bytes | Reject] = [b""] * len(spans)
    todo = [i for i, (_, start, end) in enumerate(spans) if start is None or start != end]
    problems: dict[int, object] = {}
    for wait_s in (0.0, *_REMOTE_WAITS_S):
        time.sleep(wait_s)
        failed = []
        for i, result in zip(todo, _request([spans[i] for i in todo]), strict=True):
            outcome = _classify(result, spans[i])
            if outcome is None:
                failed.append(i)
                problems[i] = result
            else:
                done[i] = outcome
        todo = failed
        if not todo:
            return done
    answered = {_host(spans[i]) for i in range(len(spans)) if i not in todo}
    for i in list(todo):
        # why another host: a lost network fails in the same ways, and loses no photo
        if spans[i][0].packed == UNSEEN and _is_fault_of_host(problems[i]) and answered - {_host(spans[i])}:
            done[i] = Reject(f"no such server: {_describe_problem(problems[i])}")
            todo.remove(i)
    if not todo:
        return done
    problem, remedy = problems[todo[-1]], "check the network, the store and your access"
    if _is_fault_of_host(problem):
        remedy = "no other server answered either: check the network, its DNS and the trusted certificates"
    raise StorageError(
        strip_credentials(
            f"{spans[todo[-1]][0].path}: cannot be fetched, got {_describe_problem(problem)} "
            f"{len(_REMOTE_WAITS_S) + 1} times, expected its bytes; {remedy}, "
            "then run the same command again: finished shards are kept"
        )
    )


def _host(span: tuple[ByteRange, int | None, int | None]) -> str:
    return urlsplit(span[0].path).netloc


def _is_fault_of_host(problem: object) -> bool:
    """Whether a web server's name does not exist, or its certificate is invalid."""
    cause = getattr(problem, "os_error", problem)  # of aiohttp's errors
    is_unknown = isinstance(cause, socket.gaierror) and cause.errno in _UNKNOWN_NAME
    return is_unknown or isinstance(cause, ssl.SSLCertVerificationError)


def _request(spans: Sequence[tuple[ByteRange, int | None, int | None]]) -> list[object]:
    """The answer of each store, bytes or an exception, with one concurrent request per store."""
    answers: list[object] = [None] * len(spans)
    stores: dict[int, tuple[Any, list[int], list[str]]] = {}
    for i, (byte_range, _, _) in enumerate(spans):
        fs, path = file_system(byte_range.path, patience_s=_PATIENCE_S)
        _, numbers, paths = stores.setdefault(id(fs), (fs, [], []))
        numbers.append(i)
        paths.append(path)
    for fs, numbers, paths in stores.values():
        starts, ends = [spans[i][1] for i in numbers], [spans[i][2] for i in numbers]
        try:
            results = _cat_ranges(fs, paths, starts, ends)
        except Exception as error:  # why: drivers raise many types; `_classify` interprets them
            results = [error] * len(numbers)
        for i, result in zip(numbers, results, strict=True):
            answers[i] = result
    return answers


def _cat_ranges(fs: Any, paths: list[str], starts: list[int | None], ends: list[int | None]) -> list[object]:
    if fs.async_impl:
        return list(fs.cat_ranges(paths, starts, ends, on_error="return"))

    def cat(span: tuple[str, int | None, int | None]) -> object:
        try:
            return fs.cat_file(*span, cache_type="none")  # why: such a driver opens the file, which would read ahead
        except Exception as error:
            return error

    return list(thread_map(cat, zip(paths, starts, ends, strict=True), _THREADS))


def _classify(result: object, span: tuple[ByteRange, int | None, int | None]) -> bytes | Reject | None:
    """The bytes; a `Reject` if the object itself is at fault; None if a retry may help."""
    byte_range, start, end = span
    unseen = byte_range.packed == UNSEEN
    if isinstance(result, bytes):
        if start is not None and end is not None and len(result) > end - start and not unseen:
            raise ResoluteError(
                f"{strip_credentials(byte_range.path)}: its server ignores byte ranges, got {len(result)} bytes, "
                f"expected {end - start}; use a server that supports them, or download the file"
            )
        return result
    if isinstance(result, IsADirectoryError):
        return Reject(f"unreadable: {_describe_problem(result)}")
    status = getattr(result, "status", None)
    is_missing = isinstance(result, FileNotFoundError) and http_status(result) in (None, *GONE)
    if unseen and (is_missing or status in GONE):
        is_404 = status is None and byte_range.path.startswith(("http://", "https://"))  # fsspec's words for it
        return Reject("not there: 'HTTP status 404'" if is_404 else f"not there: {_describe_problem(result)}")
    if unseen and status in _REFUSED:
        return Reject(f"refused: {_describe_problem(result)}")
    if unseen and isinstance(result, BaseException) and http_status(result) == _EMPTY_RANGE:
        return b""
    return None


def _describe_problem(problem: object) -> str:
    """One line without the URL's credentials: the HTTP status, or the system's message."""
    status, words = getattr(problem, "status", None), getattr(problem, "strerror", None)
    if isinstance(problem, BaseException):
        status = status or http_status(problem)
    if isinstance(problem, FileNotFoundError) and status in (None, *GONE):
        return "No such file or directory"
    if isinstance(problem, PermissionError):
        return "Permission denied"
    text = f"HTTP status {status}" if status else words or str(problem)
    return f"'{strip_credentials(' '.join(str(text).split()))[:200] or type(problem).__name__}'"
