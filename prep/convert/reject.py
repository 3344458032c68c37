"""The exception that says that an input is not taken, and why."""

from __future__ import annotations

from pipeline.errors import strip_credentials

__all__ = ["NOT_THERE", "Reject"]

NOT_THERE = "not there: no such file when the source was listed"


class Reject(Exception):
    """This input is not taken; `str` of it says why, as `kind` or `kind: detail`, without credentials of URLs."""

    def __init__(self, reason: str) -> None:
        super().__init__(strip_credentials(reason))
