"""Which images belong to which split, and to which fold?"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import ResoluteError
from pipeline.plan.rng import permute, stream_key
from prep.sources.image_ref import is_url

from .catalog import Catalog

__all__ = ["MAX_FOLDS", "Split", "Splits", "check_no_overlap", "make_splits"]

T = TypeVar("T", np.bool_, np.uint8)
MAX_FOLDS = 255
_HELD_OUT = 0x5641_4C  # names the random stream that picks validation images
_FOLDS = 0x464F_4C44  # and the one that deals out folds
_CHUNK = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Split:
    """`positions` (n,) u4, ascending: the split's images in `catalog`. `folds` (n,) u1, where asked for."""

    catalog: Catalog
    positions: NDArray[np.uint32]
    folds: NDArray[np.uint8] | None = None

    def __len__(self) -> int:
        return len(self.positions)

    def fingerprint(self) -> str:
        """16 hex digits over which images of the catalog are in the split, and in which fold."""
        digest = hashlib.sha256(self.positions.astype("<u4").tobytes())
        if self.folds is not None:
            digest.update(self.folds.tobytes())
        return digest.hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Splits:
    """All classes by number, and every split by name; no image is in two."""

    classes: tuple[str, ...]
    splits: Mapping[str, Split]


def make_splits(
    train: Catalog,
    *,
    val: Catalog | None = None,
    val_list: Path | None = None,
    val_frac: float = 0.1,
    folds: int = 0,
    seed: int = 0,
) -> Splits:
    """Split the images of `train`; memory is a few bytes an image.

    Validation is `val`, or the images that `val_list` names (one path a line), or `val_frac` (0..1) of every
    class, drawn by `seed`: at least one and not all of a class with two or more. `folds` (2..MAX_FOLDS) holds
    out nothing but numbers all images instead: within a class, folds differ by one image at most; a class that
    comes or goes leaves the others' alone. Raises `ResoluteError` if train, val or a fold would be empty, for a
    list that does not fit, and for `folds` out of range or together with `val` or `val_list`.
    """
    everything = np.arange(len(train), dtype=np.uint32)
    if folds:
        if not 2 <= folds <= MAX_FOLDS:
            raise ResoluteError(f"FOLDS: out of range, got {folds}, expected 2 to {MAX_FOLDS}; choose a value in range")
        if val is not None or val_list is not None:
            raise ResoluteError("FOLDS: given together with VAL or VAL_LIST, expected one of them; drop the others")
        numbers = _assign_folds(train, folds, seed)
        sizes = np.bincount(numbers, minlength=folds)
        if not sizes.all():
            raise ResoluteError(
                f"{train.root}: no image is left for fold {int(sizes.argmin())}, got {len(train)} images for {folds} "
                "folds, expected some in each; choose fewer FOLDS"
            )
        return Splits(
            classes=train.classes, splits={"train": Split(catalog=train, positions=everything, folds=numbers)}
        )
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
                f"{train.root}: no image is left for {name}, got {len(splits['train'])} for train and "
                f"{len(splits['val'])} for val, expected some for both; give more images per class or change what "
                "is held out"
            )
    return Splits(classes=train.classes, splits=splits)


def check_no_overlap(*, out: str, src: str, val: str | None = None) -> None:
    """Raise `ResoluteError` if `out` lies inside `src` or `val`, or these overlap. URLs and patterns pass."""
    sources = {name: Path(path) for name, path in (("SRC", src), ("VAL", val)) if path and not is_url(path)}
    if not is_url(out):
        for name, path in sources.items():
            if Path(out).resolve().is_relative_to(path.resolve()):
                raise ResoluteError(
                    f"{out}: lies inside {name}, got {path}, expected a folder apart from the photos; "
                    "choose another OUT"
                )
    if len(sources) == 2:
        src_path, val_path = sources["SRC"].resolve(), sources["VAL"].resolve()
        if src_path.is_relative_to(val_path) or val_path.is_relative_to(src_path):
            raise ResoluteError(
                f"{val}: overlaps SRC, got {src}, expected two places side by side; "
                "correct VAL, or hold out a part of SRC with --val-frac"
            )


def _read_val_list(catalog: Catalog, val_list: Path) -> NDArray[np.bool_]:
    """(N,) bool: the images that the list names. Raises if the list or one of them does not exist."""
    listed = np.zeros(len(catalog), np.bool_)
    missing: set[str] = set()
    try:
        with val_list.open(encoding="utf-8-sig", errors="surrogateescape") as lines:
            for line in filter(str.strip, lines):
                tidy = str(PurePosixPath(line.strip()))
                position = catalog.find(tidy)
                if position is None:
                    position = catalog.find(line.rstrip("\n"))  # why: a name may begin or end with a space
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
            f"{val_list}: {len(missing)} of {int(listed.sum()) + len(missing)} paths are no images of "
            f"{catalog.root}, got {min(missing)}, expected paths such as {catalog.name(0)}; correct the list"
        )
    return listed


def _draw_held_out(catalog: Catalog, val_frac: float, seed: int) -> NDArray[np.bool_]:
    """(N,) bool: a seeded part of every class: at least one image, and at least one left, where it has two."""
    counts = _counts(catalog)
    by_rank = np.zeros(len(catalog), np.bool_)
    for start, total, name in _classes(catalog, counts):
        held_count = min(total - 1, max(1, round(total * val_frac)))
        # why: keyed by name, so that a class that comes or goes leaves the others' split alone
        key = stream_key(seed, _HELD_OUT, zlib.crc32(name))
        by_rank[start + permute(key, np.arange(held_count, dtype=np.int64), total)] = True
    return _to_catalog_order(catalog, counts, by_rank)


def _assign_folds(catalog: Catalog, folds: int, seed: int) -> NDArray[np.uint8]:
    """(N,) u1: the fold of every image, dealt out in a seeded order from another first fold in each class."""
    counts = _counts(catalog)
    by_rank = np.zeros(len(catalog), np.uint8)
    for start, total, name in _classes(catalog, counts):
        key = stream_key(seed, _FOLDS, zlib.crc32(name))
        order = permute(key, np.arange(total, dtype=np.int64), total)
        # why: else the images that do not divide evenly would all go to the first folds
        by_rank[start : start + total] = (order + stream_key(key) % folds) % folds
    return _to_catalog_order(catalog, counts, by_rank)


def _counts(catalog: Catalog) -> NDArray[np.int64]:
    """(C,) images of each class."""
    counts = np.zeros(len(catalog.classes), np.int64)
    for first in range(0, len(catalog), _CHUNK):
        counts += np.bincount(catalog.labels[first : first + _CHUNK], minlength=len(counts))
    return counts


def _classes(catalog: Catalog, counts: NDArray[np.int64]) -> Iterator[tuple[int, int, bytes]]:
    """(images of all classes before it, images, name) of every class that has any."""
    starts = np.cumsum(counts) - counts
    for label in np.flatnonzero(counts).tolist():
        yield int(starts[label]), int(counts[label]), os.fsencode(catalog.classes[label])


def _to_catalog_order(catalog: Catalog, counts: NDArray[np.int64], by_rank: NDArray[T]) -> NDArray[T]:
    """Values laid out class after class, each in the order of its names, brought into the catalog's order."""
    next_rank = np.cumsum(counts) - counts  # where the next image of each class has its value
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
