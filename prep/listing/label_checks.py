"""Judges the labels of the training part before anything is converted: what is probably not meant is a question.

CLASSES, which lists the classes, and TARGET answer these questions.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from resolute.errors import ResoluteError

__all__ = ["alike", "refuse_doubtful_labels"]

_MANY_CLASSES = 10  # fewer are no reason to doubt that they are classes
_SHOWN = 3
_WORDS_OF_A_CAPTION = 4  # on average
_INVISIBLE = re.compile("[\u200b-\u200f\u2060\ufeff\u00ad]")


def alike(name: str) -> str:
    """A form of a class name that is the same for names that differ only by blanks, hyphens, underscores, case or
    Unicode form."""
    name = _INVISIBLE.sub("", unicodedata.normalize("NFKC", name)).casefold()
    out = "-" if re.match(r"-\d", name) else ""  # of a number
    parts = re.split(r"[\s_-]+", name)
    for part in parts:
        # why: 1-2 is not 12
        out += f" {part}" if out[-1:].isdigit() and part[:1].isdigit() else part
    return out


def refuse_doubtful_labels(
    where: str,
    classes: Sequence[str],
    counts: NDArray[np.int64],
    *,
    kind: str,
    numbered: bool,
    are_folders: bool,
    is_chosen: bool,
    known: Collection[str] = (),
) -> None:
    """Raise `ResoluteError` with a question if labels are probably not the classes that are meant.

    `counts` (C,) are the photos of each class; `kind` is "class" or "labels"; `numbered`: the labels are class numbers;
    `are_folders`: they are names of folders; `is_chosen`: TARGET says the kind. Classes that are `known` from a set
    that exists are not doubted.
    """
    if not numbered:
        _refuse_similar(where, classes, counts, known)
    if known:
        return
    if kind == "class" and not is_chosen:
        _refuse_single(where, classes, counts, numbered=numbered, are_folders=are_folders)
    if numbered:
        _refuse_gaps(where, classes, counts)


def _refuse_similar(where: str, classes: Sequence[str], counts: NDArray[np.int64], known: Collection[str]) -> None:
    groups: dict[str, list[int]] = {}
    for number, name in enumerate(classes):
        groups.setdefault(alike(name), []).append(number)
    similar = [
        group for group in groups.values() if len(group) > 1 and any(classes[number] not in known for number in group)
    ]
    if similar:
        pairs = [
            # why ascii: composed and decomposed characters look the same
            " and ".join(f"{classes[number]!a} ({counts[number]} photos)" for number in group)
            for group in similar[:_SHOWN]
        ]
        rest = f" and {len(similar) - _SHOWN} more" if len(similar) > _SHOWN else ""
        raise ResoluteError(
            f"{where}: class names that differ only by blanks, hyphens, case or Unicode form, got {'; '.join(pairs)}"
            f"{rest}, expected one name for a class; merge them, or list all classes in a file, one per line, with "
            "CLASSES=classes.txt if they are different"
        )


def _refuse_gaps(where: str, classes: Sequence[str], counts: NDArray[np.int64]) -> None:
    used = int((counts > 0).sum())
    if len(classes) >= 3 * used + 2 * _MANY_CLASSES:
        first = np.flatnonzero(counts)[: _SHOWN - 1]
        raise ResoluteError(
            f"{where}: class numbers with large gaps, got {used} different ones such as "
            f"{', '.join(classes[number] for number in first)} and {classes[-1]}, which would make {len(classes)} "
            "classes, expected numbers from 0 without gaps; write them as names, or name all classes, one per line, "
            "with CLASSES=classes.txt"
        )


def _refuse_single(
    where: str, classes: Sequence[str], counts: NDArray[np.int64], *, numbered: bool, are_folders: bool
) -> None:
    """Refuse nearly a class per photo."""
    used, single, photos = int((counts > 0).sum()), int((counts == 1).sum()), int(counts.sum())
    if used < _MANY_CLASSES or 2 * single <= used:
        return
    names = [classes[number] for number in np.flatnonzero(counts == 1)[:_SHOWN]]
    words = sum(len(name.split()) for name in names) / len(names)
    shown = ", ".join(repr(name[:60]) for name in names)
    if numbered:
        looks, values = "numbers to predict", "TARGET=values (--target values) to predict the numbers, or with "
    elif are_folders:
        looks, values = "a folder for each photo", ""
    else:
        looks, values = "captions" if words >= _WORDS_OF_A_CAPTION else "names of the photos", ""
    raise ResoluteError(
        f"{where}: nearly a class per photo, got {used} different labels for {photos} photos, {single} of them once, "
        f"such as {shown}, expected several photos of most classes; if these are no classes but {looks}, choose other "
        f"labels (LABELS, COLUMNS); else run the command again with {values}TARGET=class (--target class)"
    )
