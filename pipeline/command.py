"""How is a mistake on a command line told? As every other one: in one line that says what to do."""

from __future__ import annotations

import argparse
from typing import NoReturn

from .errors import ResoluteError

__all__ = ["Parser"]


class Parser(argparse.ArgumentParser):
    """Raises `ResoluteError` instead of printing the usage and leaving."""

    def error(self, message: str) -> NoReturn:
        raise ResoluteError(f"command line: {message}; see `{self.prog} --help`")
