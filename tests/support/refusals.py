"""Command lines of prep that are refused."""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["Ran", "refused"]


class Ran(NamedTuple):
    """The result of a command line: exit status, stdout, stderr."""

    status: int
    out: str
    err: str


def refused(ran: Ran, *words: str) -> None:
    """Check that nothing but one line was printed, *where: got X, expected Y; do Z*, and that it contains `words`.

    Lines that describe the targets of a table may precede it.
    """
    about = ("(TARGET=", "resolute shards:   ")
    lines = [line for line in ran.err.splitlines() if not any(part in line for part in about)]
    assert (ran.status, ran.out, len(lines)) == (2, "", 1), (ran.out, ran.err)
    assert re.fullmatch(r"resolute (jobs \w+|shards): .+: .*got .+expected .+; .+", lines[0]), ran.err
    for word in words:
        assert word in ran.err
