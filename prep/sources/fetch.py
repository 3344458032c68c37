"""Reads the bytes of an image from a file, an archive member or an object store.

A fault of the file itself (damaged, too large, not a regular file) is a `Reject`, and so is a permanent answer of a web
server to the URL of a list, or a web server that fails while another one of the list answers. Any other unavailable
storage, including a file that has vanished since it was listed, is retried and then ends the run with a `StorageError`.
A file or archive that has changed since it was listed ends the run, too. At most `MAX_BYTES` are read per image.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
import stat
import time
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from functools import lru_cache
from operator import attrgetter
from typing import Any
from urllib.parse import urlsplit

from resolute.errors import ResoluteError, StorageError, is_unavailable, strip_credentials
from resolute.pipeline.storage.drivers import file_system
from resolute.pipeline.storage.read_at import read_at
from resolute.pipeline.storage.request_errors import GONE, http_status
from resolute.pipeline.storage.retries import with_retries
from resolute.prep.sources.reject import NOT_THERE, Reject
from resolute.prep.storage.retry import retry
from resolute.prep.storage.thread_map import thread_map
from resolute.urls import is_url

from .archives.containers import changed, difference
from .archives.zip_directory import HEADER_BYTES, TAIL_BYTES, content_start, unzip
from .filesystem import is_version, version_stamp
from .image_ref import MAX_BYTES, MISSING, UNSEEN, ZIPPED, ByteRange
from .web import STALL_S, RangesIgnored, read_ranges

__all__ = ["MAX_BYTES", "fetch", "fetch_many"]

_REMOTE_WAITS_S = (0.5, 2.0, 8.0)  # before each retry of a remote store
_PATIENCE_S = 10.0  # of an object store's client: `_fetch_spans` retries, and its tries multiply the wait
_ANSWER_S = 300.0  # for a range of an archive on a web server
_PHOTO_S = 300.0  # for all attempts to fetch a photo of a list of URLs
_HEADER_SLACK = 512  # bytes fetched for a zip header's name and extra fields, whose lengths it holds itself
_OPEN_CONTAINERS = 64
_READINGS = 3  # of an image whose archive is touched at the same time
_THREADS = 16  # requests in flight of a driver that blocks
_REFUSED = frozenset({400, 401, 402, 403, 405, 406, 414, 451})  # HTTP status: asking again gives the same answer
_EMPTY_RANGE = 416  # HTTP status: range not satisfiable; for a range from 0 it means an empty file
_OF_THE_NETWORK = frozenset({407, 429})  # HTTP statuses that say nothing about the server: proxy, too many requests
_WITNESSES = 8  # other servers that are asked whether the network works
_UNKNOWN_NAME = frozenset({socket.EAI_NONAME, socket.EAI_NODATA})


_failing_hosts: set[str] = set()  # of which no photo came: they are asked once for each photo, until one answers


def fetch(byte_range: ByteRange, *, servers: Sequence[str] = ()) -> bytes:
    """The bytes of an image file, at most `MAX_BYTES`; `servers` as in `fetch_many`.

    Raises `Reject` for a fault of the file, `StorageError` for unavailable storage.
    """
    (data,) = fetch_many([byte_range], servers=servers)
    if isinstance(data, Reject):
        raise data
    assert data is not None
    return data


def fetch_many(
    byte_ranges: Sequence[ByteRange], *, ahead_bytes: int = MAX_BYTES, servers: Sequence[str] = ()
) -> list[bytes | Reject | None]:
    """The bytes, or the `Reject`, of each image in order; remote images are requested concurrently.

    An image of more than `ahead_bytes` is not read, which bounds memory: its result is None, and `fetch` reads it
    later. `servers` are URLs on other servers: if the server of a photo of a list of URLs stays unavailable while one
    of them answers, the photo is rejected. Raises `StorageError` if storage stays unavailable after a few retries,
    `ResoluteError` if a file or archive has changed since it was listed.
    """
    done: list[bytes | Reject | None] = [None] * len(byte_ranges)
    remote: list[int] = []  # positions in `byte_ranges`
    for i, byte_range in enumerate(byte_ranges):
        nbytes = max(byte_range.nbytes, byte_range.size_bytes)
        if byte_range.stored_as == MISSING:
            done[i] = Reject(NOT_THERE)
        elif nbytes > MAX_BYTES:
            done[i] = _too_large(nbytes)
        elif nbytes > ahead_bytes:
            continue
        elif is_url(byte_range.path):
            remote.append(i)
        else:
            done[i] = _fetch_local(byte_range, ahead_bytes)
    if remote:
        for i, data in zip(remote, _fetch_remote([byte_ranges[i] for i in remote], ahead_bytes, servers), strict=True):
            done[i] = data
    return done


def _too_large(nbytes: int) -> Reject:
    return Reject(f"too large: {nbytes} bytes")


def _fetch_local(byte_range: ByteRange, ahead_bytes: int) -> bytes | Reject | None:
    """The bytes of an image on this machine, or its `Reject`; None if it has more than `ahead_bytes`."""

    def read() -> bytes | None:
        try:
            return _read_whole_file(byte_range, ahead_bytes) if byte_range.offset < 0 else _read_range(byte_range)
        except OSError:
            _container.cache_clear()  # why: a stale handle stays stale, so the file has to be opened again
            raise

    try:
        return retry(byte_range.path, read)
    except Reject as reject:
        return reject


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
        raise _other_size(byte_range.path, len(data), expected)
    return data


def _other_size(path: str, nbytes: int, expected: int) -> ResoluteError:
    return ResoluteError(
        f"{path}: changed since it was listed, got {nbytes} bytes, expected {expected}; wait until nothing writes to "
        "it, then run the same command again"
    )


def _pread(descriptor: int, offset: int, nbytes: int) -> bytes:
    """`nbytes` from `offset`, or fewer at the end of the file."""
    with _path_errors():
        return read_at(descriptor, nbytes, offset)


class _Container:
    """An open archive, closed when its last user drops it, so that cache eviction never closes it during a read."""

    def __init__(self, path: str, stamp: str) -> None:
        """Raises `ResoluteError` unless it is the archive with this `stamp`."""
        with _path_errors():
            self.version = _version(os.stat(path))  # noqa: PTH116  # why before: the path may be replaced now
        self.descriptor = _open(path)
        if stamp and (path, stamp, self.version) not in _compared:
            if what := difference(path, self.descriptor, stamp):
                raise changed(path, what)
            _compared.add((path, stamp, self.version))

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


# (path, stamp, version) of the archives that are those that were listed. why: to compare may take many reads
_compared: set[tuple[str, str, tuple[int, ...]]] = set()

_version = attrgetter("st_dev", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns")  # of an `os.stat_result`


@lru_cache(maxsize=_OPEN_CONTAINERS)
def _container(path: str, stamp: str) -> _Container:
    return _Container(path, stamp)


def _read_range(byte_range: ByteRange) -> bytes:
    path = byte_range.path
    for _ in range(_READINGS):
        container = _container(path, byte_range.stamp)
        data: bytes | Reject
        try:
            data = _read_member(container.descriptor, byte_range)
        except Reject as reject:
            data = reject
        # why after the read: what was read is then what was compared with the listing
        # why not Path: twice the overhead, per image
        if _version(os.stat(path)) == container.version:  # noqa: PTH116
            if isinstance(data, Reject):
                raise data
            return data
        _container.cache_clear()
    raise changed(path)


def _read_member(descriptor: int, byte_range: ByteRange) -> bytes:
    _, offset, nbytes, stored_as, size_bytes, _ = byte_range
    if stored_as == ZIPPED:
        header = _pread(descriptor, offset, HEADER_BYTES)
        rest_bytes = content_start(header) - HEADER_BYTES + nbytes + TAIL_BYTES
        return unzip(header + _pread(descriptor, offset + HEADER_BYTES, rest_bytes), nbytes, size_bytes)
    return _require_length(_pread(descriptor, offset, nbytes), nbytes)


def _require_length(data: bytes, nbytes: int) -> bytes:
    if len(data) < nbytes:
        raise Reject(f"truncated: its archive ends after {len(data)} of {nbytes} bytes")
    return data


_Span = tuple[ByteRange, int | None, int | None]  # the bytes [start, end) of the file at `path`; None: all of it


def _fetch_remote(
    byte_ranges: Sequence[ByteRange], ahead_bytes: int, servers: Sequence[str]
) -> list[bytes | Reject | None]:
    spans: list[_Span] = []
    for byte_range in byte_ranges:
        slack = HEADER_BYTES + _HEADER_SLACK + TAIL_BYTES if byte_range.stored_as == ZIPPED else 0
        if byte_range.stored_as == UNSEEN:  # why + 1: the extra byte shows that the file is larger
            spans.append((byte_range, 0, ahead_bytes + 1))
        elif byte_range.offset < 0:
            spans.append((byte_range, None, None))
        else:
            spans.append((byte_range, byte_range.offset, byte_range.offset + byte_range.nbytes + slack))
    done: list[bytes | Reject | None] = [*_fetch_spans(spans, servers)]
    for i, byte_range in enumerate(byte_ranges):
        data = done[i]
        if not isinstance(data, bytes):
            continue
        try:
            if byte_range.offset >= 0:
                done[i] = _unpack(byte_range, data)
            elif len(data) > MAX_BYTES:
                raise _too_large(len(data))
            elif byte_range.stored_as == UNSEEN:
                done[i] = None if len(data) == ahead_bytes + 1 else data
            elif byte_range.nbytes not in (0, len(data)):  # 0: unknown
                raise _other_size(strip_credentials(byte_range.path), len(data), byte_range.nbytes)
        except Reject as reject:
            done[i] = reject
    return done


def _unpack(byte_range: ByteRange, data: bytes) -> bytes:
    _, offset, nbytes, stored_as, size_bytes, _ = byte_range
    if stored_as != ZIPPED:
        return _require_length(data, nbytes)
    needed = content_start(data) + nbytes
    if len(data) < needed:  # the header is unusually long
        (longer,) = _fetch_spans([(byte_range, offset, offset + needed + TAIL_BYTES)])
        if isinstance(longer, Reject):
            raise longer
        data = longer
    return unzip(data, nbytes, size_bytes)


class _UnansweredError(Exception):
    """Some spans could not be fetched, and may be at another attempt."""


def _fetch_spans(spans: Sequence[_Span], servers: Sequence[str] = ()) -> list[bytes | Reject]:
    """The bytes of each span, or the `Reject`; empty spans are not requested."""
    done: list[bytes | Reject] = [b""] * len(spans)
    todo = [i for i, (_, start, end) in enumerate(spans) if start is None or start != end]
    problems: dict[int, Any] = {}
    deadline = time.monotonic() + _PHOTO_S
    asked = list(todo)

    def ask() -> None:
        nonlocal asked
        for i, result in zip(asked, _request([spans[i] for i in asked], deadline), strict=True):
            outcome = _classify(result, spans[i])
            if outcome is None:
                problems[i] = result
                continue
            done[i] = outcome
            todo.remove(i)
            _failing_hosts.discard(_host(spans[i][0].path))
        asked = [i for i in todo if _may_try_again(spans[i], deadline)]
        if asked:
            raise _UnansweredError

    with suppress(_UnansweredError):  # of the last attempt: `todo` and `problems` say which
        with_retries(ask, waits_s=_REMOTE_WAITS_S, may_pass=lambda error: isinstance(error, _UnansweredError))
    if not todo:
        return done
    failed = {_host(spans[i][0].path) for i in todo}
    others = [spans[i][0].path for i in range(len(spans)) if i not in todo and _is_listed_url(spans[i])]
    # why another host: a lost network fails in the same ways, and loses no photo
    if any(_is_fault_of_host(problems[i], spans[i]) for i in todo) and _any_answers([*others, *servers], failed):
        for i in [i for i in todo if _is_fault_of_host(problems[i], spans[i])]:
            host, problem = _host(spans[i][0].path), _describe_problem(problems[i])
            reason = "no such server: " if _has_no_server(problems[i]) else f"unavailable host: {host}, got "
            done[i] = Reject(f"{reason}{problem}")
            todo.remove(i)
            _failing_hosts.add(host)
    if not todo:
        return done
    problem = problems[todo[-1]]
    remedy = "check the network, the store and your access"
    if _is_fault_of_host(problem, spans[todo[-1]]):
        remedy = "no other server answered either: check the network, its DNS and the trusted certificates"
    raise StorageError(
        strip_credentials(
            f"{spans[todo[-1]][0].path}: cannot be fetched, got {_describe_problem(problem)} "
            f"{len(_REMOTE_WAITS_S) + 1} times, expected its bytes; {remedy}, "
            "then run the same command again: finished shards are kept"
        )
    )


def _is_listed_url(span: _Span) -> bool:
    """Whether it is a photo on any web server, from a list of URLs, rather than part of one store."""
    return span[0].stored_as == UNSEEN and span[0].path.startswith(("http://", "https://"))


def _may_try_again(span: _Span, deadline: float) -> bool:
    return not _is_listed_url(span) or (time.monotonic() < deadline and _host(span[0].path) not in _failing_hosts)


def _host(url: str) -> str:
    return urlsplit(url).netloc.rpartition("@")[2]


def _has_no_server(problem: object) -> bool:
    """Whether a web server's name does not exist, or its certificate is invalid."""
    cause = getattr(problem, "os_error", problem)  # of aiohttp's errors
    is_unknown = isinstance(cause, socket.gaierror) and cause.errno in _UNKNOWN_NAME
    return is_unknown or isinstance(cause, ssl.SSLCertVerificationError)


def _is_fault_of_host(problem: object, span: _Span) -> bool:
    """Whether the failure may be that of the web server alone."""
    return _is_listed_url(span) and getattr(problem, "status", None) not in _OF_THE_NETWORK


def _any_answers(urls: Sequence[str], failed: Set[str]) -> bool:
    """Whether a web server other than those that have `failed` answers now, with whatever it is."""
    by_host = {_host(url): url for url in reversed(urls) if _host(url) not in failed}
    chosen = [ByteRange(url, stored_as=UNSEEN) for url in [*by_host.values()][-_WITNESSES:]]
    answers = _request([(each, 0, 1) for each in chosen], time.monotonic() + STALL_S)
    return any(
        isinstance(answer, bytes | FileNotFoundError) or (getattr(answer, "status", None) or 500) in range(300, 500)
        for answer in answers
    )


def _request(spans: Sequence[_Span], deadline: float) -> list[object]:
    """The answer of each store, bytes or an exception, with one concurrent request per store.

    Photos of a list of URLs are given up at the `deadline`. Bytes of an archive that has changed since it was listed
    are replaced by the `ResoluteError`.
    """
    answers: list[Any] = [None] * len(spans)
    stores: dict[int, tuple[Any, list[int], list[str]]] = {}
    for i, (byte_range, _, _) in enumerate(spans):
        fs, path = file_system(byte_range.path, patience_s=_PATIENCE_S)
        _, numbers, paths = stores.setdefault(id(fs), (fs, [], []))
        numbers.append(i)
        paths.append(path)
    for fs, numbers, paths in stores.values():
        try:
            results = _read_spans(fs, paths, [spans[i] for i in numbers], deadline)
        except Exception as error:  # why: drivers raise many types; `_classify` interprets them
            results = [error] * len(numbers)
        for i, result in zip(numbers, results, strict=True):
            answers[i] = result
    unsure: dict[str, list[int]] = {}  # archives of which the answers do not show that they are those that were listed
    for i, (byte_range, _, _) in enumerate(spans):
        if isinstance(answers[i], tuple):
            answers[i], about = answers[i]
            if byte_range.stamp and not is_version(about, byte_range.stamp):
                unsure.setdefault(byte_range.path, []).append(i)
    if unsure:
        for (path, numbers), state in zip(unsure.items(), thread_map(_state, unsure, _THREADS), strict=True):
            for i in numbers:
                if isinstance(state, Exception):
                    answers[i] = state
                elif state != spans[i][0].stamp:
                    answers[i] = changed(path)
    return answers


def _state(url: str) -> str | Exception:
    """The `version_stamp` of a file in a store now."""
    try:
        file_system(url)[0].invalidate_cache()  # why: huggingface_hub keeps listings, whatever the option says
        return version_stamp(url)
    except ResoluteError as error:
        return OSError(str(error))


def _read_spans(fs: Any, paths: list[str], spans: Sequence[_Span], deadline: float) -> list[Any]:
    """(bytes, what the store says about the file) of each span, or an exception."""
    starts, ends = [span[1] for span in spans], [span[2] for span in spans]
    if hasattr(fs, "encode_url"):  # web servers
        limits_s = [max(1.0, deadline - time.monotonic()) if _is_listed_url(span) else _ANSWER_S for span in spans]
        ends_at = [MAX_BYTES + 1 if end is None else end for end in ends]
        return read_ranges(fs, paths, [start or 0 for start in starts], ends_at, limits_s)
    if hasattr(fs, "read_ranges"):  # `ObstoreFS`
        return list(fs.read_ranges(paths, starts, ends))
    return [(data, {}) if isinstance(data, bytes) else data for data in _cat_ranges(fs, paths, starts, ends)]


def _cat_ranges(fs: Any, paths: list[str], starts: list[int | None], ends: list[int | None]) -> list[object]:
    if fs.async_impl:
        return list(fs.cat_ranges(paths, starts, ends, on_error="return"))

    def cat(span: tuple[str, int | None, int | None]) -> object:
        try:
            return fs.cat_file(*span, cache_type="none")  # why: such a driver opens the file, which would read ahead
        except Exception as error:
            return error

    return list(thread_map(cat, zip(paths, starts, ends, strict=True), _THREADS))


def _classify(result: object, span: _Span) -> bytes | Reject | None:
    """The bytes; a `Reject` if the object itself is at fault; None if a retry may help.

    Raises `ResoluteError` for a server that ignores byte ranges, or an archive that has changed.
    """
    byte_range, start, end = span
    unseen = byte_range.stored_as == UNSEEN
    if isinstance(result, ResoluteError) and not isinstance(result, StorageError):
        raise result
    if isinstance(result, RangesIgnored):
        raise _ignores_ranges(byte_range.path, result.nbytes, span)
    if isinstance(result, bytes):
        if start is not None and end is not None and len(result) > end - start and not unseen:
            raise _ignores_ranges(byte_range.path, len(result), span)
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


def _ignores_ranges(path: str, nbytes: int | None, span: _Span) -> ResoluteError:
    return ResoluteError(
        f"{strip_credentials(path)}: its server ignores byte ranges, got {'all' if nbytes is None else nbytes} bytes, "
        f"expected {(span[2] or 0) - (span[1] or 0)}; use a server that supports them, or download the file"
    )


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
