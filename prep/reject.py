"""How is it said that an input is not taken?"""

from __future__ import annotations

__all__ = ["Reject"]


class Reject(Exception):
    """This input is not taken; `str` of it says why, as `kind` or `kind: detail`."""
