"""Opens what a command line's SHARDS names: a shard set that prep made, or tars that others made.

A manifest (or an unfinished prep) at that very path decides first, so a path may hold any character.
"""

from __future__ import annotations

import glob
import os
from contextlib import suppress
from pathlib import Path

from pipeline.errors import ResoluteError, strip_credentials
from pipeline.storage.files import is_url

from .shard_set import ShardSet, is_shard_set

__all__ = ["is_foreign", "open_either"]


def open_either(
    source: str | Path, *, resolutions: tuple[int, ...] | None = None, fold: int | None = None,
    val: str | None = None, classes: str | None = None,
) -> ShardSet:  # fmt: skip
    """`ShardSet.open` for a set that prep made, `open_webdataset` for tars that others made (see `is_foreign`).

    `val` and `classes` are for the latter, `resolutions` and `fold` for the former. Raises `ResoluteError` as these two
    do, and where an argument is given that has no effect.
    """
    shown = strip_credentials(str(source))
    if not is_foreign(str(source)):
        for name, value in (("val", val), ("classes", classes)):
            if value is not None:
                raise ResoluteError(
                    f"{shown}: got {name}={value} for a shard set that prep made, expected none: prep has decided its "
                    f"{'validation part' if name == 'val' else 'classes'}; leave {name} out"
                )
        return ShardSet.open(source, resolutions=resolutions, fold=fold)
    if fold is not None:
        raise ResoluteError(f"{shown}: got fold {fold} for tars that others made, which have no folds; leave fold out")
    from pipeline.dataset.webdataset.open import open_webdataset

    part: str | float | None = val
    with suppress(TypeError, ValueError):  # not a part but a pattern, or none
        part = float(val)  # type: ignore[arg-type]
    return open_webdataset(source, val=part, classes=classes)


def is_foreign(source: str) -> bool:
    """Whether `source` names tars that others made: a pattern, a tar, or a folder with tars that prep did not make.

    Raises `StorageError` if the disk does not tell.
    """
    if is_url(source) and not source.startswith(("file://", "local://")):
        return source.endswith((".tar", ".tar.gz", ".tgz")) or ("{" in source and ".tar" in source)
    if is_shard_set(source):
        return False
    if os.path.isdir(source):  # noqa: PTH112
        return any(Path(source).rglob("*.tar"))
    return "{" in source or glob.has_magic(source) or source.endswith(".tar")
