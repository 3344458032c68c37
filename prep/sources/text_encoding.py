"""Encoding checks: text files must be UTF-8, file names may hold any bytes (surrogateescape)."""

from __future__ import annotations

from pipeline.errors import ResoluteError

__all__ = ["is_text", "is_utf16", "not_utf8"]

_UTF16_MARKS = ("\udcff\udcfe", "\udcfe\udcff")  # the byte-order marks, decoded with surrogateescape


def is_text(text: str) -> bool:
    """Whether `text`, decoded with surrogateescape, was valid UTF-8."""
    return text.isascii() or not any("\ud800" <= sign <= "\udfff" for sign in text)


def is_utf16(text: str) -> bool:
    """Whether the beginning of a file, decoded as UTF-8 with surrogateescape, is UTF-16."""
    return text.startswith(_UTF16_MARKS) or "\0" in text


def not_utf8(path: object, line: int, got: str) -> ResoluteError:
    """The error for a file in another encoding; `line` counts from 1."""
    return ResoluteError(
        f"{path}: not UTF-8, line {line}: got {got}, expected UTF-8; save it as UTF-8 (for example with "
        "`iconv -f latin1 -t utf-8`, or -f utf-16)"
    )
