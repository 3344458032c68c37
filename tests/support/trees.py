"""Hashes of all files in a folder, for comparison."""

from __future__ import annotations

import hashlib
from pathlib import Path


def tree(folder: Path) -> dict[str, str]:
    """{relative path: SHA-256} of every file except report.html and source.json, which hold times and paths."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path not in (folder / "report.html", folder / "source.json")
    }
