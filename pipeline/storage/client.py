"""`Client`: downloads the files below a URL; every request ends in time, and no message contains credentials.

Object stores and web servers are read through obstore, which repeats failed requests, continues bodies that broke off,
and has the timeouts. Any other URL (hf://, sftp://, ...) is read through its fsspec driver.

The calling thread waits for each request, so that Ctrl-C and the caller's `CancelScope` end it at once: requests of
obstore run on fsspec's event loop and are cancelled, those of drivers run in daemon threads, which are abandoned.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeVar

from resolute.errors import FileEndsEarly, Missing, ResoluteError, StorageError, strip_credentials
from resolute.urls import bucket_and_key

from .base import Write
from .cancel import CancelScope, interrupted
from .drivers import OBJECT_STORES, check_user_info, driver
from .obstore_client import in_loop, open_store
from .request_errors import GONE, failure, http_status
from .retries import backoff, with_retries

__all__ = ["Client"]

Answer = TypeVar("Answer")

_OBSTORE = (*OBJECT_STORES, "http", "https")
_BYTES_PER_S = 128 << 10  # a body arrives in pieces of what this rate brings in `stall_s`
_DOWNLOADS = 3  # of a file whose body broke off
_FIRST_WAIT_S = 0.5  # before the second of them
_RETRIED_STATUS = frozenset({408, 425, 429})  # HTTP statuses below 500 that a retry may change
# Keys under which fsspec's drivers report a file's content hash or version.
_IDENTITY = ("ETag", "etag", "md5Hash", "generation", "blob_id", "last_modified", "mtime")


class Client:
    """The files below a URL. All methods are thread-safe; do not share one between processes, or make it before a fork.

    All reads raise `Missing`, `Interrupted` if their `scope` is cancelled, or `StorageError` for a store that refuses
    or does not deliver.
    """

    def __init__(self, url: str, *, tries: int, stall_s: float) -> None:
        """Sends no request yet. Raises `ResoluteError` if the URL is not understood or a package is missing."""
        self.root = strip_credentials(url)  # for messages
        self.requests = self.fetched_bytes = 0
        self._tries, self._patience_s = tries, tries * stall_s
        self._piece_bytes = max(1, int(stall_s * _BYTES_PER_S))
        self._lock = threading.Lock()
        self._store: Any = None  # obstore's, or
        self._fs: Any = None  # fsspec's driver, with the path of the URL in it
        check_user_info(url)
        protocol = url.partition("://")[0]
        if protocol in _OBSTORE:
            root, key = bucket_and_key(url) if protocol in OBJECT_STORES else (url, "")
            self._store = open_store(root, tries=tries, stall_s=stall_s, patience_s=self._patience_s)
            self._folder = f"{key}/" if key else ""
        else:
            self._fs, path = driver(url, skip_instance_cache=True)
            self._folder = f"{path.rstrip('/')}/"

    def where(self, name: str) -> str:
        return f"{self.root}/{name}"

    def info(self, name: str, *, scope: CancelScope) -> tuple[int, str]:
        """(size in bytes, identity such as an ETag)."""

        def once() -> tuple[int, str]:
            if self._store is not None:
                import obstore

                meta = self._call(name, scope, lambda: obstore.head_async(self._store, self._folder + name))
                return meta["size"], str(meta["e_tag"] or meta["last_modified"])
            info = self._info(name, scope)
            return int(info["size"]), "; ".join(f"{word}={info[word]}" for word in _IDENTITY if word in info)

        return self._repeated(name, once, scope)

    def download(
        self,
        name: str,
        write: Write,
        nbytes: int | None = None,
        *,
        most: int | None = None,
        scope: CancelScope,
    ) -> str:
        """Download a file through `write`; returns the SHA-256 of its bytes, in hex.

        nbytes    the size it must have; None: any up to `most`, else `ResoluteError`

        If a body breaks off, everything is written again. Raises `FileEndsEarly` if the store has another size.
        """

        def once() -> str:
            size, pieces = self._open(name, scope)
            if most is not None and size > most:
                raise ResoluteError(
                    f"{self.where(name)}: too large, got {size} bytes, expected at most {most}; upload the set again"
                )
            if nbytes not in (None, size):
                if self.info(name, scope=scope)[0] == size:  # why asked again: a single answer may be cut short
                    raise FileEndsEarly(
                        f"{self.where(name)}: another size than the set's manifest lists, got {size} bytes, expected "
                        f"{nbytes}; upload the set again, its manifest last",
                        0,
                        0,
                    )
                raise _BrokenOffError(f"{size} of {nbytes} bytes")
            digest, offset = hashlib.sha256(), 0
            for piece in pieces:
                write(piece, offset)
                digest.update(piece)
                offset += len(piece)
            if offset != size:
                raise _BrokenOffError(f"{offset} of {size} bytes")
            with self._lock:
                self.fetched_bytes += size
            return digest.hexdigest()

        return self._repeated(name, once, scope)

    def _repeated(self, name: str, once: Callable[[], Answer], scope: CancelScope) -> Answer:
        """`once()`, again after each `_BrokenOffError`.

        why: obstore repeats requests by itself, but continues a body that broke off only if the file has an ETag.
        Drivers repeat only some requests.
        """
        waits_s = backoff(_DOWNLOADS if self._store is not None else self._tries, _FIRST_WAIT_S)
        try:
            return with_retries(once, waits_s=waits_s, may_pass=_broke_off, scope=scope, where=self.where(name))
        except _BrokenOffError as error:
            raise self._unavailable(name, str(error)) from None

    def _open(self, name: str, scope: CancelScope) -> tuple[int, Iterator[memoryview]]:
        """Size of a file and its bytes in pieces."""
        if self._store is not None:
            import obstore

            got = self._call(name, scope, lambda: obstore.get_async(self._store, self._folder + name))
            stream = got.stream(min_chunk_size=self._piece_bytes)
            return got.meta["size"], self._pieces(name, scope, lambda: anext(stream, b""))
        size = int(self._info(name, scope)["size"])
        file = self._call(name, scope, lambda: self._fs.open(self._folder + name, "rb", cache_type="none"))
        return size, self._pieces(name, scope, lambda: file.read(self._piece_bytes) if file.tell() < size else b"")

    def _info(self, name: str, scope: CancelScope) -> dict[str, Any]:
        """Metadata of a file, from its fsspec driver."""
        self._fs.invalidate_cache()  # why: huggingface_hub keeps listings, whatever the option says
        return dict(self._call(name, scope, lambda: self._fs.info(self._folder + name)))

    def _pieces(self, name: str, scope: CancelScope, next_piece: Callable[[], Any]) -> Iterator[memoryview]:
        while len(piece := memoryview(self._call(name, scope, next_piece, body=True))):
            yield piece

    def _call(self, name: str, scope: CancelScope, work: Callable[[], Any], *, body: bool = False) -> Any:
        """The answer to a request, within `tries` times `stall_s`."""
        future = in_loop(work) if self._store is not None else _in_thread(work)
        with self._lock:
            self.requests += not body
        try:
            with scope.ending(future.cancel):
                return future.result(self._patience_s)
        except CancelledError:
            raise interrupted(self.where(name)) from None
        except ResoluteError:
            raise
        except Exception as error:  # why any: drivers raise anything
            # why not done: drivers have timeouts of their own, which may be tried again
            expired = isinstance(error, TimeoutError) and not future.done()
            raise self._explained(name, error, body=body, expired=expired) from None
        finally:
            future.cancel()

    def _explained(self, name: str, error: Exception, *, body: bool, expired: bool) -> Exception:
        """An error of obstore or of a driver as one of ours: one line, without credentials.

        expired   the time for all tries is over
        """
        reason, code = failure(error), http_status(error)
        # why the cause: huggingface_hub raises FileNotFoundError from other failures, too
        cause, is_missing = error.__cause__, isinstance(error, FileNotFoundError)
        if code in GONE or (code is None and is_missing and (cause is None or hasattr(cause, "response"))):
            return Missing(f"{self.where(name)}: not found, expected a file of the set; upload the set again")
        if isinstance(error, PermissionError) or (code and 400 <= code < 500 and code not in _RETRIED_STATUS):
            return StorageError(
                f"{self.where(name)}: access is refused, got '{reason}', expected its bytes; check the address, the "
                "credentials and the permissions, then run the same command again"
            )
        if (body or self._fs is not None) and not expired:
            return _BrokenOffError(reason)
        return self._unavailable(name, reason)

    def _unavailable(self, name: str, reason: str) -> StorageError:
        return StorageError(
            f"{self.where(name)}: cannot be read, got '{reason}' after {self._tries} tries or {self._patience_s:g} s, "
            "expected its bytes; check the network and the store, then run the same command again: it continues"
        )


class _BrokenOffError(Exception):
    """The body of an answer ended early, or a driver failed: to be repeated here."""


def _broke_off(error: Exception) -> bool:
    return isinstance(error, _BrokenOffError)


def _in_thread(work: Callable[[], Answer]) -> Future[Answer]:
    """Run `work()` in a daemon thread, which is abandoned if the future is cancelled."""
    future: Future[Answer] = Future()

    def run() -> None:
        try:
            result, failed = work(), None
        except BaseException as error:  # re-raised by `Future.result`
            result, failed = None, error
        with suppress(InvalidStateError):  # cancelled meanwhile
            future.set_result(result) if failed is None else future.set_exception(failed)  # type: ignore[arg-type]

    threading.Thread(target=run, name="resolute-request", daemon=True).start()
    return future
