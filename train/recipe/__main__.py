"""`python -m train.recipe`: all keys of a recipe, with their defaults, as Markdown tables."""

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
    parser = Parser(prog="python -m train.recipe", description="Print all keys of a recipe, with their defaults.")
    return command(parser, _run, arguments)


def _run(_: argparse.Namespace) -> None:
    print(table())


if __name__ == "__main__":
    from pipeline.cli import run_main

    run_main(main)
