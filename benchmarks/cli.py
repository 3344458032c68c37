"""Shared by the benchmarks' command lines: arguments, progress, summaries of repeated measurements, text tables."""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from resolute.errors import ResoluteError
from resolute.files import write_errors

__all__ = [
    "chosen",
    "default_file",
    "repeated",
    "show_progress",
    "spread",
    "summarize",
    "text_table",
]


def show_progress(text: str) -> None:
    """Replace the progress line on a terminal's stderr; prints nothing elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def default_file(name: str, device_name: str | None = None, *, suffix: str = ".json") -> Path:
    """The file `name`, with the device's name if there is one, in the folder bench, which is made; git ignores it."""
    folder = Path("bench")
    with write_errors(folder):
        folder.mkdir(exist_ok=True)
    slug = re.sub(r"[^a-z0-9]+", "-", (device_name or "").lower().replace("nvidia", "")).strip("-")
    return folder / f"{name}{'-' * bool(slug)}{slug}{suffix}"


def chosen(only: str | Sequence[str], known: Sequence[str], *, setting: str = "--only") -> list[str]:
    """The parts named by `setting`, in the order of `known`. Raises `ResoluteError` for unknown ones."""
    names = [part.strip() for part in (only.split(",") if isinstance(only, str) else only)]
    for part in names:
        if part not in known:
            raise ResoluteError(f"{setting}: got {part or 'nothing'}, expected some of {','.join(known)}; correct it")
    return [part for part in known if part in names]


def repeated(raw: Sequence[float]) -> dict[str, Any]:
    """All rounds' values and their median."""
    return {"raw": list(raw), "median": statistics.median(raw)}


def summarize(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge one dict per round into one: floats become `repeated`, other values are the first round's."""
    return {
        key: repeated([each[key] for each in rounds]) if isinstance(value, float) else value
        for key, value in rounds[0].items()
    }


def spread(values: dict[str, Any], digits: int = 0, factor: float = 1.0) -> str:
    """`repeated` values times `factor` as text: median (min..max), or only the value if there is one."""
    low, middle, high = (
        f"{value * factor:,.{digits}f}" for value in (min(values["raw"]), values["median"], max(values["raw"]))
    )
    return f"{middle} ({low}..{high})" if len(values["raw"]) > 1 else middle


def text_table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> str:
    """Aligned columns under a title; the first `left` columns are left-aligned, the others right-aligned."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    aligned = [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    aligned.insert(1, "-" * (sum(widths) + 2 * (len(widths) - 1)))
    return "\n".join([title, *(f"  {line}" for line in aligned)])
