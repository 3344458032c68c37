"""Retries with exponential backoff for reads from disks and object stores; final errors are not retried."""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Callable
from typing import TypeVar

from resolute.errors import Interrupted, ResoluteError, StorageError, strip_credentials

__all__ = ["GONE", "http_status", "is_final", "retry_call", "wait_s"]

Answer = TypeVar("Answer")

_MAX_WAIT_S = 20.0
GONE = frozenset({404, 410})  # HTTP statuses of a file that is missing
_RETRIED_STATUS = frozenset({408, 425, 429})  # HTTP statuses below 500 that a retry may change
_FINAL_ERRNO = frozenset(
    {errno.EACCES, errno.EINVAL, errno.EISDIR, errno.ENAMETOOLONG, errno.ENOSYS, errno.ENOTDIR, errno.EPERM}
)
_FINAL_NAMES = frozenset(  # botocore's exception names, so that it need not be imported
    {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "InvalidURL", "InvalidUrlClientError",
     "ParamValidationError", "NoRegionError", "UnknownServiceError"}
)  # fmt: skip
# why not the global generator: a flaky network must not change the random numbers of a seeded run
_jitter = random.SystemRandom()


def wait_s(tried: int, first_s: float) -> float:
    """Seconds to wait after `tried` failed attempts: doubling from `first_s`, with jitter between 50 and 100 %.

    Source: "Exponential Backoff And Jitter", AWS Architecture Blog, 2015 ("equal jitter").
    """
    return float(min(first_s * 2 ** (tried - 1), _MAX_WAIT_S)) * _jitter.uniform(0.5, 1.0)


def is_final(error: BaseException) -> bool:
    """True if a retry cannot help: refused, missing, or an invalid request. Anything else may be transient."""
    status = http_status(error)
    if status is not None and not isinstance(error, TimeoutError):  # S3 reports RequestTimeout as 400
        return 400 <= status < 500 and status not in _RETRIED_STATUS
    if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError | ImportError):
        return True
    return getattr(error, "errno", None) in _FINAL_ERRNO or type(error).__name__ in _FINAL_NAMES


def http_status(error: BaseException) -> int | None:
    """The HTTP status of an error of aiohttp, gcsfs, botocore or huggingface_hub, or None.

    The last two may be the cause of the error: s3fs and `HfFileSystem` raise an `OSError` from them.
    """
    for each in (error, error.__cause__):
        answer = getattr(each, "response", None)
        if isinstance(answer, dict):
            status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return status if isinstance(status, int) else None
        code = getattr(answer, "status_code", None)
        if isinstance(code, int):
            return code
    # why not of causes: aiohttp's parser reports a truncated body as 400
    status = error.status if hasattr(error, "status") else getattr(error, "code", None)
    return status if isinstance(status, int) and status >= 100 else None


def _describe_error(error: BaseException) -> str:
    """The reason in one line, without credentials: a driver's message may quote the requested URL."""
    status = http_status(error)
    if status is not None:
        return f"HTTP status {status}"
    if isinstance(error, TimeoutError) and not error.args:
        return "no answer in time"
    text = " ".join(str(getattr(error, "strerror", None) or error).split())
    return strip_credentials(text)[:200] or type(error).__name__


def retry_call(
    request: Callable[[], Answer], *, where: str, tries: int, first_wait_s: float, stop: threading.Event,
    count: Callable[[], None] = lambda: None, source: str = "network and the store",
    retried: type[Exception] = Exception,
) -> Answer:  # fmt: skip
    """Return `request()`, called up to `tries` times with growing waits; `count()` is called before each retry.

    where     the file or URL, for messages
    source    what the user should check, for messages
    retried   exception type that may be retried
    stop      ends the waits

    Raises `FileNotFoundError`, `ResoluteError` and exceptions not of type `retried` immediately; `StorageError` if an
    error is final (`is_final`) or all tries failed; `Interrupted` once `stop` is set.
    """
    for tried in range(1, tries + 1):
        try:
            return request()
        except (FileNotFoundError, ResoluteError):
            raise
        except retried as error:  # why Exception for stores: drivers raise anything; `is_final` decides
            if stop.is_set():
                break
            if is_final(error):
                raise StorageError(
                    f"{where}: access is refused, got '{_describe_error(error)}', expected its bytes; check the "
                    "address, the credentials and the permissions, then run the same command again"
                ) from None
            if tried == tries:
                raise StorageError(
                    f"{where}: cannot be read, got '{_describe_error(error)}' at the last of {tries} tries, expected "
                    f"its bytes; check the {source}, then run the same command again: it continues"
                ) from None
        if stop.wait(wait_s(tried, first_wait_s)):
            break
        count()
    raise Interrupted(f"{where}: the read was interrupted, expected files that stay open; open them again")
