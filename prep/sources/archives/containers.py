"""Sizes of archives, by which a machine that sees other ones is recognised before one of their images is rejected."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from resolute.errors import StorageError
from resolute.prep.sources.image_ref import is_url
from resolute.prep.storage.retry import retry

__all__ = ["check_containers", "container_sizes"]


def container_sizes(paths: Iterable[str]) -> dict[str, int]:
    """{path: bytes} of those archives that are local files. Raises `StorageError` if one is unavailable."""
    return {path: _size(path) for path in paths if not is_url(path)}


def check_containers(sizes: Mapping[str, int]) -> None:
    """Raise `StorageError` for an archive that is missing here, or has another size than in {path: bytes}."""
    for path, expected in sizes.items():
        nbytes = _size(path)
        if nbytes != expected:
            raise StorageError(
                f"{path}: not the archive that was planned, got {nbytes} bytes, expected {expected}; give this machine "
                "the same file, or wait until it is copied, then run the same command again"
            )


def _size(path: str) -> int:
    return retry(path, lambda: Path(path).stat().st_size)
