"""How does a benchmark write its result file? Checked before it measures, whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from pipeline.errors import ResoluteError

__all__ = ["ready_to_write", "write"]


def ready_to_write(out: Path) -> None:
    """Make the folder now: a result that cannot be written should not cost minutes first."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(out, error) from None
    if out.is_dir() or not os.access(out.parent, os.W_OK):
        raise ResoluteError(f"--out {out}: cannot be written, expected a file in a folder of yours; choose another")


def write(out: Path, text: str) -> None:
    """Raises `ResoluteError` if it cannot be written."""
    part = out.with_name(out.name + ".part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(out)
    except OSError as error:
        raise _unwritable(out, error) from None


def _unwritable(out: Path, error: OSError) -> ResoluteError:
    return ResoluteError(f"--out {out}: {error.strerror}, expected a file that can be written; choose another")
