"""What lies in a folder, to be compared."""

from __future__ import annotations

import hashlib
from pathlib import Path


def tree(folder: Path) -> dict[str, str]:
    """{relative path: SHA-256} of every file but report.html and source.json: times and places differ."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path not in (folder / "report.html", folder / "source.json")
    }
