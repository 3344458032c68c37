"""`open_dataset`: opens the SHARDS argument of the commands, a shard set of prep or third-party WebDataset tars.

A manifest (or an unfinished prep) at exactly that path wins, so a folder's name may contain pattern characters.
"""

from __future__ import annotations

import glob
import os
from contextlib import suppress
from pathlib import Path

from pipeline.errors import ResoluteError, strip_credentials
from pipeline.storage.base import is_url

from .shard_set import ShardSet, is_shard_set

__all__ = ["is_foreign", "open_dataset"]


def open_dataset(
    source: str | Path, *, resolutions: tuple[int, ...] | None = None, fold: int | None = None,
    val: str | None = None, classes: str | None = None,
) -> ShardSet:  # fmt: skip
    """Call `ShardSet.open` for a shard set of prep, `open_webdataset` for third-party tars (see `is_foreign`).

    `resolutions` and `fold` apply to the former, `val` and `classes` to the latter. Raises `ResoluteError` as these
    functions do, and if an argument would have no effect.
    """
    shown = strip_credentials(str(source))
    if not is_foreign(str(source)):
        for name, value in (("val", val), ("classes", classes)):
            if value is not None:
                raise ResoluteError(
                    f"{shown}: got {name}={value} for a shard set of prep, expected none: prep has fixed its "
                    f"{'validation split' if name == 'val' else 'classes'}; leave {name} out"
                )
        return ShardSet.open(source, resolutions=resolutions, fold=fold)
    if fold is not None:
        raise ResoluteError(f"{shown}: got fold {fold} for third-party tars, which have no folds; leave fold out")
    from pipeline.dataset.webdataset.open import open_webdataset

    val_split: str | float | None = val
    with suppress(TypeError, ValueError):  # not a fraction but a pattern, or None
        val_split = float(val)  # type: ignore[arg-type]
    return open_webdataset(source, val=val_split, classes=classes)


def is_foreign(source: str) -> bool:
    """Whether `source` names third-party tars: a pattern, a tar, or a folder with tars that is not a shard set.

    Raises `StorageError` if the disk does not answer.
    """
    if is_url(source) and not source.startswith(("file://", "local://")):
        return source.endswith((".tar", ".tar.gz", ".tgz")) or ("{" in source and ".tar" in source)
    if is_shard_set(source):
        return False
    if os.path.isdir(source):  # noqa: PTH112
        return any(Path(source).rglob("*.tar"))
    return "{" in source or glob.has_magic(source) or source.endswith(".tar")
