"""Logger `csv`: RUN/csv/step.csv and epoch.csv with the scalars of run.jsonl, and config.csv.

All files are written anew by every process of a run, so a resumed run's have each step once.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence

from .base import Point, Run, configuration, flat

__all__ = ["CsvLogger"]


class CsvLogger:
    """Writes a row per point. The first epoch with a validation adds its columns, which are empty in other epochs."""

    def __init__(self, run: Run) -> None:
        self._folder = run.folder / "csv"
        self._folder.mkdir(exist_ok=True)
        self._columns: dict[str, list[str]] = {}
        self.place = str(self._folder)
        self._write("config.csv", [["name", "value"], *flat(configuration(run.start)).items()], mode="w")

    def add(self, new: Sequence[Point]) -> None:
        rows: dict[str, list[Sequence[object]]] = {}
        for point in new:
            if not set(point.values) <= set(self._columns.get(point.kind, ())):
                self._write(f"{point.kind}.csv", rows.pop(point.kind, []))
                self._add_columns(point)
            values = (point.values.get(name, "") for name in self._columns[point.kind])
            rows.setdefault(point.kind, []).append([point.step, *values])
        for kind, lines in rows.items():
            self._write(f"{kind}.csv", lines)

    def _add_columns(self, point: Point) -> None:
        """Write the file of the point's kind again with the columns that the point has and earlier ones lack."""
        file = f"{point.kind}.csv"
        columns = self._columns.get(point.kind, [])
        text = (self._folder / file).read_text(encoding="utf-8") if columns else ""
        written = list(csv.reader(text.splitlines()))[1:]
        added = [name for name in point.values if name not in columns]
        self._columns[point.kind] = [*columns, *added]
        header = ["step", *(name.partition("/")[2] for name in self._columns[point.kind])]
        self._write(file, [header, *([*row, *[""] * len(added)] for row in written)], mode="w")

    def _write(self, name: str, rows: Sequence[Sequence[object]], *, mode: str = "a") -> None:
        with (self._folder / name).open(mode, encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)

    def close(self, *, finished: bool) -> None:
        pass
