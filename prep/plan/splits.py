"""Splits and folds: assigns every image to train or val, or to one of K folds, by seed and class."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import ResoluteError
from pipeline.plan.rng import permute, stream_key

from .catalog import Catalog

__all__ = ["Split", "make_splits"]

T = TypeVar("T", np.bool_, np.uint8)
_HELD_OUT = 0x5641_4C  # identifies the random stream that draws validation images
_FOLDS = 0x464F_4C44  # identifies the random stream that assigns folds
_CHUNK = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Split:
    """A split: `positions` (n,) u4, ascending, are its images in `catalog`; `folds` (n,) u1 if folds were requested."""

    catalog: Catalog
    positions: NDArray[np.uint32]
    folds: NDArray[np.uint8] | None = None

    def __len__(self) -> int:
        return len(self.positions)

    def fingerprint(self) -> str:
        """16 hex digits over the positions of the split's images and their folds."""
        digest = hashlib.sha256(self.positions.astype("<u4").tobytes())
        if self.folds is not None:
            digest.update(self.folds.tobytes())
        return digest.hexdigest()[:16]


def make_splits(
    train: Catalog,
    *,
    val: Catalog | None = None,
    val_list: Path | None = None,
    val_frac: float = 0.1,
    folds: int = 0,
    seed: int = 0,
) -> dict[str, Split]:
    """{name: split} of the images of `train` and `val`, which are disjoint; memory is a few bytes per image.

    Validation is `val`, or the images that `val_list` names (one path per line), or `val_frac` (0..1) of each class,
    drawn by `seed`: at least one image and not all of a class with two or more. `folds` (2..255, without `val` and
    `val_list`) holds out nothing and assigns every image to a fold instead: within a class, fold sizes differ by at
    most one. Adding or removing a class does not change the split of the others.

    Raises `ResoluteError` if train, val or a fold would be empty, and for a list that names unknown images.
    """
    everything = np.arange(len(train), dtype=np.uint32)
    if folds:
        numbers = _assign_folds(train, folds, seed)
        sizes = np.bincount(numbers, minlength=folds)
        if not sizes.all():
            raise ResoluteError(
                f"{train.root}: no image left for fold {int(sizes.argmin())}, got {len(train)} images for {folds} "
                "folds, expected at least one in each; choose fewer FOLDS"
            )
        return {"train": Split(catalog=train, positions=everything, folds=numbers)}
    if val is not None:
        splits = {"train": Split(catalog=train, positions=everything)}
        splits["val"] = Split(catalog=val, positions=np.arange(len(val), dtype=np.uint32))
    else:
        held_out = _read_val_list(train, val_list) if val_list is not None else _draw_held_out(train, val_frac, seed)
        splits = {
            "train": Split(catalog=train, positions=everything[~held_out]),
            "val": Split(catalog=train, positions=everything[held_out]),
        }
    for name, split in splits.items():
        if not len(split):
            raise ResoluteError(
                f"{train.root}: no image left for {name}, got {len(splits['train'])} for train and "
                f"{len(splits['val'])} for val, expected at least one for both; add images or change "
                "what is held out"
            )
    return splits


def _read_val_list(catalog: Catalog, val_list: Path) -> NDArray[np.bool_]:
    """(N,) bool: the images that the list names. Raises `ResoluteError` if the list or an image is missing."""
    listed = np.zeros(len(catalog), np.bool_)
    missing: set[str] = set()
    try:
        with val_list.open(encoding="utf-8-sig", errors="surrogateescape") as lines:
            for line in filter(str.strip, lines):
                tidy = str(PurePosixPath(line.strip()))
                position = catalog.find(tidy)
                if position is None:
                    position = catalog.find(line.rstrip("\n"))  # why: a name may start or end with a space
                if position is None:
                    missing.add(tidy)
                else:
                    listed[position] = True
    except OSError as error:
        raise ResoluteError(
            f"{val_list}: cannot be read, got {error.strerror}, expected a file with one path per "
            "line; correct VAL_LIST"
        ) from None
    if missing:
        raise ResoluteError(
            f"{val_list}: {len(missing)} of {int(listed.sum()) + len(missing)} paths are not images of "
            f"{catalog.root}, got {min(missing)}, expected paths such as {catalog.name(0)}; correct the list"
        )
    return listed


def _draw_held_out(catalog: Catalog, val_frac: float, seed: int) -> NDArray[np.bool_]:
    """(N,) bool: a seeded fraction of every class: at least one image if it has two, and never all."""
    counts = _counts(catalog)
    by_rank = np.zeros(len(catalog), np.bool_)
    for start, total, name in _classes(catalog, counts):
        held_count = min(total - 1, max(1, round(total * val_frac)))
        # why by name: adding or removing a class does not change the split of the others
        key = stream_key(seed, _HELD_OUT, zlib.crc32(name))
        by_rank[start + permute(key, np.arange(held_count, dtype=np.int64), total)] = True
    return _to_catalog_order(catalog, counts, by_rank)


def _assign_folds(catalog: Catalog, folds: int, seed: int) -> NDArray[np.uint8]:
    """(N,) u1: the fold of every image, dealt in a seeded order starting at a seeded fold per class."""
    counts = _counts(catalog)
    by_rank = np.zeros(len(catalog), np.uint8)
    for start, total, name in _classes(catalog, counts):
        key = stream_key(seed, _FOLDS, zlib.crc32(name))
        order = permute(key, np.arange(total, dtype=np.int64), total)
        # why a seeded first fold: otherwise the remainders of all classes would go to the first folds
        by_rank[start : start + total] = (order + stream_key(key) % folds) % folds
    return _to_catalog_order(catalog, counts, by_rank)


def _counts(catalog: Catalog) -> NDArray[np.int64]:
    """(C,) number of images of each class."""
    counts = np.zeros(len(catalog.classes), np.int64)
    for first in range(0, len(catalog), _CHUNK):
        counts += np.bincount(catalog.labels[first : first + _CHUNK], minlength=len(counts))
    return counts


def _classes(catalog: Catalog, counts: NDArray[np.int64]) -> Iterator[tuple[int, int, bytes]]:
    """Yield (images of all classes before it, images, name) of every non-empty class."""
    starts = np.cumsum(counts) - counts
    for label in np.flatnonzero(counts).tolist():
        yield int(starts[label]), int(counts[label]), os.fsencode(catalog.classes[label])


def _to_catalog_order(catalog: Catalog, counts: NDArray[np.int64], by_rank: NDArray[T]) -> NDArray[T]:
    """Reorder values that are laid out class by class, each in order of names, to the catalog's order."""
    next_rank = np.cumsum(counts) - counts  # index of the value of each class's next image
    out = np.empty_like(by_rank)
    for first in range(0, len(catalog), _CHUNK):
        labels = catalog.labels[first : first + _CHUNK]
        order = np.argsort(labels, kind="stable")
        grouped = labels[order]
        present, begins, sizes = np.unique(grouped, return_index=True, return_counts=True)
        ranks = np.arange(len(labels)) + np.repeat(next_rank[present] - begins, sizes)
        out[first + order] = by_rank[ranks]
        next_rank[present] += sizes
    return out
