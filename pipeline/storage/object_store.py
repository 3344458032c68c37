"""A store behind a URL, through fsspec: every request ends, and no message holds credentials.

Each request has a deadline, is ended by `interrupt` and `stop`, and is asked again if it failed in a way that may pass
(`retry.py`); the drivers' own tries are switched off where they have any, so that waits do not multiply.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeVar

from pipeline.errors import ResoluteError, strip_credentials

from .retry import ask_again

__all__ = ["Store"]

Answer = TypeVar("Answer")

_SLOWEST_BYTES_PER_S = 128 << 10  # a request that brings less than this is stalled, too
_WHOLE_BYTES = 16 << 20  # for the deadline of the first request, which connects and finds credentials
_MAX_WHOLE_BYTES = 256 << 20  # of a file that is read in one piece, such as a manifest
_GRACE_S = 5.0  # for a driver to end a request whose deadline has passed
_CONNECTIONS = 128
# What stores tell of a file's content or version, by the names that fsspec's drivers give it.
_IDENTITY = (
    "ETag", "etag", "md5Hash", "content_md5", "Content-MD5", "generation", "Last-Modified", "LastModified",
    "last_modified", "mtime",
)  # fmt: skip
_PACKAGES = {"s3": "-e '.[s3]'", "s3a": "-e '.[s3]'", "gs": "gcsfs", "gcs": "gcsfs", "http": "aiohttp",
             "https": "aiohttp", "az": "adlfs", "abfs": "adlfs"}  # fmt: skip


class Store:
    """The files below a URL. All methods are thread-safe; the connections belong to one process."""

    def __init__(self, url: str, *, tries: int, first_wait_s: float, stall_s: float) -> None:
        """Raises `ResoluteError` for a URL that no driver here understands. Nothing is asked yet."""
        self.root = strip_credentials(url)  # for messages
        self.requests = self.retries = self.fetched_bytes = 0
        self.stopped = threading.Event()  # ends the requests that began while it was this one
        self._closed = False
        self._tries, self._first_wait_s, self._stall_s = tries, first_wait_s, stall_s
        self._fs, self._base = _connect(url, self.root, stall_s)
        self._lock = threading.Lock()
        self._asked: set[Future[Any]] = set()

    def where(self, name: str) -> str:
        return f"{self.root}/{name}"

    def info(self, name: str) -> tuple[int, str]:
        """Bytes of a file, and what the store tells of its content. Raises `FileNotFoundError`."""

        return self._again(name, lambda stop: self._info(name, stop))

    def whole(self, name: str) -> bytes:
        """All of a small file. Raises as `part`, and `ResoluteError` before one of more than 256 MiB is read."""

        def ask(stop: threading.Event) -> bytes:
            nbytes, _ = self._info(name, stop, slack_bytes=_WHOLE_BYTES)
            if nbytes > _MAX_WHOLE_BYTES:
                raise ResoluteError(
                    f"{self.where(name)}: too large, got {nbytes} bytes, expected at most {_MAX_WHOLE_BYTES}; "
                    "upload the set again"
                )
            return self._bytes(name, None, nbytes, stop) if nbytes else b""

        return self._again(name, ask)

    def part(self, name: str, start: int, nbytes: int) -> bytes:
        """`nbytes` bytes from `start` on. Raises `FileNotFoundError`, `StorageError`, `ResoluteError`."""
        return self._again(name, lambda stop: self._bytes(name, start, nbytes, stop)) if nbytes else b""

    def _info(self, name: str, stop: threading.Event, *, slack_bytes: int = 0) -> tuple[int, str]:
        """One request for `info`. Raises what the driver raises."""
        try:
            info = self._call(self._fs._info if self._fs.async_impl else self._fs.info, name, slack_bytes, stop)
        except FileNotFoundError as error:
            # why: fsspec says so of every failure of a web server
            cause = error.__cause__
            if cause is not None and getattr(cause, "status", 404) not in (404, 410):
                raise cause from None
            if cause is not None and not hasattr(cause, "status") and not hasattr(cause, "response"):
                raise cause from None
            raise
        if info.get("size") is None:
            raise ResoluteError(
                f"{self.where(name)}: its server does not tell its size, expected a Content-Length; use another"
            )
        return int(info["size"]), "; ".join(f"{word}={info[word]}" for word in _IDENTITY if word in info)

    def _bytes(self, name: str, start: int | None, nbytes: int, stop: threading.Event) -> bytes:
        """One request for `nbytes` bytes from `start` on, or for the whole file. Raises what the driver raises."""
        cat = self._fs._cat_file if self._fs.async_impl else self._fs.cat_file
        span = {} if start is None else {"start": start, "end": start + nbytes}
        data: bytes = self._call(cat, name, nbytes, stop, **span)
        if len(data) > nbytes:
            raise ResoluteError(
                f"{self.where(name)}: its server sends whole files only, got {len(data)} bytes, expected {nbytes}; "
                "use a server that serves byte ranges, or download the set"
            )
        if len(data) < nbytes:
            raise OSError(None, f"{len(data)} of {nbytes} bytes")
        with self._lock:
            self.fetched_bytes += len(data)
        return data

    def _call(self, method: Callable[..., Any], name: str, nbytes: int, stop: threading.Event, **words: Any) -> Any:
        """Call the driver, and give up after the deadline. why: drivers' own limits are of many kinds."""
        path, deadline_s = f"{self._base}/{name}", self._stall_s + nbytes / _SLOWEST_BYTES_PER_S
        future: Future[Any]
        if self._fs.async_impl:
            future = asyncio.run_coroutine_threadsafe(_within(method(path, **words), deadline_s), self._fs.loop)
        else:
            future = _in_thread(lambda: method(path, **words))
        with self._lock:
            self.requests += 1
            self._asked.add(future)
        try:
            if stop.is_set():
                future.cancel()
            return future.result(deadline_s + _GRACE_S)
        except CancelledError:
            raise ConnectionAbortedError("interrupted") from None
        finally:
            future.cancel()  # where the wait for it was ended
            with self._lock:
                self._asked.discard(future)

    def _again(self, name: str, ask: Callable[[threading.Event], Answer]) -> Answer:
        stop = self.stopped
        return ask_again(
            lambda: ask(stop), where=self.where(name), tries=self._tries, first_wait_s=self._first_wait_s,
            stop=stop, count=self._count_retry,
        )  # fmt: skip

    def _count_retry(self) -> None:
        with self._lock:
            self.retries += 1

    def interrupt(self) -> None:
        """End what is being asked, and the waits for new tries, with `Interrupted`; later requests work."""
        with self._lock:
            asked, stopped = list(self._asked), self.stopped
            if not self._closed:
                self.stopped = threading.Event()
        stopped.set()
        for future in asked:
            future.cancel()

    def stop(self) -> None:
        """`interrupt`, also for all that is asked later."""
        with self._lock:
            self._closed = True
        self.interrupt()

    def close(self) -> None:
        """Close the connections, after `stop`."""
        session = getattr(self._fs, "_session", None) or getattr(self._fs, "_s3creator", None)
        if session is None or not self._fs.async_impl or not self._fs.loop.is_running():
            return
        end = session.__aexit__(None, None, None)  # both of aiohttp's session and of botocore's client
        with suppress(Exception):  # why: it is only said goodbye
            asyncio.run_coroutine_threadsafe(end, self._fs.loop).result(1)


def _in_thread(work: Callable[[], Any]) -> Future[Any]:
    """The result of `work()`, done in a thread that is left alone when nobody waits for it any longer."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            result, failed = work(), None
        except BaseException as error:  # why: it is raised where the result is awaited
            result, failed = None, error
        with suppress(InvalidStateError):  # cancelled meanwhile
            future.set_result(result) if failed is None else future.set_exception(failed)

    threading.Thread(target=run, name="resolute-request", daemon=True).start()
    return future


async def _within(work: Coroutine[Any, Any, Answer], deadline_s: float) -> Answer:
    return await asyncio.wait_for(work, deadline_s)


def _connect(url: str, root: str, stall_s: float) -> tuple[Any, str]:
    """fsspec's file system for a URL, of our own and without a memory of listings; and the path of `url` in it."""
    import fsspec  # why: only who reads from a URL waits for it

    protocol = url.partition("://")[0]
    try:
        words: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
        if protocol in ("s3", "s3a"):
            words["config_kwargs"] = {
                "connect_timeout": stall_s, "read_timeout": stall_s, "max_pool_connections": _CONNECTIONS,
                "retries": {"total_max_attempts": 1},
            }  # fmt: skip
        elif protocol in ("http", "https"):
            from aiohttp import ClientTimeout

            words["client_kwargs"] = {"timeout": ClientTimeout(total=None, sock_connect=stall_s, sock_read=stall_s)}
        fs, base = fsspec.core.url_to_fs(url, **words)
    except ImportError as error:
        package = _PACKAGES.get(protocol)
        todo = f"run `pip install {package}`" if package else "install the package that it names"
        text = strip_credentials(str(error))
        raise ResoluteError(f"{root}: no driver for {protocol}://, got '{text}', expected one; {todo}") from None
    except ValueError as error:
        raise ResoluteError(
            f"{root}: not understood, got '{strip_credentials(str(error))}', expected a folder or a URL such as "
            "s3://bucket/shards; correct it"
        ) from None
    if hasattr(fs, "retries"):
        fs.retries = 1  # s3fs, gcsfs
    return fs, str(base).rstrip("/")
