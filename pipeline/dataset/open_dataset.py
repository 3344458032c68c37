"""`open_dataset`: opens the SHARDS argument of the commands, a shard set of prep or third-party WebDataset tars.

A manifest (or an unfinished prep) at exactly that path wins, so a folder's name may contain pattern characters.
"""

from __future__ import annotations

import glob
import os
from contextlib import suppress
from pathlib import Path

from resolute.errors import ResoluteError, strip_credentials
from resolute.pipeline.storage.base import is_url

from .format import is_shard_set
from .shard_set import ShardSet
from .target import CLASS, TargetKind

__all__ = ["is_foreign", "open_dataset"]


def open_dataset(
    source: str | Path, *, resolutions: tuple[int, ...] | None = None, val: str | None = None,
    classes: str | None = None, target: TargetKind | None = None, fold: int | None = None, folds: int | None = None,
    generation: int | None = None,
) -> ShardSet:  # fmt: skip
    """Call `ShardSet.open` for a shard set of prep, `open_webdataset` for third-party tars (see `is_foreign`).

    `resolutions` and `generation` apply to the former, `val`, `classes` and `target` to the latter; `fold` of `folds`:
    see `ShardSet.with_fold`. Raises `ResoluteError` as these functions do, and if `val`, `classes`, `target` or `fold`
    would have no effect.
    """
    if (fold is None) != (folds is None):
        raise ResoluteError(
            f"{strip_credentials(str(source))}: got fold={fold} and folds={folds}, expected both or none; correct them"
        )
    shards = _open(
        source, resolutions=resolutions, val=val, classes=classes, target=target, generation=generation
    )
    return shards if fold is None or folds is None else shards.with_fold(fold, folds)


def _open(
    source: str | Path, *, resolutions: tuple[int, ...] | None, val: str | None, classes: str | None,
    target: TargetKind | None, generation: int | None,
) -> ShardSet:  # fmt: skip
    shown = strip_credentials(str(source))
    if not is_foreign(str(source)):
        for name, value in (("val", val), ("classes", classes), ("target", target)):
            if value is not None:
                fixed = {"val": "validation split", "classes": "classes", "target": "targets"}[name]
                raise ResoluteError(
                    f"{shown}: got {name}={value} for a shard set of prep, expected none: prep has fixed its {fixed}; "
                    f"leave {name} out"
                )
        return ShardSet.open(source, resolutions=resolutions, generation=generation)
    from resolute.pipeline.dataset.webdataset.open import open_webdataset

    val_split: str | float | None = val
    with suppress(TypeError, ValueError):  # not a fraction but a pattern, or None
        val_split = float(val)  # type: ignore[arg-type]
    return open_webdataset(source, val=val_split, classes=classes, target=target or CLASS)


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
