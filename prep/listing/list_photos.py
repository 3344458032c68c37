"""`list_photos`: writes all photos of a source to a table, with the numbers of their classes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.target import IGNORED, Target
from resolute.prep.sources.archives.containers import container_stamps
from resolute.prep.sources.image_ref import Ignored, ImageRef, Source
from resolute.prep.sources.signature import ListingHash, signature_of_files
from resolute.prep.sources.targets import describe_label, is_number
from resolute.urls import is_url, without_credentials

from .classes import MAX_CLASSES, are_listed_names, by_name, by_number
from .database import Database, objects
from .photos import NewPhotos, Photos
from .wording import describe_ignored

__all__ = ["list_photos"]

_BLOCK = 1 << 16  # photos that are inserted at once


def list_photos(
    source: Source,
    database: Database,
    table: str,
    *,
    classes: Sequence[str] | None = None,
    classes_file: str = "CLASSES",
    class_numbers: Mapping[str, int] | None = None,
    training: Photos | None = None,
    known_classes: Sequence[str] = (),
) -> Photos:
    """Write everything that `source` yields to the new table `table`.

    Class numbers are those of `classes` (the names in `classes_file`, with `class_numbers` for labels that are numbers)
    or, for a validation source, of `training`, which also decides whether labels that look like numbers are names;
    otherwise classes are numbered in order of their names' code points, or keep their numbers if the source is
    `numbered`. Either way the classes of a set that exists, `known_classes`, keep their numbers, and further ones
    follow.

    Raises `ResoluteError` for a source without images; for training, with fewer than two classes; for an unknown class
    or a number out of range; for a photo with two targets; and if the disk refuses.
    """
    labels: dict[str | Ignored, int] = {}
    listing = ListingHash()
    count, new = _insert(source, database, table, labels, listing)
    found = source.listing
    ignored = Counter(found.ignored)
    if new is None:
        ignored_text = describe_ignored(ignored)
        raise ResoluteError(
            f"{source.root}: no classes, got no image with a class (ignored: {ignored_text}), expected one folder per "
            f"class, or one label per image; point {'SRC' if training is None else 'VAL'} at the class folders' parent"
        )
    kind = found.target.kind
    if training is not None:
        classes, class_numbers = training.classes, training.class_numbers
        _check_same_target(source, training)
    names: tuple[str, ...] = ()
    numbers = np.zeros(1, np.uint32)
    numbered = found.numbered and found.label_names is None
    if kind == "values":
        target = Target(kind=kind, names=found.target.names, units=found.target.units)
    else:
        # why not the ignored ones: each is the label of a column too, and these are all there
        own = tuple(label for label in labels if isinstance(label, str))
        # why: if a training part has names such as "10", that is what 10 means, and not the class with that number
        are_names = training is not None and not training.numbered and any(map(is_number, training.classes))
        if training is None and numbered and classes is not None and class_numbers is None:
            are_names = are_listed_names(own, classes, classes_file)
            numbered = not are_names
        names, number_of = _number_classes(
            source,
            own,
            classes,
            classes_file,
            class_numbers,
            training,
            known_classes,
            are_names=are_names,
        )
        target = Target(kind=kind, names=names, ignored=found.target.ignored)
        numbers = np.array(
            [number_of[n] if isinstance(n, str) else number_of[n.label] + IGNORED for n in labels], np.uint32
        )
    if training is None and kind == "class" and len(labels) < 2:
        raise ResoluteError(
            f"{source.root}: too few classes, got one class ({names[int(numbers[0])]}), expected at least two; point "
            "SRC at the folder that holds the class folders"
        )
    repeated, conflicting = new.finish(numbers)
    if conflicting is not None:
        raise _two_targets(source, conflicting)
    if repeated:
        ignored["duplicate names"] += repeated
    photos = Photos(
        database=database,
        table=table,
        root=source.root,
        count=count - repeated,
        classes=names,
        ignored=dict(ignored),
        listed=found.listed,
        target=target,
        about=found.target.about,
        warnings=found.target.warnings,
        numbered=numbered,
        columns=found.target.classes,
        class_numbers=class_numbers,
        signature=signature_of_files(source.files, found.stamps) if found.stamps else listing.signature(),
    )
    # why zip without strict: most sources have no stamps
    listed = dict(zip(source.files, found.stamps, strict=False))
    return replace(photos, stamps=container_stamps(photos.containers, listed))


def _insert(
    source: Source, database: Database, table: str, labels: dict[str | Ignored, int], listing: ListingHash
) -> tuple[int, NewPhotos | None]:
    """Insert the photos in the order of the source, and add them to `listing`; returns their number, and their table if
    there are any.

    Labels are numbered in order of first appearance, in the caller's table `labels`.
    """
    count, images, kind, photos = 0, iter(source), "", None
    with database.transaction():
        while block := list(islice(images, _BLOCK)):
            if photos is None:  # why here: the source knows its targets when it has yielded the first image
                kind = source.listing.target.kind
                labels.update({name: n for n, name in enumerate(source.listing.target.classes)})
                photos = NewPhotos(database, table, kind)
            fields = list(zip(*block, strict=True))
            photos.add(_columns(source, fields, kind, labels, count))
            listing.add(fields)
            count += len(block)
    return count, photos


def _columns(
    source: Source, fields: Sequence[Sequence[Any]], kind: str, labels: dict[str | Ignored, int], first: int
) -> dict[str, NDArray[Any]]:
    """The columns for `NewPhotos.add` of the fields of a block of images, after the `first` images."""
    texts, own_labels, sizes, containers, offsets, stored_as, file_sizes, lines = fields
    paths: list[bytes | None] = [os.fsencode(container) if container else None for container in containers]
    names = os.fsencode("\0".join(texts)).split(b"\0")  # why at once: it is five times as fast
    pairs = zip(texts, containers, strict=True)
    absolute = np.array([not within and (name[:1] == "/" or is_url(name)) for name, within in pairs], np.bool_)
    for i in np.flatnonzero(absolute).tolist():
        name = texts[i]
        if "@" in name or "=" in name:  # it may hold credentials
            shown = os.fsencode(without_credentials(name))
            if shown != names[i]:
                names[i], paths[i] = shown, names[i]
    targets: NDArray[Any]
    if kind == "class":
        for label in dict.fromkeys(own_labels):
            labels.setdefault(label, len(labels))
        targets = np.fromiter(map(labels.__getitem__, own_labels), np.uint32, len(texts))
    elif kind == "labels":
        numbers = ([labels.setdefault(each, len(labels)) for each in label] for label in own_labels)
        targets = objects(str(sorted(set(row))) for row in numbers)
    else:  # why text: DuckDB takes the type of a column of lists from the first rows, which may be empty
        targets = objects(str(np.asarray(label, "<f4").tolist()) for label in own_labels)
    if len(labels) > MAX_CLASSES:
        raise ResoluteError(
            f"{source.root}: too many classes, got more than {MAX_CLASSES} different labels such as "
            f"{list(labels)[-1][:80]!r}, expected class names; name the column or file that holds them"
        )
    nbytes = np.array(sizes, np.uint64)
    of_files = np.array(file_sizes, np.int64)
    return {
        "place": np.arange(first, first + len(texts), dtype=np.uint64),
        "name": objects(names),
        "path": objects(paths),
        "absolute": absolute,
        "offset": np.array(offsets, np.int64),
        "nbytes": nbytes,
        "stored_as": np.array(stored_as, np.uint8),
        "size_bytes": np.where(of_files < 0, nbytes, of_files.astype(np.uint64)),
        "target": targets,
        "line": np.array(lines, np.uint32),
    }


def _two_targets(source: Source, name: str) -> ResoluteError:
    """The error for an image with two different targets, which are looked up in the source again."""
    images = [image for image in source if image.name == name]
    first = images[0]
    conflicting = next(image for image in images if image.label != first.label)
    target = source.listing.target
    texts = []
    for image in (first, conflicting):
        text = repr(describe_label(image.label, target.names, target.units))
        texts.append(f"{text} in line {image.line}" if image.line else text)
    what = "belongs to two classes" if target.kind == "class" else "has two targets"
    return ResoluteError(
        f"{name}: {what}, got {' and '.join(texts)}, expected one row per image with all of its labels; correct them"
    )


def _check_same_target(source: Source, training: Photos) -> None:
    """Raise `ResoluteError` unless the targets of a validation source are of the kind and names of `training`."""
    own, target = source.listing.target, training.target
    if own.kind != target.kind:
        raise ResoluteError(
            f"{source.root}: targets of another kind, got {own.kind}, expected {target.kind} as in {training.root}; "
            "correct VAL, or set TARGET"
        )
    expected, got = set(training.columns), set(own.classes or own.columns)
    # why not in one class by several columns: one that is missing is then a class without photos
    is_by_columns = own.kind == "labels" if own.classes else not got.isdisjoint(expected)
    if expected and got != expected and is_by_columns:
        both = ((expected - got, "lacks"), (got - expected, "adds"))
        texts = [f"{verb} {', '.join(sorted(columns))[:200]}" for columns, verb in both if columns]
        raise ResoluteError(
            f"{source.root}: other columns, got a table that {' and '.join(texts)}, expected the {len(expected)} of "
            "SRC's table, since a missing one would count as 0 for all photos; correct VAL_LABELS or COLUMNS"
        )
    if target.kind == "values" and (own.names, own.units) != (target.names, target.units):
        raise ResoluteError(
            f"{source.root}: other values, got {', '.join(own.names)[:200]}, expected {', '.join(target.names)[:200]} "
            f"in this order, as in {training.root}; correct VAL, or name the columns with COLUMNS"
        )


def _number_classes(
    source: Source,
    labels: Sequence[str],
    classes: Sequence[str] | None,
    listed_in: str,
    class_numbers: Mapping[str, int] | None,
    training: Photos | None,
    known: Sequence[str],
    *,
    are_names: bool,
) -> tuple[tuple[str, ...], Mapping[str, int]]:
    src, trained_on = source.root, training.root if training is not None else None

    def first_with(label: str) -> ImageRef | None:
        has_label = (
            image
            for image in source
            if label == image.label or (not isinstance(image.label, str) and label in image.label)
        )
        return next(has_label, None)

    def locate(label: str) -> str:
        image = first_with(label)
        return f" in line {image.line}" if image is not None and image.line else ""

    for label in labels:
        if not _is_encodable(label):  # why: JSON can hold half a character
            image = first_with(label)
            name = label if image is None else image.name
            raise ResoluteError(f"{src}: {name!r} has no text as its label, got {label!r}, expected text; correct it")
    if source.listing.numbered:
        names, numbers = by_number(
            labels,
            names=source.listing.label_names,
            classes=classes,
            src=src,
            listed_in=listed_in,
            training=trained_on,
            are_names=are_names,
            listed=class_numbers,
            locate=locate,
        )
        # why: photos of the last classes may be gone
        return (tuple(known) if names == tuple(known[: len(names)]) else names), numbers
    if classes is None and known:
        classes = (*known, *sorted(set(labels) - set(known)))
    return by_name(
        labels,
        classes=classes,
        src=src,
        listed_in=listed_in,
        training=trained_on,
        listed=class_numbers,
        locate=locate,
    )


def _is_encodable(text: str) -> bool:
    """Whether `text` has bytes, valid UTF-8 or not, as names in folders and archives have."""
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True
