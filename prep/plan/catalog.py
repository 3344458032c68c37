"""The sorted list of all images of a source, on disk and memory-mapped, so that its size is not limited by memory.

A catalog is a few files in a folder; its images are in ascending order of the bytes of their names.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from resolute.errors import ResoluteError, strip_credentials
from resolute.files import write_errors
from resolute.pipeline.dataset.target import Target
from resolute.prep.sources.image_ref import ByteRange, ImageRef, Source, is_url
from resolute.prep.sources.targets.target_cells import describe_label, is_number

from .classes import MAX_CLASSES, by_name, by_number
from .external_sort import ENTRY, RUN_RECORDS, Record, RecordFile, TwoTargets, sort_records
from .input_checks import describe_ignored
from .target_rows import LabelRows, TargetRows, TargetWriter

__all__ = ["ENTRY", "ByteRange", "ByteRanges", "Catalog", "write_catalog"]

_CHUNK = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """The images of a source: `entries` (N,) ENTRY and the blob of their `names`, memory-mapped; N is at least 1.

    names of plain files are relative to `root`; `containers` are the archives that ENTRY counts from 1 (0: a
    plain file); `classes` are all class names by number, including empty classes (none if targets are values);
    `ignored` counts things in the source that are not images of a class, by kind. If targets are not classes, the
    label of an entry is its number in `targets`. Names that are URLs keep the credentials needed to fetch them in these
    files, and nowhere else.
    """

    root: str
    entries: NDArray[np.void]
    names: mmap.mmap | bytes
    containers: tuple[str, ...]
    classes: tuple[str, ...]
    ignored: Mapping[str, int]
    target: Target = Target(kind="class", names=())  # noqa: RUF009  # why: immutable
    targets: TargetRows | None = None
    about: tuple[str, ...] = ()  # what the targets were recognised as, with examples, in lines
    numbered: bool = False  # the source's labels are class numbers without names of their own
    columns: tuple[str, ...] = ()  # the columns of 0 and 1 of a table, one per class

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def labels(self) -> NDArray[np.uint32]:
        """(N,) u4, a view: the class number of each image, or the number of its row in `targets`."""
        return self.entries["label"]

    def target_column(self) -> NDArray[Any]:
        """The targets of all images, as in `Target.sample_dtype`: (N,) u4, or (N, …) of labels or values."""
        if self.targets is None:
            return self.labels
        # why not a copy: it is pickled beside the catalog
        return self.targets if isinstance(self.targets, np.ndarray) else self.targets[self.labels]

    def pairs(self, first: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(positions from `first`, class numbers): a pair for each class of the images from `first` to `end` - 1."""
        labels = self.labels[first:end]
        if self.targets is None:
            return np.arange(len(labels)), labels.astype(np.int64)
        assert isinstance(self.targets, LabelRows)
        return self.targets.pairs(labels)

    def target_digests(self, positions: NDArray[Any]) -> NDArray[np.uint32]:
        """(n,) u4 by which a changed target is recognised: the class number, or a CRC-32 of labels or values."""
        labels = self.labels[positions]
        if self.targets is None:
            return labels
        if self.target.kind == "values":
            return np.array([zlib.crc32(row.tobytes()) for row in self.targets[labels]], np.uint32)
        assert isinstance(self.targets, LabelRows)
        owners, numbers = self.targets.pairs(labels)
        numbers = numbers[np.lexsort((numbers, owners))].astype("<u4")
        ends = np.cumsum(np.bincount(owners, minlength=len(labels))).tolist()
        return np.array([zlib.crc32(numbers[a:b].tobytes()) for a, b in pairwise([0, *ends])], np.uint32)

    def class_counts(self, chosen: NDArray[np.uint32] | None = None) -> NDArray[np.int64]:
        """(C,) number of images of each class, of all images or of those `chosen` (n,)."""
        counts = np.zeros(len(self.classes), np.int64)
        is_chosen = None
        if chosen is not None:
            is_chosen = np.zeros(len(self), np.bool_)
            is_chosen[chosen] = True
        for first in range(0, len(self), _CHUNK):
            positions, numbers = self.pairs(first, first + _CHUNK)
            if is_chosen is not None:
                numbers = numbers[is_chosen[first + positions]]
            counts += np.bincount(numbers, minlength=len(counts))
        return counts

    def name(self, i: int) -> str:
        """The name of image `i` for records and reports, without credentials."""
        return os.fsdecode(_without_credentials(self._raw_name(i)))

    def _raw_name(self, i: int) -> bytes:
        ends = self.entries["name_end"]
        return self.names[int(ends[i - 1]) if i else 0 : int(ends[i])]

    def byte_range(self, i: int) -> ByteRange:
        """The location of the bytes of image `i`, for `fetch`."""
        return self._byte_ranges(i, i + 1)[0]

    def _byte_ranges(self, first: int, stop: int) -> tuple[ByteRange, ...]:
        ranges = []
        start = int(self.entries["name_end"][first - 1]) if first else 0
        for end, offset, nbytes, size_bytes, _, container, packed in self.entries[first:stop].tolist():
            name = self.names[start:end]
            path = self.containers[container - 1] if container else _join(self.root, os.fsdecode(name))
            ranges.append(ByteRange(path, offset, nbytes, packed, size_bytes))
            start = end
        return tuple(ranges)

    def shown_names(self, positions: NDArray[Any] | None = None) -> Iterator[bytes]:
        """The names of the images at `positions` (None: all), without credentials, as bytes."""
        has_urls = self.names.find(b"://") >= 0
        ends = self.entries["name_end"]
        count = len(self) if positions is None else len(positions)
        for first in range(0, count, _CHUNK):
            if positions is None:
                chosen = np.arange(first, min(first + _CHUNK, count))
            else:
                chosen = positions[first : first + _CHUNK].astype(np.int64)
            starts = np.where(chosen > 0, ends[chosen - 1], 0)
            for start, end in zip(starts.tolist(), ends[chosen].tolist(), strict=True):
                yield _without_credentials(self.names[start:end]) if has_urls else self.names[start:end]

    def name_ends(self, positions: NDArray[Any]) -> NDArray[np.uint64]:
        """(n,) the ends of the names at `positions` in a blob of those names, without credentials."""
        lengths = np.fromiter(map(len, self.shown_names(positions)), np.uint64, len(positions))
        return np.cumsum(lengths, dtype=np.uint64)

    def path_with_credentials(self) -> str | None:
        """A path or name in these files that is a URL with credentials; None if there is none."""
        names = range(len(self)) if self.names.find(b"://") >= 0 else ()
        paths = chain([self.root, *self.containers], (os.fsdecode(self._raw_name(i)) for i in names))
        return next((path for path in paths if "://" in path and strip_credentials(path) != path), None)

    def select(self, positions: NDArray[Any]) -> Catalog:
        """A copy in memory of the images at `positions`, in that order, without the classes' names."""
        entries, ends = self.entries[positions], self.entries["name_end"]
        before = np.asarray(positions, np.int64) - 1
        starts = np.where(before >= 0, ends[before], 0).tolist()
        names = [self.names[start:end] for start, end in zip(starts, entries["name_end"].tolist(), strict=True)]
        entries["name_end"] = np.cumsum([len(name) for name in names])
        targets = None if self.targets is None else self.targets[entries["label"]]
        if targets is not None:
            entries["label"] = np.arange(len(entries))
        used = np.unique(entries["container"])
        used = used[used > 0]
        entries["container"] = np.searchsorted(used, entries["container"], side="right")
        return Catalog(
            root=self.root, entries=entries, names=b"".join(names),
            containers=tuple(self.containers[i - 1] for i in used.tolist()), classes=(), ignored={}, targets=targets,
        )  # fmt: skip

    def find(self, name: str) -> int | None:
        """The index of the image with that name, by bisection; None if there is none."""
        target = os.fsencode(name)
        low, high = 0, len(self)
        while low < high:
            middle = (low + high) // 2
            if self._raw_name(middle) < target:
                low = middle + 1
            else:
                high = middle
        return low if low < len(self) and self._raw_name(low) == target else None

    def by_class(self) -> dict[str, tuple[int, str]]:
        """{non-empty class: (images, 16 hex digits over their names and sizes)}, to report which classes changed.

        Of labels, also those without any; of values there is one entry, over these too. The digits change with the
        source's content, but not with the way it is packed or its URLs are signed.
        """
        if self.target.kind != "class":
            return self._by_target()
        digests = [hashlib.sha256() for _ in self.classes]
        counts = np.zeros(len(self.classes), np.int64)
        start = 0
        for first in range(0, len(self), _CHUNK):
            block = self.entries[first : first + _CHUNK]
            counts += np.bincount(block["label"], minlength=len(counts))
            columns = (block[field].tolist() for field in ("name_end", "label", "size_bytes"))
            for end, label, size_bytes in zip(*columns, strict=True):
                digests[label].update(b"%b\0%d\n" % (_without_credentials(self.names[start:end]), size_bytes))
                start = end
        return {name: (int(counts[n]), digests[n].hexdigest()[:16]) for n, name in enumerate(self.classes) if counts[n]}

    def _by_target(self) -> dict[str, tuple[int, str]]:
        is_labels = self.target.kind == "labels"
        names = (*self.classes, "(no label)") if is_labels else ("(values)",)
        digests, counts = [hashlib.sha256() for _ in names], [0] * len(names)
        start, targets = 0, self.targets
        assert targets is not None
        for first in range(0, len(self), _CHUNK):
            block = self.entries[first : first + _CHUNK]
            classes_of: list[list[int]] = [[] for _ in block]
            if is_labels:
                positions, numbers = self.pairs(first, first + _CHUNK)
                for position, number in zip(positions.tolist(), numbers.tolist(), strict=True):
                    classes_of[position].append(number)
            values = [b""] * len(block) if is_labels else [row.tobytes() for row in targets[block["label"]]]
            columns = (block["name_end"].tolist(), block["size_bytes"].tolist(), classes_of, values)
            for end, size_bytes, image_classes, value in zip(*columns, strict=True):
                image = b"%b\0%d\n%b" % (_without_credentials(self.names[start:end]), size_bytes, value)
                start = end
                for number in image_classes or [len(names) - 1]:
                    digests[number].update(image)
                    counts[number] += 1
        return {name: (counts[n], digests[n].hexdigest()[:16]) for n, name in enumerate(names) if counts[n]}


class ByteRanges(Sequence[ByteRange]):
    """The locations of the bytes of all images in a catalog: sent as arrays, and made where they are needed."""

    def __init__(self, images: Catalog) -> None:
        self._images = images

    def __len__(self) -> int:
        return len(self._images)

    @overload
    def __getitem__(self, i: int) -> ByteRange: ...
    @overload
    def __getitem__(self, i: slice) -> tuple[ByteRange, ...]: ...
    def __getitem__(self, i: int | slice) -> ByteRange | tuple[ByteRange, ...]:
        if isinstance(i, int):
            return self._images.byte_range(range(len(self))[i])
        first, stop, _ = i.indices(len(self))
        return self._images._byte_ranges(first, stop)


def write_catalog(
    source: Source,
    folder: Path,
    *,
    classes: Sequence[str] | None = None,
    classes_file: str = "CLASSES",
    training: Catalog | None = None,
    known_classes: Sequence[str] = (),
    run_records: int = RUN_RECORDS,
) -> Catalog:
    """Write everything that `source` yields to files in `folder`, which is created if necessary, and map them.

    Class numbers are those of `classes` (the names in `classes_file`) or, for a validation source, of `training`, which
    also decides whether labels that look like numbers are names; otherwise classes are numbered in order of their
    names' code points, or keep their numbers if the source is `numbered`. Either way the classes of a set that exists,
    `known_classes`, keep their numbers, and further ones follow. Memory does not grow with the number of images.

    Raises `ResoluteError` for a source without images; for training, with fewer than two classes; for an unknown class
    or a number out of range; and if the disk refuses.
    """
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    files = RecordFile.at(folder, "catalog")
    labels: dict[str, int] = {}
    containers: dict[str, int] = {}
    with ExitStack() as stack:
        listing = _Listing(source, labels, containers, lambda: stack.enter_context(TargetWriter(folder, labels)))
        try:
            repeated = sort_records(iter(listing), files, run_records=run_records, is_same=listing.is_same)
        except TwoTargets as error:
            raise _two_targets(source, str(error)) from None
    kind, writer = source.target.kind, listing.writer
    ignored = Counter(source.ignored)
    if repeated:
        ignored["duplicate names"] += repeated
    if not files.entries.stat().st_size:
        ignored_text = describe_ignored(ignored)
        raise ResoluteError(
            f"{source.root}: no classes, got no image with a class (ignored: {ignored_text}), expected one folder per "
            f"class, or one label per image; point {'SRC' if training is None else 'VAL'} at the class folders' parent"
        )
    if training is not None:
        classes = training.classes
        _check_same_target(source, training)
    names: tuple[str, ...] = ()
    if kind == "values":
        target = Target(kind=kind, names=source.target.names, units=source.target.units)
    else:
        names, numbers = _number_classes(source, tuple(labels), classes, classes_file, training, known_classes)
        target = Target(kind=kind, names=names)
        table = np.array([numbers[label] for label in labels], np.uint32)
    if training is None and kind == "class" and len(labels) < 2:
        raise ResoluteError(
            f"{source.root}: too few classes, got one class ({names[numbers[next(iter(labels))]]}), expected "
            "at least two; point SRC at the folder that holds the class folders"
        )
    entries, blob = files.map("r+" if kind == "class" else "r")
    for first in range(0, len(entries) if kind == "class" else 0, _CHUNK):
        block = entries["label"][first : first + _CHUNK]
        block[:] = table[block]
    targets: TargetRows | None = None
    if writer is not None:
        targets = writer.values() if kind == "values" else writer.label_rows(table, len(names))
    return Catalog(
        root=source.root,
        entries=entries,
        names=blob,
        containers=tuple(containers),
        classes=names,
        ignored=dict(ignored),
        target=target,
        targets=targets,
        about=source.target.about,
        numbered=source.numbered and source.label_names is None,
        columns=source.target.classes,
    )


class _Listing:
    """Yields the records of a source, with labels and containers numbered in order of first appearance.

    Fills both tables. If targets are not classes, the label of a record is the number of its row in `writer`, which
    `open_writer` makes.
    """

    def __init__(
        self, source: Source, labels: dict[str, int], containers: dict[str, int],
        open_writer: Callable[[], TargetWriter],
    ) -> None:  # fmt: skip
        self._source, self._labels, self._containers, self._open_writer = source, labels, containers, open_writer
        self.writer: TargetWriter | None = None

    def __iter__(self) -> Iterator[Record]:
        source, labels, containers = self._source, self._labels, self._containers
        for image in source:
            if not labels and self.writer is None:
                self._start()
            if self.writer is None:
                assert isinstance(image.label, str)
                label = labels.setdefault(image.label, len(labels))
            else:
                label = self.writer.add(image.label)
            if len(labels) > MAX_CLASSES:
                raise ResoluteError(
                    f"{source.root}: too many classes, got more than {MAX_CLASSES} different labels such as "
                    f"{list(labels)[-1][:80]!r}, expected class names; name the column or file that holds them"
                )
            yield Record(
                name=os.fsencode(image.name),
                offset=image.offset,
                nbytes=image.nbytes,
                size_bytes=image.nbytes if image.size_bytes < 0 else image.size_bytes,
                label=label,
                container=containers.setdefault(image.container, len(containers) + 1) if image.container else 0,
                packed=image.packed,
            )
        if self.writer is not None:
            self.writer.flush()

    def _start(self) -> None:
        """Called when the first image is listed, which is when its source's targets are known."""
        self._labels.update({name: n for n, name in enumerate(self._source.target.classes)})
        if self._source.target.kind != "class":
            self.writer = self._open_writer()

    def is_same(self, label: int, other: int) -> bool:
        return label == other if self.writer is None else self.writer.is_same(label, other)


def _two_targets(source: Source, name: str) -> ResoluteError:
    """The error for an image with two different targets, which are looked up in the source again."""
    images = [image for image in source if image.name == name]
    first = images[0]
    conflicting = next(image for image in images if image.label != first.label)
    target = source.target
    texts = []
    for image in (first, conflicting):
        text = repr(describe_label(image.label, target.names, target.units))
        texts.append(f"{text} in line {image.line}" if image.line else text)
    what = "belongs to two classes" if target.kind == "class" else "has two targets"
    return ResoluteError(
        f"{name}: {what}, got {' and '.join(texts)}, expected one label per image; correct the labels"
    )


def _check_same_target(source: Source, training: Catalog) -> None:
    """Raise `ResoluteError` unless the targets of a validation source are of the kind and names of `training`."""
    own, target = source.target, training.target
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
    source: Source, labels: Sequence[str], classes: Sequence[str] | None, listed_in: str, training: Catalog | None,
    known: Sequence[str],
) -> tuple[tuple[str, ...], Mapping[str, int]]:  # fmt: skip
    src, trained_on = source.root, training.root if training is not None else None

    def first_with(label: str) -> ImageRef | None:
        has_label = (image for image in source if label == image.label or (
            not isinstance(image.label, str) and label in image.label))  # fmt: skip
        return next(has_label, None)

    def locate(label: str) -> str:
        image = first_with(label)
        return f" in line {image.line}" if image is not None and image.line else ""

    for label in labels:
        if not _is_encodable(label):  # why: JSON can hold half a character
            image = first_with(label)
            name = label if image is None else image.name
            raise ResoluteError(f"{src}: {name!r} has no text as its label, got {label!r}, expected text; correct it")
    # why: if a training part has names such as "10", that is what 10 means, and not the class with that number
    are_names = training is not None and not training.numbered and any(map(is_number, training.classes))
    if source.numbered:
        names, numbers = by_number(
            labels, names=source.label_names, classes=classes, src=src, listed_in=listed_in, training=trained_on,
            are_names=are_names, locate=locate,
        )  # fmt: skip
        # why: photos of the last classes may be gone
        return (tuple(known) if names == tuple(known[: len(names)]) else names), numbers
    if classes is None and known:
        classes = (*known, *sorted(set(labels) - set(known)))
    return by_name(labels, classes=classes, src=src, listed_in=listed_in, training=trained_on, locate=locate)


def _is_encodable(text: str) -> bool:
    """Whether `text` has bytes, valid UTF-8 or not, as names in folders and archives have."""
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


def _without_credentials(name: bytes) -> bytes:
    return os.fsencode(strip_credentials(os.fsdecode(name))) if b"://" in name else name


def _join(root: str, name: str) -> str:
    return name if name.startswith("/") or is_url(name) else f"{root.rstrip('/')}/{name}"
