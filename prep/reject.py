"""The exception that says that an input is not taken, and why."""

from __future__ import annotations

__all__ = ["NOT_THERE", "Reject"]

NOT_THERE = "not there: no such file when the source was listed"


class Reject(Exception):
    """This input is not taken; `str` of it says why, as `kind` or `kind: detail`."""
