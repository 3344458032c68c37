"""What do the command lines share? A mistake or an error is told in one line that says what to do."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from .errors import ResoluteError

__all__ = ["Parser", "command"]


class Parser(argparse.ArgumentParser):
    """Raises `ResoluteError` instead of printing the usage and leaving."""

    def error(self, message: str) -> NoReturn:
        raise ResoluteError(f"command line: {message}; see `{self.prog} --help`")


def command(
    parser: argparse.ArgumentParser, work: Callable[[argparse.Namespace], int | None], arguments: Sequence[str] | None
) -> int:
    """Parse, then `work`; the exit status, 0 for None. A `ResoluteError` is one line on stderr, and status 2."""
    try:
        return work(parser.parse_args(arguments)) or 0
    except ResoluteError as error:
        print(f"error: {error}".encode(errors="backslashreplace").decode(), file=sys.stderr)
        return 2
