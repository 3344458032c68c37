"""obstore's stores, and their requests, which run on fsspec's event loop.

why a loop: the calling thread waits for a request there, so that Ctrl-C ends the wait at once.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from resolute.errors import ResoluteError, strip_credentials
from resolute.urls import without_user_info

from .cancel import CancelScope
from .request_errors import failure

__all__ = ["in_loop", "open_store", "request", "requests_within"]

Answer = TypeVar("Answer")

_BACKOFF = {"init_backoff": timedelta(seconds=0.25), "max_backoff": timedelta(seconds=20), "base": 3}
_GRACE_S = 0.2
_of_process = CancelScope()  # all requests of obstore
# why: obstore's file system is shared, and fsspec passes a call on to its loop without further arguments
_scope: ContextVar[CancelScope] = ContextVar("_scope", default=_of_process)
_opened_by = 0  # process that has opened a store; 0: none


def open_store(url: str, *, tries: int, stall_s: float, patience_s: float) -> Any:
    """obstore's store for a web address, or for a bucket without a key. Raises `ResoluteError` if not understood.

    url          `https://host/folder`, or `s3://bucket`
    tries        attempts for each request, with growing waits
    stall_s      a request that receives nothing for this long has failed, also while its body is being sent
    patience_s   no further attempt begins later than this
    """
    try:
        from obstore.store import HTTPStore, from_url
    except ImportError:
        raise ResoluteError(
            f"{strip_credentials(url)}: the package obstore is not installed, expected it; run `pip install obstore`"
        ) from None
    global _opened_by
    _check_process()
    _opened_by = os.getpid()
    stall = timedelta(seconds=stall_s)
    endpoints = [value for name, value in os.environ.items() if "ENDPOINT" in name.upper()]
    options: dict[str, Any] = {
        "client_options": {
            "connect_timeout": stall,
            "read_timeout": stall,
            "timeout": timedelta(days=7),  # of a whole body: none
            "allow_http": any(each.startswith("http://") for each in [url, *endpoints]),
        },
        "retry_config": {"max_retries": tries - 1, "retry_timeout": timedelta(seconds=patience_s), "backoff": _BACKOFF},
    }
    protocol, _, rest = url.partition("://")
    try:
        if protocol in ("http", "https"):  # why: `from_url` takes some of them for S3 and Azure, with credentials
            address, login = without_user_info(url)  # why: obstore would leave it out of its requests
            if login:
                options["client_options"]["default_headers"] = {"authorization": login}
            return HTTPStore.from_url(address, **options)
        if protocol in ("s3", "s3a") and not os.environ.get("AWS_ACCESS_KEY_ID"):
            with suppress(ImportError, ValueError):  # no boto3; it knows no credentials
                from obstore.auth.boto3 import Boto3CredentialProvider

                options["credential_provider"] = Boto3CredentialProvider()  # ~/.aws, with its profiles
        return from_url(f"gs://{rest}" if protocol == "gcs" else url, **options)
    except Exception as error:  # why any: boto3 raises its own, as for a profile that does not exist
        raise ResoluteError(
            f"{strip_credentials(url)}: not understood, got '{failure(error)}', expected a URL such as "
            "s3://bucket/shards; correct it or set what is missing"
        ) from None


def in_loop(work: Callable[[], Awaitable[Answer]]) -> Future[Answer]:
    """Run `work()` on fsspec's event loop. why `work`: obstore's functions must be called there.

    Raises `ResoluteError` in a process that was forked from one that had opened a store.
    """
    _check_process()
    from fsspec.asyn import get_loop

    return asyncio.run_coroutine_threadsafe(request(work), get_loop())


async def request(work: Callable[[], Awaitable[Answer]]) -> Answer:
    """The answer to a request of obstore; `CancelledError` if its scope is cancelled, or the process ends."""
    scope, loop, task = _scope.get(), asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    cancel = partial(loop.call_soon_threadsafe, task.cancel)
    with _of_process.ending(cancel), scope.ending(cancel):
        if _of_process.cancelled() or scope.cancelled():
            raise asyncio.CancelledError
        return await work()


@contextmanager
def requests_within(scope: CancelScope) -> Iterator[None]:
    """The requests of object stores that this thread begins in the block are cancelled with `scope`, too."""
    token = _scope.set(scope)
    try:
        yield
    finally:
        _scope.reset(token)


def _check_process() -> None:
    """why: obstore's threads do not exist in a forked process, and its requests would wait for ever."""
    if _opened_by not in (0, os.getpid()):
        raise ResoluteError(
            f"object store: used in process {os.getpid()}, which was forked from process {_opened_by} after that had "
            "opened one, expected a new process; start workers with multiprocessing's spawn (DataLoader: "
            'multiprocessing_context="spawn")'
        )


@atexit.register
def _end() -> None:
    """End all requests, and give obstore's threads time for it.

    why: one that still has to tell Python of an answer when the interpreter has ended aborts the process.
    """
    if _opened_by == os.getpid():
        _of_process.cancel()
        time.sleep(_GRACE_S)
