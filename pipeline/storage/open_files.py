"""`open_files`: opens the files of a shard set, in a folder or behind a URL."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from resolute.errors import ResoluteError
from resolute.urls import local_path

from .base import Files
from .local import Folder

if TYPE_CHECKING:
    from .cache import CacheSettings

__all__ = ["open_files"]


def open_files(root: str | Path, *, cache: CacheSettings | None = None) -> Files:
    """Open a folder, a `file://` URL or another URL (`s3://`, `gs://`, `http(s)://`, `hf://`, ...).

    `cache` is only for remote URLs; None: the defaults of `CacheSettings`.
    Raises `ResoluteError` if the URL's driver is not installed, the cache cannot be written, or `cache` is set for a
    folder.
    """
    folder = local_path(root)
    if folder is None:
        from .remote import Remote  # why here: slow to import, needed only for URLs

        return Remote(str(root), cache)
    if cache is not None:
        raise ResoluteError(f"{root}: got a cache for a folder, expected it for a URL only; leave it out")
    return Folder(folder)
