"""`python -m train.recipe`: prints every recipe key with its type, default and meaning, as Markdown tables."""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from pipeline.cli import guard_process

    guard_process()

import argparse

from pipeline.cli import Parser, command

from .keys import table

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = Parser(prog="python -m train.recipe", description="Print every recipe key with type, default and meaning.")
    return command(parser, _run, arguments)


def _run(_: argparse.Namespace) -> None:
    print(table())


if __name__ == "__main__":
    from pipeline.cli import run_main

    run_main(main)
