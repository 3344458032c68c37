"""What lies in a folder, to be compared."""

from __future__ import annotations

import hashlib
from pathlib import Path


def tree(folder: Path) -> dict[str, str]:
    """{relative path: SHA-256} of every file but report.html, which tells times."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != folder / "report.html"
    }
