"""The versions that machines which make one set together must agree on."""

from __future__ import annotations

import hashlib
import sys
from functools import cache
from pathlib import Path

from resolute.prep.convert.codecs import codec_versions

__all__ = ["versions"]


@cache
def versions() -> dict[str, str]:
    """{name: version} of this process: Python, Resolute's code, and the libraries that determine pixels and JPEGs."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return {"Python": python, "Resolute's code": _code_hash(), **codec_versions()}


def _code_hash() -> str:
    """A hash of the source files of `pipeline` and `prep`."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[2]
    for path in sorted([*root.glob("pipeline/**/*.py"), *root.glob("prep/**/*.py")]):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]
