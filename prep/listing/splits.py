"""Splits: assigns every image to train or val, by a second source, a list of names, or a seeded fraction of each class.

The fraction drawn from a class depends only on the seed and that class, so adding another class leaves it unchanged. An
image with several labels counts as one of its rarest label; images with values are one class.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.groups import components, deal
from resolute.pipeline.plan.permutation import permute, stream_key
from resolute.prep.sources.tables.photo_names import AmbiguousName, NameIndex

from .compare import Comparison
from .copies import ExactCopies, check_not_across, leaders
from .groups import group_name, settled_groups
from .photos import Photos

__all__ = ["Split", "extend_splits", "make_splits"]

_HELD_OUT = 0x5641_4C  # identifies the random stream that draws validation images
_CHUNK = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Split:
    """A split: `positions` (n,) u4, ascending, are its photos among those of a source."""

    photos: Photos
    positions: NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.positions)

    def fingerprint(self) -> str:
        """16 hex digits over the positions of the split's images."""
        return hashlib.sha256(self.positions.astype("<u4").tobytes()).hexdigest()[:16]


def make_splits(
    train: Photos,
    *,
    val: Photos | None = None,
    val_list: Path | None = None,
    val_frac: float = 0.1,
    seed: int = 0,
    copies: ExactCopies | None = None,
    drop: bool = False,
    groups: Mapping[str, NDArray[np.int64]] | None = None,
) -> dict[str, Split]:
    """{name: split} of the images of `train` and `val`, which are disjoint; memory is a few bytes per image.

    Validation is `val`, or the images that `val_list` names (one path per line), or `val_frac` (0..1) of each class,
    drawn by `seed`: at least one image and not all of a class with two or more; with `val_frac` 0 there is no
    validation split. Adding or removing a class does not change the split of the others. `copies` of an image are held
    out with it and count once; with `drop`, only one of them is in a split, that in val if there is one. The photos of
    each of the `groups`, as `group_numbers` gives them, are in one split, with the classes as even as in `deal`.

    Raises `ResoluteError` if train or val would be empty, for a list that names unknown images, and if `val` or the
    list puts copies into both splits, unless `drop`, or photos of a group.
    """
    everything = np.arange(len(train), dtype=np.uint32)
    copied = {} if copies is None else copies.groups
    if val is None and val_list is None and val_frac == 0:
        splits = {"train": Split(photos=train, positions=everything)}
        return _without_copies(splits, copied) if drop else splits
    if val is not None:
        if copies is not None and not drop:
            check_not_across(val.root, val, copied["train"], copied["val"])
        if groups is not None:
            _refuse_divided(val.root, train, groups["train"], groups["val"])
        splits = {"train": Split(photos=train, positions=everything)}
        splits["val"] = Split(photos=val, positions=np.arange(len(val), dtype=np.uint32))
    else:
        if val_list is not None:
            held_out = _read_val_list(train, val_list)
            if copies is not None and not drop:
                _check_list(val_list, train, held_out, copied["train"])
            if groups is not None:
                _refuse_divided(str(val_list), train, groups["train"][~held_out], groups["train"][held_out])
        elif groups is not None:
            held_out = _hold_out_groups(train, _together(copied.get("train"), groups["train"]), val_frac, seed)
        else:
            held_out = _draw_held_out(train, val_frac, seed, copied.get("train"))
        splits = {
            "train": Split(photos=train, positions=everything[~held_out]),
            "val": Split(photos=train, positions=everything[held_out]),
        }
    if drop:
        splits = _without_copies(splits, copied)
    for name, split in splits.items():
        if not len(split):
            why = "" if groups is None else ", since the photos of a group stay together"
            raise ResoluteError(
                f"{train.root}: no image left for {name}, got {len(splits['train'])} for train and "
                f"{len(splits['val'])} for val{why}, expected at least one for both; add images or change "
                "what is held out"
            )
    return splits


def extend_splits(
    train: Photos,
    comparison: Comparison,
    *,
    generation: int,
    val: Photos | None = None,
    val_list: Path | None = None,
    val_frac: float = 0.1,
    seed: int = 0,
    copies: ExactCopies | None = None,
    drop: bool = False,
    groups: Mapping[str, NDArray[np.int64]] | None = None,
) -> dict[str, Split]:
    """{name: split} of the photos that a new generation adds; a split may be empty.

    As `make_splits`, for the photos that `comparison` does not know: those of `val`, those that `val_list` names, or as
    many of each class (of all, if targets are not classes) as its share of validation photos, the older ones included,
    needs to be `val_frac`. A photo that comes back, or in a new version, joins the split that it was in. So does a copy
    of a photo of the set; with `drop` it is left out. A photo of a group joins the split in which photos of the group
    are or have been.

    Raises `ResoluteError` if `val_list` names a photo that is or was in train, or lacks one of val, and if photos of a
    group would be in both splits.
    """
    new = ~comparison.known["train"]
    positions = np.arange(len(train), dtype=np.uint32)
    copied = {} if copies is None else copies.groups
    known_copies = [own[comparison.known[name]] for name, own in copied.items()]
    settled = np.concatenate(known_copies) if drop and known_copies else None
    if val is not None:
        if copies is not None and not drop:
            check_not_across(val.root, val, copied["train"], copied["val"])
        if groups is not None:
            old = settled_groups(comparison)
            in_train, in_val = (np.append(groups[name], old[name]) for name in ("train", "val"))
            _refuse_divided(val.root, train, in_train, in_val)
        new_val = np.flatnonzero(~comparison.known["val"]).astype(np.uint32)
        splits = {"train": Split(photos=train, positions=positions[new]), "val": Split(photos=val, positions=new_val)}
        return splits if settled is None else _without_copies(splits, copied, settled)
    if "val" not in comparison.splits:
        splits = {"train": Split(photos=train, positions=positions[new])}
        return splits if settled is None else _without_copies(splits, copied, settled)
    before = comparison.split_of["train"]
    was_train = before == 1 + comparison.splits.index("train")
    was_val = before == 1 + comparison.splits.index("val")
    if val_list is not None:
        held_out = _read_val_list(train, val_list, gone=comparison.gone)
        _check_same_split(train, val_list, held_out & was_train, "names", "photos that are in train")
        _check_same_split(train, val_list, was_val & ~held_out, "lacks", "photos that are in val")
        if copies is not None and not drop:
            _check_list(val_list, train, held_out, copied["train"])
        if groups is not None:
            old, own = settled_groups(comparison), groups["train"]
            in_train, in_val = np.append(own[~held_out], old["train"]), own[held_out]
            _refuse_divided(str(val_list), train, in_train, np.append(in_val, old["val"]))
    elif groups is not None:
        held_out = _hold_out_new_groups(train, comparison, copied.get("train"), groups["train"], val_frac, seed)
    else:
        held_out = was_val.copy()
        is_free = new & (before == 0)
        first = leaders(copied["train"], known=before > 0) if copies is not None else positions
        held_out[is_free] = was_val[first[is_free]]
        free = positions[is_free & (first == positions)]
        is_class = train.target.kind == "class"  # else all photos are one stratum
        strata = train.labels if is_class else np.zeros(len(train), np.uint32)
        names = train.classes if is_class else ("",)
        labels = strata[free]
        order = np.argsort(labels, kind="stable")
        present, starts, counts = np.unique(labels[order], return_index=True, return_counts=True)
        in_train, in_val = (comparison.class_counts(split, len(names)) for split in ("train", "val"))
        in_train += np.bincount(strata[new & was_train], minlength=len(in_train))
        in_val += np.bincount(strata[new & was_val], minlength=len(in_val))
        for label, start, count in zip(present.tolist(), starts.tolist(), counts.tolist(), strict=True):
            total = int(in_train[label] + in_val[label]) + count
            held_count = min(count, max(0, _held_out_count(total, val_frac) - int(in_val[label])))
            key = stream_key(seed, _HELD_OUT, zlib.crc32(os.fsencode(names[label])), generation)
            chosen = permute(key, np.arange(held_count, dtype=np.int64), count)
            held_out[free[order[start + chosen]]] = True
        held_out[is_free] = held_out[first[is_free]]
    splits = {
        "train": Split(photos=train, positions=positions[new & ~held_out]),
        "val": Split(photos=train, positions=positions[new & held_out]),
    }
    return splits if settled is None else _without_copies(splits, copied, settled)


def _without_copies(
    splits: Mapping[str, Split], groups: Mapping[str, NDArray[np.int64]], settled: NDArray[np.int64] | None = None
) -> dict[str, Split]:
    """The splits with one image of each group, that in val if there is one, and none of the groups `settled`."""
    seen = np.empty(0, np.int64) if settled is None else settled
    kept = {}
    for name in sorted(splits, reverse=True):  # val first
        split = splits[name]
        own = groups[name if name in groups else "train"][split.positions] if groups else np.full(len(split), -1)
        is_first = np.zeros(len(own), np.bool_)
        is_first[np.unique(own, return_index=True)[1]] = True
        kept[name] = Split(photos=split.photos, positions=split.positions[(own < 0) | (is_first & ~np.isin(own, seen))])
        seen = np.concatenate([seen, own])
    return {name: kept[name] for name in splits}


def _check_list(val_list: Path, photos: Photos, held_out: NDArray[np.bool_], groups: NDArray[np.int64]) -> None:
    """Raise `ResoluteError` if the list puts copies into both splits."""
    check_not_across(str(val_list), photos, groups[~held_out], np.where(held_out, groups, -1))


def _check_same_split(photos: Photos, val_list: Path, wrong: NDArray[np.bool_], verb: str, what: str) -> None:
    """Raise `ResoluteError` if the list moves photos, which are `wrong`, to the other split."""
    if wrong.any():
        first = photos.name(int(np.flatnonzero(wrong)[0]))
        raise ResoluteError(
            f"{val_list}: {verb} {what}, got {int(wrong.sum())} such as {first}, expected each photo of the set in the "
            "split that it is in; correct the list, or start over with REBUILD=1 (--rebuild)"
        )


def _held_out_count(total: int, val_frac: float) -> int:
    """The number of validation images of a class with `total` images."""
    return min(total - 1, max(1, round(total * val_frac)))


def _read_val_list(
    photos: Photos, val_list: Path, *, gone: Callable[[Iterable[str]], Collection[str]] = lambda names: ()
) -> NDArray[np.bool_]:
    """(N,) bool: the images that the list names; those that are `gone` may be missing.

    Raises `ResoluteError` if the list or another image is missing.
    """
    try:
        with val_list.open(encoding="utf-8-sig", errors="surrogateescape") as lines:
            written = [line.rstrip("\n") for line in lines if line.strip()]
    except OSError as error:
        raise ResoluteError(
            f"{val_list}: cannot be read, got {error.strerror}, expected a file with one path per "
            "line; correct VAL_LIST"
        ) from None
    tidy = [str(PurePosixPath(line.strip())) for line in written]
    # why also as written: a name may start or end with a space
    found = np.where((positions := photos.find(tidy)) >= 0, positions, photos.find(written))
    absent = np.flatnonzero(found < 0).tolist()
    index = NameIndex(photos.all_names() if absent else (), photos.root, str(val_list))
    others = [_other_form(index, tidy[i], val_list) for i in absent]
    found[absent] = photos.find([name or "" for name in others])
    _check_different(val_list, written, found)
    absent = np.flatnonzero(found < 0).tolist()
    expected = {*gone(name for i in absent for name in (tidy[i], written[i]))}
    missing = [tidy[i] for i in absent if not {tidy[i], written[i]} & expected]
    if missing:
        listed = len(np.unique(found[found >= 0]))
        near = next(filter(None, map(index.closest, missing[:20])), (photos.name(0), ()))
        raise ResoluteError(
            f"{val_list}: {len(set(missing))} of {listed + len(set(missing))} paths are not images of {photos.root}, "
            f"got {missing[0]!a}, expected paths such as {near[0]!a}"
            f"{f' (difference: {near[1][0]})' if near[1] else ''}; correct the list"
        )
    held_out = np.zeros(len(photos), np.bool_)
    held_out[found[found >= 0]] = True
    return held_out


def _other_form(index: NameIndex, written: str, val_list: Path) -> str | None:
    """The photo that `written` names in another form than its path: without suffix, by its own name, or in a form that
    differs as in `NameIndex.same_form`."""
    try:
        return index.find(written) or index.same_form(written)
    except AmbiguousName:
        raise ResoluteError(
            f"{val_list}: got {written}, which names several photos, expected a unique name; write their paths"
        ) from None


def _check_different(val_list: Path, written: Sequence[str], found: NDArray[np.int64]) -> None:
    """Raise `ResoluteError` if different names in a list mean the same photo."""
    names: dict[int, str] = {}
    for name, position in zip(written, found.tolist(), strict=True):
        if position >= 0 and names.setdefault(position, name.strip()) != name.strip():
            raise ResoluteError(
                f"{val_list}: two names of one photo, got {names[position]!a} and {name.strip()!a}, expected each "
                "photo once; remove one"
            )


def _draw_held_out(photos: Photos, val_frac: float, seed: int, groups: NDArray[np.int64] | None) -> NDArray[np.bool_]:
    """(N,) bool: a seeded fraction of every class: at least one image if it has two, and never all.

    Copies, which are in one of the `groups`, are held out with the first of them, and do not count.
    """
    strata = photos.strata()
    counts = _counts(strata, len(photos.classes) + 1)
    first = None if groups is None or groups.max(initial=-1) < 0 else leaders(groups)
    if first is not None:
        strata = np.where(first == np.arange(len(first)), strata, len(counts)).astype(np.uint32)
        counts = _counts(strata, len(counts) + 1)
    by_rank = np.zeros(len(photos), np.bool_)
    for start, total, name in _classes(photos, counts[: len(photos.classes) + 1]):
        held_count = _held_out_count(total, val_frac)
        # why by name: adding or removing a class does not change the split of the others
        key = stream_key(seed, _HELD_OUT, zlib.crc32(name))
        by_rank[start + permute(key, np.arange(held_count, dtype=np.int64), total)] = True
    held_out = _to_photos_order(strata, counts, by_rank)
    return held_out if first is None else held_out[first]


def _together(copies: NDArray[np.int64] | None, groups: NDArray[np.int64]) -> NDArray[np.int64]:
    """(N,) int64: the number of all photos that stay together, as copies or by their groups; -1: a photo alone."""
    return components(groups + 1, *([] if copies is None else [copies + 1]))


def _hold_out_groups(photos: Photos, groups: NDArray[np.int64], val_frac: float, seed: int) -> NDArray[np.bool_]:
    """(N,) bool: `val_frac` of every class, in whole `groups`: if these allow, at least one photo, and never all."""
    strata = photos.strata()
    ties = photos.ties(seed)
    held_out = deal(strata, groups, [1 - val_frac, val_frac], ties) == 1
    sizes = np.bincount(groups[groups >= 0], minlength=1)
    size = np.where(groups >= 0, sizes[groups], 1)
    by_group, by_class = np.argsort(groups, kind="stable"), np.argsort(strata, kind="stable")
    sorted_groups, sorted_strata = groups[by_group], strata[by_class]

    def members(order: NDArray[np.intp], numbers: NDArray[Any], number: int) -> NDArray[np.intp]:
        return order[np.searchsorted(numbers, number) : np.searchsorted(numbers, number, side="right")]

    for wanted in (True, False):  # a class without a photo in val, then one without any in train
        counts = np.bincount(strata[held_out != wanted], minlength=int(strata.max(initial=0)) + 1)
        for label in np.setdiff1d(strata, strata[held_out == wanted]).tolist():
            own = members(by_class, sorted_strata, label)
            if (held_out[own] == wanted).any():  # by the group of another class
                continue
            for at in own[np.lexsort((ties[own], size[own]))].tolist():
                group = int(groups[at])
                moved = np.array([at]) if group < 0 else members(by_group, sorted_groups, group)
                taken = np.bincount(strata[moved[held_out[moved] != wanted]], minlength=len(counts))
                if (counts > taken)[strata[moved]].all():  # every class keeps a photo on the other side
                    held_out[moved] = wanted
                    counts -= taken
                    break
    return held_out


def _hold_out_new_groups(
    photos: Photos,
    comparison: Comparison,
    copies: NDArray[np.int64] | None,
    groups: NDArray[np.int64],
    val_frac: float,
    seed: int,
) -> NDArray[np.bool_]:
    """(N,) bool: the photos of val, old ones and new ones; a group with older photos is where these are."""
    before = comparison.split_of["train"]
    was = {split: before == 1 + comparison.splits.index(split) for split in ("train", "val")}
    settled = settled_groups(comparison)
    members = {split: np.append(groups[was[split]], settled[split]) for split in ("train", "val")}
    _refuse_divided(photos.root, photos, members["train"], members["val"])
    together = _together(copies, groups)
    own = np.where(together >= 0, together, together.max(initial=-1) + 1 + np.arange(len(together)))
    side = np.zeros(own.max(initial=0) + 1, np.int8)
    for number, split in enumerate(("train", "val"), 1):
        side[own[was[split] | ((groups >= 0) & np.isin(groups, settled[split]))]] = number
    held_out = np.where(before > 0, was["val"], side[own] == 2)
    is_open = ~comparison.known["train"] & (before == 0) & (side[own] == 0)
    if is_open.any():
        is_class = photos.target.kind == "class"
        strata = photos.labels if is_class else np.zeros(len(photos), np.uint32)
        classes = len(photos.classes) if is_class else 1
        held = np.stack([comparison.class_counts(split, classes) for split in ("train", "val")])
        new = ~comparison.known["train"] & ~is_open
        for number, chosen in enumerate((new & ~held_out, new & held_out)):
            held[number] += np.bincount(strata[chosen], minlength=classes)
        parts = deal(
            strata[is_open], together[is_open], [1 - val_frac, val_frac], photos.ties(seed)[is_open], held=held
        )
        held_out[is_open] = parts == 1
    return held_out


def _refuse_divided(where: str, photos: Photos, train: NDArray[np.int64], val: NDArray[np.int64]) -> None:
    """Raise `ResoluteError` if groups, by their numbers, are in both splits."""
    shared = np.intersect1d(train[train >= 0], val)
    if len(shared):
        name = group_name(photos.database, int(shared[0]))
        raise ResoluteError(
            f"{where}: divides groups, got {len(shared)} with photos in train and in val, such as {name!a}, expected "
            "each on one side; correct it, or leave GROUP out: a run then reports its accuracy also without the "
            "photos that have a near copy in train"
        )


def _counts(strata: NDArray[np.uint32], groups: int) -> NDArray[np.int64]:
    """(groups,) number of images of each group."""
    counts = np.zeros(groups, np.int64)
    for first in range(0, len(strata), _CHUNK):
        counts += np.bincount(strata[first : first + _CHUNK], minlength=len(counts))
    return counts


def _classes(photos: Photos, counts: NDArray[np.int64]) -> Iterator[tuple[int, int, bytes]]:
    """Yield (images of all groups before it, images, name) of every non-empty group: classes, and one without name."""
    starts = np.cumsum(counts) - counts
    for group in np.flatnonzero(counts).tolist():
        name = photos.classes[group] if group < len(photos.classes) else ""
        yield int(starts[group]), int(counts[group]), os.fsencode(name)


def _to_photos_order(
    strata: NDArray[np.uint32], counts: NDArray[np.int64], by_rank: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Reorder values that are laid out class by class, each in order of names, to the photos's order."""
    next_rank = np.cumsum(counts) - counts  # index of the value of each class's next image
    out = np.empty_like(by_rank)
    for first in range(0, len(strata), _CHUNK):
        labels = strata[first : first + _CHUNK]
        order = np.argsort(labels, kind="stable")
        grouped = labels[order]
        present, begins, sizes = np.unique(grouped, return_index=True, return_counts=True)
        ranks = np.arange(len(labels)) + np.repeat(next_rank[present] - begins, sizes)
        out[first + order] = by_rank[ranks]
        next_rank[present] += sizes
    return out
