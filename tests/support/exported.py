"""Runs the `predict.py` of an exported folder in this process."""

from __future__ import annotations

import contextlib
import csv
import io
import runpy
from pathlib import Path

__all__ = ["predict_exported"]


def predict_exported(folder: Path, *photos: Path) -> list[dict[str, str]]:
    """The rows that `python FOLDER/predict.py PHOTOS` writes."""
    program = runpy.run_path(str(folder / "predict.py"))
    with contextlib.redirect_stdout(io.StringIO(newline="")) as out:
        program["main"]([*map(str, photos)])
    return list(csv.DictReader(io.StringIO(out.getvalue(), newline="")))
