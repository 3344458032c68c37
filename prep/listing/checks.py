"""Warnings about inputs that are valid but probably mistakes, worded for the console, the dry run and the report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resolute.console import counted
from resolute.prep.settings import Settings
from resolute.prep.sources.targets import is_number

from .inputs import Inputs
from .wording import by_count, first_names

__all__ = ["input_warnings", "size_warnings"]

# Photo formats that prep does not decode: camera raw files and formats of phones and editors.
_PHOTO_SUFFIXES = frozenset(
    {
        ".heic",
        ".heif",
        ".hif",
        ".jp2",
        ".j2k",
        ".jpf",
        ".jpx",
        ".jxl",
        ".jxr",
        ".psd",
        ".xcf",
        ".svg",
        ".ppm",
        ".pgm",
        ".tga",
        ".exr",
        ".hdr",
        ".dcm",
        ".dng",
        ".raw",
        ".cr2",
        ".cr3",
        ".crw",
        ".nef",
        ".nrw",
        ".arw",
        ".srf",
        ".sr2",
        ".orf",
        ".rw2",
        ".raf",
        ".pef",
        ".srw",
        ".x3f",
        ".rwl",
        ".iiq",
        ".3fr",
    }
)
_MAX_NAMED = 8
_ROWS = 1 << 20  # records in memory at a time


def input_warnings(settings: Settings, inputs: Inputs, *, is_extension: bool = False) -> list[str]:
    """One line for each property of the inputs that is probably a mistake.

    `is_extension`: the splits of `inputs` are not all images of the set.
    """
    return [
        *(line for photos in inputs.sources.values() for line in photos.warnings),
        *_photos_of_other_formats(inputs.ignored),
        *([] if is_extension else _empty_classes(inputs)),
        *([] if is_extension or settings.group in (None, "none") else _not_validated(inputs)),
        *_names_or_numbers(inputs),
        *([] if is_extension else _large_held_out_part(settings, inputs)),
    ]


def size_warnings(short_sides: Mapping[int, int], sources: Iterable[NDArray[Any]]) -> list[str]:
    """A warning if most photos are smaller than the stored size of a resolution. Images are never enlarged.

    `short_sides` maps resolution to stored short side, both px; `sources` are arrays of SOURCE records, read once each.
    """
    total, smaller = 0, dict.fromkeys(short_sides, 0)
    for rows in sources:
        total += len(rows)
        for first in range(0, len(rows), _ROWS):
            piece = rows[first : first + _ROWS]
            sides = np.minimum(piece["width"], piece["height"])
            for res, side in short_sides.items():
                smaller[res] += int(np.count_nonzero(sides < side))
    small = [res for res in sorted(short_sides) if 2 * smaller[res] > total]
    if not small:
        return []
    each = ", ".join(f"{100 * smaller[res] / total:.0f} % below {short_sides[res]} px for {res} px" for res in small)
    return [f"most photos are smaller than RES needs: {each}; they are stored at their own size, not enlarged"]


def _photos_of_other_formats(ignored: Mapping[str, int]) -> list[str]:
    photos = {kind: count for kind, count in ignored.items() if kind in _PHOTO_SUFFIXES and count}
    if not photos:
        return []
    return [
        f"left out, as prep does not read their format: {counted(sum(photos.values()), 'file')} "
        f"({', '.join(by_count(photos))}); convert them to JPEG or PNG if they belong to the set"
    ]


def _empty_classes(inputs: Inputs) -> list[str]:
    if inputs.target.kind == "values":
        return []
    train = inputs.splits["train"]
    counts = train.photos.class_counts(train.positions)
    empty = [inputs.classes[n] for n in np.flatnonzero(counts == 0)]
    if not empty:
        return []
    numbered = list(inputs.classes) == list(map(str, range(len(inputs.classes))))
    hint = "numeric labels should count from 0 without gaps" if numbered else "check that they are classes"
    if numbered and empty == ["0"]:
        hint = (
            f"the labels count from 1 to {inputs.classes[-1]}, so that output 0 of a model stays unused; this does no "
            'harm, and CLASSES=names.json with {"1": "…", "2": "…", …} names the classes and leaves it out'
        )
    return [f"classes without a training image: {len(empty)} of {len(inputs.classes)} ({first_names(empty)}); {hint}"]


def _not_validated(inputs: Inputs) -> list[str]:
    """Classes that have training photos, and whose groups leave none for the validation."""
    if inputs.target.kind == "values" or "val" not in inputs.splits:
        return []
    train, val = inputs.splits["train"], inputs.splits["val"]
    in_train, in_val = (split.photos.class_counts(split.positions) for split in (train, val))
    without = [inputs.classes[n] for n in np.flatnonzero((in_train > 1) & (in_val == 0))]
    if not without:
        return []
    return [
        f"classes without a validation photo: {len(without)} of {len(inputs.classes)} ({first_names(without)}), since "
        "the photos of a group stay together; their accuracy is not measured"
    ]


def _names_or_numbers(inputs: Inputs) -> list[str]:
    train, val = inputs.sources["train"], inputs.sources.get("val")
    if inputs.target.kind == "values" or train.numbered:
        return []
    warnings = []
    names = [name for name in inputs.classes if not is_number(name)]
    if 0 < 2 * len(names) < len(inputs.classes):
        warnings.append(
            f"class names are numbers but for {len(names)} of {len(inputs.classes)} ({first_names(names)}), so all "
            f"are taken as names, in the order of their text ({first_names(inputs.classes)}); correct the labels if "
            "these should be class numbers"
        )
    if val is not None and val.numbered and train.class_numbers is None and len(names) == len(inputs.classes):
        first = [f"{n} is {name}" for n, name in enumerate(inputs.classes[: _MAX_NAMED + 1])]
        warnings.append(
            "VAL has class numbers and SRC class names, so the numbers are taken to count these names in their order "
            f"({first_names(first)}); check that they do"
        )
    return warnings


def _large_held_out_part(settings: Settings, inputs: Inputs) -> list[str]:
    if "val" not in inputs.splits or settings.val_source is not None or settings.val_list is not None:
        return []
    held_out = len(inputs.splits["val"]) / inputs.images
    if held_out < 1.5 * settings.held_out_frac:
        return []
    return [
        f"{100 * held_out:.0f} % of the images are held out, not {100 * settings.held_out_frac:.3g} %: at least one "
        "per class is held out; set VAL or VAL_LIST, or VAL_FRAC=0, if that is too many"
    ]
