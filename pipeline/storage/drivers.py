"""The errors of fsspec's drivers: what is missing or refused, whichever library a driver is made of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from resolute.errors import ResoluteError, strip_credentials

__all__ = ["GONE", "driver_errors", "http_status"]

GONE = frozenset({404, 410})  # HTTP statuses of a file that is missing


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
