"""Summaries of repeated measurements, and their text tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["each_repeated", "repeated", "spread", "text_table"]


def repeated(raw: Sequence[float]) -> dict[str, Any]:
    """All repeats' values and their median."""
    return {"raw": list(raw), "median": statistics.median(raw)}


def each_repeated(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge one dict per repeat into one: floats become `repeated`, other values are the first repeat's."""
    return {
        key: repeated([run[key] for run in runs]) if isinstance(value, float) else value
        for key, value in runs[0].items()
    }


def spread(values: dict[str, Any], digits: int = 0, factor: float = 1.0) -> str:
    """`repeated` values times `factor` as text: median (min..max), or only the value if there is one."""
    low, middle, high = (f"{value * factor:,.{digits}f}" for value in
                         (min(values["raw"]), values["median"], max(values["raw"])))  # fmt: skip
    return f"{middle} ({low}..{high})" if len(values["raw"]) > 1 else middle


def text_table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> str:
    """Aligned columns under a title; the first `left` columns are left-aligned, the others right-aligned."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    aligned = [
        "  ".join(cell.ljust(width) if i < left else cell.rjust(width)
                  for i, (cell, width) in enumerate(zip(line, widths, strict=True))).rstrip()
        for line in lines
    ]  # fmt: skip
    aligned.insert(1, "-" * (sum(widths) + 2 * (len(widths) - 1)))
    return "\n".join([title, *(f"  {line}" for line in aligned)])
