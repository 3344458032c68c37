"""How is a store behind a URL asked for bytes, so that every request ends?

Through fsspec. Each request has a deadline, is ended by `stop`, and is asked again if it failed in a way that may
pass (`retry.py`); the drivers' own tries are switched off where they have any, so that waits do not multiply.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any, TypeVar

from .errors import ResoluteError
from .retry import ask_again

__all__ = ["Store"]

Answer = TypeVar("Answer")

_SLOWEST_BYTES_PER_S = 128 << 10  # a request that brings less than this is stalled, too
_WHOLE_BYTES = 16 << 20  # for the deadline of a small file whose size is not known
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
        self.root = re.sub(r"://[^/@]*@", "://", url)  # without a password, for messages
        self.requests = self.retries = self.fetched_bytes = 0
        self.stopped = threading.Event()
        self._tries, self._first_wait_s, self._stall_s = tries, first_wait_s, stall_s
        self._fs, self._base = _connect(url, self.root, stall_s)
        self._lock = threading.Lock()
        self._asked: set[Future[Any]] = set()

    def where(self, name: str) -> str:
        return f"{self.root}/{name}"

    def info(self, name: str) -> tuple[int, str]:
        """Bytes of a file, and what the store tells of its content. Raises `FileNotFoundError`."""

        def ask() -> tuple[int, str]:
            try:
                info = self._call(self._fs._info if self._fs.async_impl else self._fs.info, name, 0)
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

        return self._again(name, ask)

    def whole(self, name: str) -> bytes:
        """All of a small file. Raises `FileNotFoundError`, `ResoluteError`."""
        return self._again(name, lambda: self._bytes(name, None, None))

    def part(self, name: str, start: int, nbytes: int) -> bytes:
        """`nbytes` bytes from `start` on. Raises `FileNotFoundError`, `ResoluteError`."""
        return self._again(name, lambda: self._bytes(name, start, nbytes)) if nbytes else b""

    def _bytes(self, name: str, start: int | None, nbytes: int | None) -> bytes:
        """One request for `nbytes` bytes from `start` on, or for the whole file. Raises what the driver raises."""
        cat = self._fs._cat_file if self._fs.async_impl else self._fs.cat_file
        end = None if start is None or nbytes is None else start + nbytes
        data: bytes = self._call(cat, name, nbytes or _WHOLE_BYTES, start=start, end=end)
        if nbytes is not None and len(data) > nbytes:
            raise ResoluteError(
                f"{self.where(name)}: its server sends whole files only, got {len(data)} bytes, expected {nbytes}; "
                "use a server that serves byte ranges, or download the set"
            )
        if nbytes is not None and len(data) < nbytes:
            raise OSError(None, f"{len(data)} of {nbytes} bytes")
        with self._lock:
            self.fetched_bytes += len(data)
        return data

    def _call(self, method: Callable[..., Any], name: str, nbytes: int, **words: Any) -> Any:
        """Call the driver, and give up after the deadline. why: drivers' own limits are of many kinds."""
        with self._lock:
            self.requests += 1
        path = f"{self._base}/{name}"
        if not self._fs.async_impl:
            return method(path, **words)
        deadline_s = self._stall_s + nbytes / _SLOWEST_BYTES_PER_S
        future = asyncio.run_coroutine_threadsafe(_within(method(path, **words), deadline_s), self._fs.loop)
        with self._lock:
            self._asked.add(future)
        try:
            if self.stopped.is_set():
                future.cancel()
            return future.result()
        except CancelledError:
            raise ConnectionAbortedError("closed") from None
        finally:
            with self._lock:
                self._asked.discard(future)

    def _again(self, name: str, ask: Callable[[], Answer]) -> Answer:
        return ask_again(
            ask, where=self.where(name), tries=self._tries, first_wait_s=self._first_wait_s,
            stop=self.stopped, count=self._count_retry,
        )  # fmt: skip

    def _count_retry(self) -> None:
        with self._lock:
            self.retries += 1

    def stop(self) -> None:
        """End what is being asked, and the waits for new tries."""
        self.stopped.set()
        with self._lock:
            asked = list(self._asked)
        for future in asked:
            future.cancel()

    def close(self) -> None:
        """Close the connections, after `stop`."""
        session = getattr(self._fs, "_session", None) or getattr(self._fs, "_s3creator", None)
        if session is None or not self._fs.async_impl or not self._fs.loop.is_running():
            return
        end = session.__aexit__(None, None, None)  # both of aiohttp's session and of botocore's client
        with suppress(Exception):  # why: it is only said goodbye
            asyncio.run_coroutine_threadsafe(end, self._fs.loop).result(5)


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
        raise ResoluteError(f"{root}: no driver for {protocol}://, got '{error}', expected one; {todo}") from None
    except ValueError as error:
        raise ResoluteError(
            f"{root}: not understood, got '{error}', expected a folder or a URL such as s3://bucket/shards; correct it"
        ) from None
    if hasattr(fs, "retries"):
        fs.retries = 1  # s3fs, gcsfs
    return fs, str(base).rstrip("/")
