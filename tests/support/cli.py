"""The command line in this process: short names for the commands that most tests run first."""

from __future__ import annotations

from collections.abc import Sequence

from resolute.cli import main

__all__ = ["bench", "prep", "verify"]


def prep(words: Sequence[object]) -> int:
    """`resolute shards WORDS`, or `resolute jobs WORDS` if they begin with plan, range or finish."""
    command = "jobs" if str(words[0]) in ("plan", "range", "finish") else "shards"
    return main([command, *map(str, words)])


def verify(words: Sequence[object]) -> int:
    """`resolute verify WORDS`."""
    return main(["verify", *map(str, words)])


def bench(words: Sequence[object]) -> int:
    """`resolute bench WORDS`."""
    return main(["bench", *map(str, words)])
