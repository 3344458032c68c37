"""Shared parts of the benchmarks' command lines: exit status, progress line, argument checks and result files."""

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

__all__ = ["check_numbers", "chosen", "command", "header", "ready_to_write", "show_progress", "write"]


def command(
    parser: argparse.ArgumentParser, work: Callable[[argparse.Namespace], None], argv: Sequence[str] | None
) -> int:
    """Parse `argv`, call `work` and return the exit status; prints one line to stderr for a `ResoluteError`."""
    return pipeline.cli.command(parser, work, argv)


def show_progress(text: str) -> None:
    """Replace the progress line on a terminal's stderr; prints nothing elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def chosen(only: str, known: Sequence[str]) -> list[str]:
    """The parts named by `--only`, in the order of `known`. Raises `ResoluteError` for unknown ones."""
    names = [part.strip() for part in only.split(",")]
    for part in names:
        if part not in known:
            raise ResoluteError(f"--only: got {part or 'nothing'}, expected some of {','.join(known)}; correct it")
    return [part for part in known if part in names]


def check_numbers(args: argparse.Namespace, **minimums: int) -> None:
    """Raise `ResoluteError` for a flag below its minimum, or `--seconds` outside 0 to 3600."""
    for name, minimum in minimums.items():
        if getattr(args, name) < minimum:
            flag = name.replace("_", "-")
            raise ResoluteError(f"--{flag}: got {getattr(args, name)}, expected at least {minimum}; raise it")
    if not 0 < args.seconds <= 3600:
        raise ResoluteError(f"--seconds: got {args.seconds:g}, expected above 0, at most 3600; change it")


def header(
    file_format: str | None = None, *, device: torch.device | None = None, packages: Sequence[str] = ()
) -> dict[str, Any]:
    """The header of a result: commit, machine and versions; with a `file_format`, also that and the date."""
    dated = {}
    if file_format:
        dated = {"format": file_format, "date": datetime.datetime.now(datetime.UTC).date().isoformat()}
    return {**dated, "commit": commit(), "machine": machine(device), "versions": versions(*packages)}


def ready_to_write(out: Path) -> None:
    """Raise `ResoluteError` if `write` would fail, before minutes of measuring."""
    check_output(out, setting="--out", suffixes=(".json",))


def write(out: Path, result: Mapping[str, Any], *, indent: int | None = 1) -> None:
    """Write `result` as JSON, atomically. Raises `ResoluteError` if it cannot be written."""
    with output_file(out) as file:
        file.write((json.dumps(result, indent=indent) + "\n").encode())
