"""What the names of folders, tables and photos say: splits, parts, masks or versions of photos, class numbers."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from math import gcd

__all__ = [
    "are_counted",
    "are_versions",
    "holds_photos_only",
    "is_never_a_class",
    "is_table",
    "label_tables",
    "mask_words",
    "masks_and_photos",
    "numbered_parts",
    "split_kind",
    "splits_of",
    "without_mask_suffix",
]

_WORDS = re.compile(r"[^\W\d_]+|\d+")
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def _set(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _words(name: str) -> list[str]:
    """The words and numbers of a name, in lower case: `trainImages_2` gives train, images, 2."""
    return _WORDS.findall(_CAMEL.sub(" ", name).lower())


# ---- splits

_SPLITS = {
    **dict.fromkeys(("train", "training", "trainval"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "validate", "dev", "hold", "holdout", "heldout", "eval"), "val"),
    **dict.fromkeys(("evaluation", "test", "testing", "pred"), "test"),
    **dict.fromkeys(("unlabeled", "unlabelled", "unsupervised", "extra"), "without labels"),
}
_NEVER_CLASSES = _set("val validation test testing holdout unlabeled unlabelled")
# why three more characters: "trains" and "tester" are words of their own
_GLUED = re.compile(
    "(?P<first>training|train|validation|valid|val|testing|test)(?P<after>[a-z]{3,})|"
    "(?P<before>[a-z]{3,})(?P<last>training|train|validation|valid|val|testing|test)"
)
_SAY_NOTHING = _set(
    "image images img imgs photo photos picture pictures pics data dataset datasets set sets folder dir files jpg jpeg "
    "png full small large raw final new stage stg split part subset crops cropped resized clean original out the of"
)


def split_kind(name: str) -> tuple[str, tuple[str, ...]]:
    """(kind of split that a folder's name says, its other words that mean something); the kind is "" if it says none.

    `cars_train2017` gives train and (cars).
    """
    words = _words(name)
    kind = next((_SPLITS[word] for word in words if word in _SPLITS), "")
    if not kind and (match := _GLUED.fullmatch("".join(word for word in words if not word.isdigit()))):
        return _SPLITS[match["first"] or match["last"]], (match["after"] or match["before"],)
    rest = (word for word in words if word not in _SPLITS and word not in _SAY_NOTHING and not word.isdigit())
    return kind, tuple(rest)


def is_never_a_class(name: str) -> bool:
    """Whether a name says no more than a split that is nothing to be seen, as `test_images`; `train` may be a class."""
    words = [word for word in _words(name) if word not in _SAY_NOTHING and not word.isdigit()]
    return bool(words) and _NEVER_CLASSES.issuperset(words)


def splits_of(names: Iterable[str]) -> dict[str, str]:
    """{name: kind of split} of the names that differ in their split alone, as cars_train and cars_test; else {}.

    The classes `Express train` and `test tube` are no splits, nor is a single class `train`.
    """
    groups: dict[tuple[str, ...], dict[str, str]] = {}
    for name in names:
        kind, rest = split_kind(name)
        if kind:
            groups.setdefault(rest, {})[name] = kind
    splits = [group for group in groups.values() if len(set(group.values())) > 1]
    return {name: kind for group in splits for name, kind in group.items()}


# ---- parts

# With such a word and a number, folders hold a part of the photos each.
_PARTS = _set(
    "part parts pt batch fold folds images image imgs img photos photo pictures pics set sets subset session chunk "
    "shard group folder dir directory volume vol disk disc cd dvd split section block camera cam day run take trip "
    "half upload download backup archive dataset data files collection"
)
# With such a word and a number, they are classes; n is for ImageNet's n01440764, c for c0 to c9.
_CLASS_WORDS = _set(
    "c n cat class classes cls label lbl category type kind grade stage level degree score rank severity species breed "
    "id identity person people actor face digit number num letter char character sign gesture emotion action style "
    "model defect fault topic cluster object obj item product sku color colour tier rating star stars finger fingers "
    "age year years birads kl euro euros cent cents dollar dollars rupee rupees pound pounds yen won peso pesos usd "
    "eur inr"
)
_NUMBER_WORDS = _set(
    "i ii iii iv v vi vii viii ix x one two three four five six seven eight nine ten first second third fourth fifth"
)
_MONTH, _DAY = "(0[1-9]|1[0-2])", r"(0[1-9]|[12]\d|3[01])"
_DATE = re.compile(rf"(19|20)\d\d({_MONTH}{_DAY}|[-_. ]{_MONTH}([-_. ]{_DAY})?)")


def numbered_parts(names: Collection[str]) -> list[str]:
    """The names that differ only in a number and need not be classes; [] if there are none.

    These are all names, or at least half of them if they say that they are parts (`part-a`, `images_001`). Numbers
    alone, unless they are dates, are class numbers, as are numbers with a word such as `class` or `grade`.
    """
    forms: dict[tuple[str, ...], list[str]] = {}
    parts: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        words = _words(name)
        forms.setdefault(tuple("#" if word.isdigit() else word for word in words), []).append(name)
        if not _PARTS.isdisjoint(words):
            text = [word for word in words if not word.isdigit() and len(word) > 1 and word not in _NUMBER_WORDS]
            parts.setdefault(tuple(text), []).append(name)
    for alike in parts.values():
        if len(alike) > 1 and 2 * len(alike) >= len(names):
            return alike
    (form, alike), *others = forms.items()
    letters = [word for word in form if word != "#"]
    if others or "#" not in form or not _CLASS_WORDS.isdisjoint(letters):
        return []
    return alike if letters or all(map(_DATE.fullmatch, names)) else []


# ---- masks and versions of photos

_CONTAINERS = _set("jpeg jpg png images imgs data dataset datasets")
_HOLD_PHOTOS = _CONTAINERS | _set("image img photo photos picture pictures pics frame frames original raw input rgb")
_MASKS = _set(
    "masks annotations annotation gt groundtruth truth segmentation segmentations segmented trimaps trimap labels"
)
_MAYBE_MASKS = _MASKS | _set(
    "target targets mask label seg depth edges bbox boxes heatmap heatmaps contours overlay overlays"
)
_MASK_SUFFIX = re.compile(
    r"[-_ .]?(masks?|gt|seg|segmentation|segmented|labels?|annotation|trimap|aug|augmented)$", re.IGNORECASE
)
_VERSIONS = _HOLD_PHOTOS | _set(
    "originals augmented augmentation augmentations color colour grayscale greyscale gray grey segmented cropped "
    "resized thumbnails thumbs processed preprocessed hr lr highres lowres depth infrared ir nir denoised enhanced "
    "blurred flipped rotated normalized"
)


def masks_and_photos(names: Iterable[str]) -> tuple[str, str] | None:
    """(a folder of masks or annotations, the folder of their photos), if names alone say so: images, images_masks.

    The classes `mask` and `no mask` are none.
    """
    words = {name: _words(name) for name in names}
    for masks, own in words.items():
        rest = [word for word in own if word not in _MAYBE_MASKS]
        if len(rest) == len(own):
            continue
        for photos, theirs in words.items():
            if not _MAYBE_MASKS.isdisjoint(theirs):
                continue
            hold_photos = all(word in _HOLD_PHOTOS or word in _SPLITS for word in theirs)
            is_same = rest == theirs and not _MASKS.isdisjoint(own)
            if is_same or (hold_photos and all(word in theirs or word in _SAY_NOTHING for word in rest)):
                return masks, photos
    return None


def mask_words(name: str) -> frozenset[str]:
    """The words of a folder's name that may mean masks or annotations."""
    return _MAYBE_MASKS.intersection(_words(name))


def without_mask_suffix(stem: str) -> str:
    """The name of the photo that a file belongs to: `a_mask` gives `a`."""
    return _MASK_SUFFIX.sub("", stem)


def holds_photos_only(name: str) -> bool:
    """Whether a folder's name says no more than that it holds photos: images, JPEGImages, data."""
    words = _words(name)
    return bool(words) and _CONTAINERS.issuperset(words)


def are_versions(names: Iterable[str]) -> bool:
    """Whether all folders are named as versions of the same photos: original and augmented, color and grayscale."""
    words = [_words(name) for name in names]
    return all(each and _VERSIONS.issuperset(each) for each in words)


def are_counted(stems: Iterable[str], share: float) -> bool:
    """Whether most names of photos are a text with a counter, which photos of different things may share.

    A text alone is no counter, and numbers with large gaps are none. `stems` are the random part `share` (0..1) of all.
    """
    forms: dict[str, list[tuple[int, ...]]] = {}
    for stem in stems:
        numbers = tuple(int(digits[:18]) for digits in re.findall(r"\d+", stem))
        forms.setdefault(re.sub(r"\d+", "#", stem), []).append(numbers)
    counted = sum(
        len(rows)
        for form, rows in forms.items()
        if not any(_has_gaps(column, share) for column in zip(*rows, strict=True)) and (rows[0] or len(form) < 3)
    )
    return 2 * counted >= sum(map(len, forms.values()))


def _has_gaps(numbers: Sequence[int], share: float) -> bool:
    different = sorted(set(numbers))
    outliers = -(-len(different) // 20) if len(different) > 4 else 0
    different = different[outliers : len(different) - outliers]
    step = gcd(*(after - before for before, after in pairwise(different))) or 1
    return (different[-1] - different[0]) // step + 1 > 4 * len(different) / share


# ---- tables

_TABLES = (".csv", ".tsv", ".parquet", ".jsonl", ".ndjson")
_TEXTS = (".txt", ".lst", ".json")  # may as well hold anything else
_LABEL_WORDS = _set(
    "label labels labeled labelled annotation annotations annot metadata meta train training val validation test "
    "target targets truth gt groundtruth diagnosis solution attributes entry index list ids images photos data dataset "
    "info instances"
)
_OTHER_TABLES = _set("classes class names categories wnids words synsets readme sample submission requirements license")


def is_table(name: str) -> bool:
    return name.lower().endswith(_TABLES + _TEXTS)


def label_tables(names: Iterable[str], *, flat: bool, unlabelled: str) -> list[str]:
    """Those of the tables `names` whose names suggest labels of photos, the likeliest first.

    `flat`: there are photos without class folders, for which more names suggest labels. A table of the split
    `unlabelled` ("test") comes into question only if there is no other.
    """
    found = []
    for name in names:
        words = set(_words(name.rpartition("/")[2].rpartition(".")[0]))
        if _LABEL_WORDS.isdisjoint(words) or not _OTHER_TABLES.isdisjoint(words):
            continue
        is_text = name.lower().endswith(_TEXTS)
        # why two words: labels.txt beside class folders often lists the classes
        is_sure = words & {"annotation", "annotations", "instances"} or (words & {"label", "labels"} and len(words) > 1)
        if is_text and not is_sure and not (flat and words & {"label", "labels", "train", "list"}):
            continue
        is_test = any(_SPLITS.get(word) == unlabelled for word in words)
        found.append((is_test, is_text, words.isdisjoint({"train", "training", "label", "labels"}), name))
    return [name for is_test, *_, name in sorted(found) if not is_test or all(each[0] for each in found)]
