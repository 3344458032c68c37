"""What do the command lines share? How they end, what they tell meanwhile, their checks, and their result files."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pipeline.cli
from pipeline.errors import ResoluteError
from pipeline.storage.atomic_file import check_output, output_file

from .machine import commit, machine, versions

if TYPE_CHECKING:
    import torch

__all__ = ["check_numbers", "chosen", "command", "header", "ready_to_write", "tell", "write"]


def command(
    parser: argparse.ArgumentParser, work: Callable[[argparse.Namespace], None], argv: Sequence[str] | None
) -> int:
    """Parse, then `work`; the exit status. Prints one line to stderr for a `ResoluteError`, and when interrupted."""
    return pipeline.cli.command(parser, work, argv)


def tell(text: str) -> None:
    """What is being measured now, on one line of a terminal; nothing elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def chosen(only: str, able: Sequence[str]) -> list[str]:
    """Those of `able` that `--only` names. Raises `ResoluteError` for others."""
    wanted = [part.strip() for part in only.split(",")]
    for part in wanted:
        if part not in able:
            raise ResoluteError(f"--only: got {part or 'nothing'}, expected some of {','.join(able)}; correct it")
    return [part for part in able if part in wanted]


def check_numbers(got: argparse.Namespace, **least: int) -> None:
    """Raises `ResoluteError` for a flag below its least value, or for `--seconds` that are no length of a window."""
    for name, low in least.items():
        if getattr(got, name) < low:
            flag = name.replace("_", "-")
            raise ResoluteError(f"--{flag}: got {getattr(got, name)}, expected at least {low}; raise it")
    if not 0 < got.seconds <= 3600:
        raise ResoluteError(f"--seconds: got {got.seconds:g}, expected above 0, at most 3600; change it")


def header(
    form: str | None = None, *, device: torch.device | None = None, packages: Sequence[str] = ()
) -> dict[str, Any]:
    """Of a result: its format and the date, if it has a `form`; the commit, machine and versions."""
    dated = {"format": form, "date": datetime.datetime.now(datetime.UTC).date().isoformat()} if form else {}
    return {**dated, "commit": commit(), "machine": machine(device), "versions": versions(*packages)}


def ready_to_write(out: Path) -> None:
    """Raises `ResoluteError` if `write` would: a result that cannot be written should not cost minutes first."""
    check_output(out, setting="--out", suffixes=(".json",))


def write(out: Path, result: Mapping[str, Any], *, indent: int | None = 1) -> None:
    """As JSON, whole or not at all. Raises `ResoluteError` if it cannot be written."""
    with output_file(out) as file:
        file.write((json.dumps(result, indent=indent) + "\n").encode())
