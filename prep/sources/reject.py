"""The exception for an input image that is not accepted, with the reason."""

from __future__ import annotations

from resolute.errors import strip_credentials

__all__ = ["NOT_THERE", "Reject"]

NOT_THERE = "not there: no such file when the source was listed"


class Reject(Exception):
    """An input image that is not accepted.

    `str` of it is the reason, as `kind` or `kind: detail`, without credentials of URLs; it is stored in rejects.jsonl.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(strip_credentials(reason))
