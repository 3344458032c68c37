"""Retries of failed reads, of files and of stores: which failures may pass, how long to wait, and when to give up."""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Callable
from typing import TypeVar

from pipeline.errors import Interrupted, ResoluteError, StorageError, strip_credentials

__all__ = ["ask_again", "is_final", "told", "wait_s"]

Answer = TypeVar("Answer")

_SLOWEST_S = 20.0  # no wait is longer
_RETRIED_STATUS = frozenset({408, 425, 429})  # HTTP status below 500 that another try may change
_FINAL_ERRNO = frozenset(
    {errno.EACCES, errno.EINVAL, errno.EISDIR, errno.ENAMETOOLONG, errno.ENOSYS, errno.ENOTDIR, errno.EPERM}
)
_FINAL_NAMES = frozenset(  # botocore's, which is not imported for this
    {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "InvalidURL", "InvalidUrlClientError",
     "ParamValidationError", "NoRegionError", "UnknownServiceError"}
)  # fmt: skip
# why: not the module's generator: whoever seeds that to repeat a run must not see it moved by a bad network
_jitter = random.SystemRandom()


def wait_s(tried: int, first_s: float) -> float:
    """Seconds before the try after `tried` failed ones: doubling, and anywhere between half of it and all of it.

    Source: "Exponential Backoff And Jitter", AWS Architecture Blog, 2015 ("equal jitter").
    """
    return float(min(first_s * 2 ** (tried - 1), _SLOWEST_S)) * _jitter.uniform(0.5, 1.0)


def is_final(error: BaseException) -> bool:
    """True where the same request would fail again: refused, not there, badly put. All else may pass."""
    status = _status(error)
    if status is not None and not isinstance(error, TimeoutError):  # S3 says RequestTimeout with 400
        return 400 <= status < 500 and status not in _RETRIED_STATUS
    if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError | ImportError):
        return True
    return getattr(error, "errno", None) in _FINAL_ERRNO or type(error).__name__ in _FINAL_NAMES


def _status(error: BaseException) -> int | None:
    """The HTTP status of aiohttp's, gcsfs's or botocore's errors; of the last also behind what s3fs makes of them."""
    for each in (error, error.__cause__):
        answer = getattr(each, "response", None)
        if isinstance(answer, dict):
            status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return status if isinstance(status, int) else None
    # why not that of causes: aiohttp's parser calls a body that was cut short a 400
    status = error.status if hasattr(error, "status") else getattr(error, "code", None)
    return status if isinstance(status, int) and status >= 100 else None


def told(error: BaseException) -> str:
    """The reason in one line, without credentials: a driver's text may quote the URL that it asked for."""
    status = _status(error)
    if status is not None:
        return f"HTTP status {status}"
    if isinstance(error, TimeoutError) and not error.args:
        return "no answer in time"
    text = " ".join(str(getattr(error, "strerror", None) or error).split())
    return strip_credentials(text)[:200] or type(error).__name__


def ask_again(
    ask: Callable[[], Answer], *, where: str, tries: int, first_wait_s: float, stop: threading.Event,
    count: Callable[[], None] = lambda: None, source: str = "network and the store",
    retried: type[Exception] = Exception,
) -> Answer:  # fmt: skip
    """What `ask()` returns, asked up to `tries` times with growing waits; `count()` is called before each new try.

    `source` is what to check, for messages. Raises `FileNotFoundError`, `ResoluteError` and what is not of the kind
    `retried` at once if `ask` does; `StorageError` if another answer is final or if all tries failed; `Interrupted`
    when `stop` is set.
    """
    for tried in range(1, tries + 1):
        try:
            return ask()
        except (FileNotFoundError, ResoluteError):
            raise
        except retried as error:  # why Exception of a store: drivers raise anything; `is_final` sorts it
            if stop.is_set():
                break
            if is_final(error):
                raise StorageError(
                    f"{where}: access is refused, got '{told(error)}', expected its bytes; check the address, the "
                    "credentials and the permissions, then run the same command again"
                ) from None
            if tried == tries:
                raise StorageError(
                    f"{where}: cannot be read, got '{told(error)}' at the last of {tries} tries, expected its bytes; "
                    f"check the {source}, then run the same command again: it continues"
                ) from None
        if stop.wait(wait_s(tried, first_wait_s)):
            break
        count()
    raise Interrupted(f"{where}: the read was interrupted, expected files that stay open; open them again")
