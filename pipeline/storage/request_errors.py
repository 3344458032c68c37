"""Errors of requests: what is missing and why one failed, whichever library a driver is made of."""

from __future__ import annotations

import re

from resolute.errors import strip_credentials

__all__ = ["GONE", "failure", "http_status"]

GONE = frozenset({404, 410})  # HTTP statuses of a file that is missing


def http_status(error: BaseException) -> int | None:
    """The HTTP status of an error of obstore, aiohttp or huggingface_hub, or None.

    The last may be the cause of the error: `HfFileSystem` raises an `OSError` from it.
    """
    if stated := re.search(r"status code: (\d{3})", str(error)):  # obstore
        return int(stated[1])
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


def failure(error: Exception) -> str:
    """Why a request failed, in a few words. obstore puts details for its authors below the first line of a message."""
    text, status = str(error), http_status(error)
    if status is not None:
        code = re.search(r"<Code>(\w{1,60})</Code>", text)  # such as NoSuchBucket
        return f"HTTP status {status}" + (f" {code[1]}" if code else "")
    if isinstance(error, TimeoutError) or "kind: Timeout" in text:
        return "no answer in time"
    words = " ".join(text.partition("\n\nDebug source")[0].rpartition(" - ")[2].split())
    return strip_credentials(words)[:200] or type(error).__name__
