"""Judges the labels of the training part before anything is converted: what is probably not meant is a question.

CLASSES, which lists the classes, and TARGET answer these questions.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from resolute.console import counted
from resolute.errors import ResoluteError

__all__ = ["LabelledBy", "alike", "refuse_doubtful_labels"]

_MANY_CLASSES = 8  # fewer single photos are no reason to doubt that they are classes
_MANY_CAPTIONS = 4
_GAPS = 20  # class numbers without a photo, besides two for each that has some, that are no reason to ask
_SHOWN = 3
_WORDS_OF_A_CAPTION = 4  # on average
_NUMBER = re.compile(r"0*(\d+?)(\.0*)?")
LabelledBy = Literal["folders", "samples", "table"]
_OTHER_LABELS = {
    "folders": "set LABELS to a table of their classes",
    "samples": "write the classes into .cls or .json files of the samples",
    "table": "name the column of classes with COLUMNS=image,label, or the table with LABELS",
}
_INVISIBLE = re.compile("[\u200b-\u200f\u2060\ufeff\u00ad]")
_ASCII = {0x2018: "'", 0x2019: "'", 0x02BC: "'", 0x201C: '"', 0x201D: '"', 0x2212: "-"} | dict.fromkeys(
    range(0x2010, 0x2016), "-"
)


def alike(name: str) -> str:
    """A form of a class name that is the same for names that differ only by blanks, hyphens, underscores, case or
    Unicode form, and for a number that is written as 1, 01 or 1.0."""
    name = _INVISIBLE.sub("", unicodedata.normalize("NFKC", name)).translate(_ASCII).casefold()
    if number := _NUMBER.fullmatch(name.strip()):
        return number[1]
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
    labelled_by: LabelledBy,
    is_chosen: bool,
    known: Collection[str] = (),
) -> None:
    """Raise `ResoluteError` with a question if labels are probably not the classes that are meant.

    `counts` (C,) are the photos of each class; `kind` is "class" or "labels"; `numbered`: the labels are class numbers;
    `labelled_by` says where they are; `is_chosen`: TARGET says the kind. Classes that are `known` from a set that
    exists are not doubted.
    """
    if kind == "class" and not is_chosen and not known:
        _refuse_single(where, classes, counts, numbered=numbered, labelled_by=labelled_by)
    if not numbered:
        _refuse_similar(where, classes, counts, known)
    elif not known:
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
            " and ".join(f"{classes[number]!a} ({counted(int(counts[number]), 'photo')})" for number in group)
            for group in similar[:_SHOWN]
        ]
        rest = f" and {len(similar) - _SHOWN} more" if len(similar) > _SHOWN else ""
        raise ResoluteError(
            f"{where}: class names that differ only in form (blanks, hyphens, case, zeros, Unicode), got "
            f"{'; '.join(pairs)}{rest}, expected one name for a class; merge them, or list all classes in a file, one "
            "per line, with CLASSES=classes.txt if they are different"
        )


def _refuse_gaps(where: str, classes: Sequence[str], counts: NDArray[np.int64]) -> None:
    used = int((counts > 0).sum())
    if len(classes) >= 3 * used + _GAPS:
        first = [classes[number] for number in np.flatnonzero(counts)[: _SHOWN - 1].tolist()]
        raise ResoluteError(
            f"{where}: class numbers with large gaps, got {used} different ones such as "
            f"{', '.join(first)} and {classes[-1]}, which would make {len(classes)} "
            "classes, expected numbers from 0 without gaps; name those that are used with CLASSES=names.json, such as "
            f'{{"{first[0]}": "…", …, "{classes[-1]}": "…"}}'
        )


def _refuse_single(
    where: str, classes: Sequence[str], counts: NDArray[np.int64], *, numbered: bool, labelled_by: LabelledBy
) -> None:
    """Refuse nearly a class per photo."""
    used, single, photos = int((counts > 0).sum()), int((counts == 1).sum()), int(counts.sum())
    if 2 * single <= used:
        return
    names = [classes[number] for number in np.flatnonzero(counts == 1).tolist()]
    are_captions = sum(len(name.split()) for name in names) >= _WORDS_OF_A_CAPTION * single
    if used < (_MANY_CAPTIONS if are_captions else _MANY_CLASSES):
        return
    shown = ", ".join(repr(name[:60]) for name in names[:_SHOWN])
    values = ""
    if numbered:
        looks, values = "numbers to predict", "TARGET=values (--target values) to predict the numbers, or with "
    elif labelled_by == "folders":
        looks = "a folder for each photo or patient"
    elif are_captions:
        looks = "captions"
    else:
        looks = "names or numbers of the photos"
    raise ResoluteError(
        f"{where}: nearly a class per photo, got {used} different labels for {photos} photos, {single} of them once, "
        f"such as {shown}, expected several photos of most classes; if these are no classes but {looks}, "
        f"{_OTHER_LABELS[labelled_by]}; else run the command again with {values}TARGET=class (--target class)"
    )
