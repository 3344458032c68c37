"""Is this a shard set of ours, or are these tars that others made? Command lines that take both ask here."""

from __future__ import annotations

import glob
from contextlib import suppress
from pathlib import Path

from .files import is_url
from .shards import ShardSet

__all__ = ["is_foreign", "open_either"]


def open_either(
    source: str | Path, *, resolutions: tuple[int, ...] | None = None, fold: int | None = None,
    val: str | None = None, classes: str | None = None,
) -> ShardSet:  # fmt: skip
    """A folder or URL with a manifest (`ShardSet.open`), or else a WebDataset (`open_webdataset`).

    The latter is what is named by a pattern, comes with `val` or `classes`, or is a folder with tars and no manifest.
    Raises `ResoluteError` as these two do.
    """
    if val is None and classes is None and not is_foreign(str(source)):
        return ShardSet.open(source, resolutions=resolutions, fold=fold)
    from .foreign import open_webdataset

    part: str | float | None = val
    with suppress(TypeError, ValueError):  # not a part but a pattern, or none
        part = float(val)  # type: ignore[arg-type]
    return open_webdataset(source, val=part, classes=classes)


def is_foreign(source: str) -> bool:
    """Whether `open_either` would open tars that others made, without a word of `val` or `classes`."""
    if "{" in source or glob.has_magic(source) or source.endswith(".tar"):
        return True
    folder = Path(source)
    return not is_url(source) and not (folder / "manifest.json").exists() and any(folder.rglob("*.tar"))
