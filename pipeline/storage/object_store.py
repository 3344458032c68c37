"""`Store`: an object store behind an fsspec URL; every request ends in time, and no message contains credentials.

Each request has a deadline, is ended by `interrupt` and `stop`, and is retried if its error may be transient
(`retry.py`). The drivers' own retries are switched off so that the waits do not multiply.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from resolute.errors import ResoluteError, strip_credentials

from .retry import GONE, http_status, retry_call

__all__ = ["Store", "driver_errors"]

Answer = TypeVar("Answer")

_MIN_BYTES_PER_S = 128 << 10  # a slower request counts as stalled
_CONNECT_SLACK_BYTES = 16 << 20  # extends the first request's deadline: it connects and finds credentials
_MAX_WHOLE_BYTES = 256 << 20  # largest file that `read_all` reads
_GRACE_S = 5.0  # time for a driver to end a request after its deadline
_CONNECTIONS = 128
# Keys under which fsspec's drivers report a file's content hash or version.
_IDENTITY = (
    "ETag", "etag", "md5Hash", "content_md5", "Content-MD5", "generation", "blob_id", "Last-Modified", "LastModified",
    "last_modified", "mtime",
)  # fmt: skip


class Store:
    """The files below a URL. All methods are thread-safe; the connections must not be shared between processes."""

    def __init__(self, url: str, *, tries: int, first_wait_s: float, stall_s: float) -> None:
        """Create the driver; no request is sent yet. Raises `ResoluteError` if no installed driver handles the URL."""
        self.root = strip_credentials(url)  # for messages
        self.requests = self.retries = self.fetched_bytes = 0
        self.stopped = threading.Event()  # replaced by `interrupt`: set for the requests that began before
        self._closed = False
        self._tries, self._first_wait_s, self._stall_s = tries, first_wait_s, stall_s
        self._fs, self._base = _connect(url, stall_s)
        self._lock = threading.Lock()
        self._pending: set[Future[Any]] = set()

    def where(self, name: str) -> str:
        return f"{self.root}/{name}"

    def info(self, name: str) -> tuple[int, str]:
        """(size in bytes, identity such as an ETag). Raises `FileNotFoundError`, `StorageError`, `ResoluteError`."""
        return self._retry(name, lambda stop: self._info(name, stop))

    def read_all(self, name: str) -> bytes:
        """Read a small file. Raises as `read_range`, and `ResoluteError` if it is larger than 256 MiB."""

        def request(stop: threading.Event) -> bytes:
            nbytes, _ = self._info(name, stop, slack_bytes=_CONNECT_SLACK_BYTES)
            if nbytes > _MAX_WHOLE_BYTES:
                raise ResoluteError(
                    f"{self.where(name)}: too large, got {nbytes} bytes, expected at most {_MAX_WHOLE_BYTES}; "
                    "upload the set again"
                )
            return self._bytes(name, None, nbytes, stop) if nbytes else b""

        return self._retry(name, request)

    def read_range(self, name: str, start: int, nbytes: int) -> bytes:
        """Read `nbytes` bytes from `start` on. Raises `FileNotFoundError`, `StorageError`, `ResoluteError`."""
        return self._retry(name, lambda stop: self._bytes(name, start, nbytes, stop)) if nbytes else b""

    def _info(self, name: str, stop: threading.Event, *, slack_bytes: int = 0) -> tuple[int, str]:
        """One request for `info`. Raises what the driver raises."""
        self._fs.invalidate_cache()  # why: huggingface_hub keeps listings, whatever the option says
        try:
            info = self._call(self._fs._info if self._fs.async_impl else self._fs.info, name, slack_bytes, stop)
        except FileNotFoundError as error:
            # why: fsspec raises FileNotFoundError for every failure of a web server, huggingface_hub for a refusal
            cause = error.__cause__
            status = None if cause is None else http_status(cause)
            if cause is None or status in GONE or (status is None and hasattr(cause, "response")):
                raise
            raise cause from None
        if info.get("size") is None:
            raise ResoluteError(
                f"{self.where(name)}: the server does not report its size, expected a Content-Length; use another one"
            )
        return int(info["size"]), "; ".join(f"{word}={info[word]}" for word in _IDENTITY if word in info)

    def _bytes(self, name: str, start: int | None, nbytes: int, stop: threading.Event) -> bytes:
        """One request for `nbytes` bytes from `start` on (None: the complete file). Raises what the driver raises."""
        cat = self._fs._cat_file if self._fs.async_impl else self._fs.cat_file
        span: dict[str, Any] = {} if start is None else {"start": start, "end": start + nbytes}
        if not self._fs.async_impl:
            span["cache_type"] = "none"  # why: such a driver opens the file, which would read ahead
        data: bytes = self._call(cat, name, nbytes, stop, **span)
        if len(data) > nbytes:
            raise ResoluteError(
                f"{self.where(name)}: the server ignores byte ranges, got {len(data)} bytes, expected {nbytes}; "
                "use a server that serves byte ranges, or download the set"
            )
        if len(data) < nbytes:
            raise OSError(None, f"{len(data)} of {nbytes} bytes")
        with self._lock:
            self.fetched_bytes += len(data)
        return data

    def _call(self, method: Callable[..., Any], name: str, nbytes: int, stop: threading.Event, **options: Any) -> Any:
        """Call the driver with a deadline. why: the drivers' own timeouts differ in meaning."""
        path, deadline_s = f"{self._base}/{name}", self._stall_s + nbytes / _MIN_BYTES_PER_S
        future: Future[Any]
        if self._fs.async_impl:
            future = asyncio.run_coroutine_threadsafe(_within(method(path, **options), deadline_s), self._fs.loop)
        else:
            future = _in_thread(lambda: method(path, **options))
        with self._lock:
            self.requests += 1
            self._pending.add(future)
        try:
            if stop.is_set():
                future.cancel()
            return future.result(deadline_s + _GRACE_S)
        except CancelledError:
            raise ConnectionAbortedError("interrupted") from None
        except OSError as error:
            if not isinstance(error, FileNotFoundError) and http_status(error) in GONE:  # huggingface_hub's own type
                raise FileNotFoundError(path) from None
            raise
        finally:
            future.cancel()  # a no-op unless the wait for it timed out
            with self._lock:
                self._pending.discard(future)

    def _retry(self, name: str, request: Callable[[threading.Event], Answer]) -> Answer:
        stop = self.stopped
        return retry_call(
            lambda: request(stop), where=self.where(name), tries=self._tries, first_wait_s=self._first_wait_s,
            stop=stop, count=self._count_retry,
        )  # fmt: skip

    def _count_retry(self) -> None:
        with self._lock:
            self.retries += 1

    def interrupt(self) -> None:
        """End running requests and waits for retries with `Interrupted`; later requests work."""
        with self._lock:
            pending, stopped = list(self._pending), self.stopped
            if not self._closed:
                self.stopped = threading.Event()
        stopped.set()
        for future in pending:
            future.cancel()

    def stop(self) -> None:
        """`interrupt`, for all later requests as well."""
        with self._lock:
            self._closed = True
        self.interrupt()

    def close(self) -> None:
        """Close the connections, after `stop`."""
        session = getattr(self._fs, "_session", None) or getattr(self._fs, "_s3creator", None)
        if session is None or not self._fs.async_impl or not self._fs.loop.is_running():
            return
        end = session.__aexit__(None, None, None)  # exists on aiohttp's session and on botocore's client
        with suppress(Exception):  # why: errors while closing do not matter
            asyncio.run_coroutine_threadsafe(end, self._fs.loop).result(1)


def _in_thread(work: Callable[[], Any]) -> Future[Any]:
    """Run `work()` in a daemon thread, which is abandoned if the future is cancelled."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            result, failed = work(), None
        except BaseException as error:  # re-raised by `Future.result`
            result, failed = None, error
        with suppress(InvalidStateError):  # cancelled meanwhile
            future.set_result(result) if failed is None else future.set_exception(failed)

    threading.Thread(target=run, name="resolute-request", daemon=True).start()
    return future


async def _within(work: Coroutine[Any, Any, Answer], deadline_s: float) -> Answer:
    return await asyncio.wait_for(work, deadline_s)


@contextmanager
def driver_errors(url: str) -> Iterator[None]:
    """Turn the errors of a URL that fsspec does not know, or whose package is missing, into a `ResoluteError`."""
    protocol, root = url.partition("://")[0], strip_credentials(url)
    try:
        yield
    except ImportError as error:
        text = " ".join(str(error).split())  # names the package: "Install gcsfs to access Google Cloud Storage"
        raise ResoluteError(
            f"{root}: no driver for {protocol}://, got '{text}', expected its package; install it with pip, then run "
            "the same command again"
        ) from None
    except ValueError as error:
        raise ResoluteError(
            f"{root}: not understood, got '{error}', expected a folder or a URL such as s3://bucket/shards; correct it"
        ) from None


def _connect(url: str, stall_s: float) -> tuple[Any, str]:
    """A private fsspec file system for a URL, without caches, and the path of `url` in it."""
    import fsspec  # why here: slow to import, needed only for URLs

    protocol = url.partition("://")[0]
    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    with driver_errors(url):
        if protocol in ("s3", "s3a"):
            options["config_kwargs"] = {
                "connect_timeout": stall_s, "read_timeout": stall_s, "max_pool_connections": _CONNECTIONS,
                "retries": {"total_max_attempts": 1},
            }  # fmt: skip
        elif protocol in ("http", "https"):
            from aiohttp import ClientTimeout

            options["client_kwargs"] = {"timeout": ClientTimeout(total=None, sock_connect=stall_s, sock_read=stall_s)}
        fs, base = fsspec.core.url_to_fs(url, **options)
    if hasattr(fs, "retries"):
        fs.retries = 1  # s3fs, gcsfs
    return fs, str(base).rstrip("/")
