"""The one error type a user sees: a single line that says where, what, got, expected, and what to do."""

from __future__ import annotations

__all__ = ["ResoluteError", "check"]


class ResoluteError(Exception):
    """Bad input or a bad environment, told in one line.

    The message reads *where: what is wrong, got X, expected Y; do Z.* Command lines print it without a
    traceback and exit with status 2; anything else that escapes is a bug of ours and keeps its traceback.
    """


def check(good: bool, key: str, got: object, expected: str) -> None:
    """Raise `ResoluteError` for the recipe's `key` unless `good`."""
    if not good:
        raise ResoluteError(f"{key}: got {got}, expected {expected}; change it in the recipe")
