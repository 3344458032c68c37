"""The sorted list of all images of a source, on disk and memory-mapped, so that its size is not limited by memory.

A catalog is a few files in a folder; its images are in ascending order of the bytes of their names.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import ResoluteError, strip_credentials
from prep.sources.image_ref import ByteRange, Source, is_url
from prep.storage.hashed_file import write_errors

from .classes import MAX_CLASSES, by_name, by_number
from .external_sort import ENTRY, RUN_RECORDS, Record, RecordFile, sort_records
from .input_checks import describe_ignored

__all__ = ["ENTRY", "ByteRange", "Catalog", "write_catalog"]

_CHUNK = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """The images of a source: `entries` (N,) ENTRY and the blob of their `names`, both memory-mapped; N is at least 1.

    `root` is what names of plain files are relative to; `containers` are the archives that ENTRY counts from 1 (0: a
    plain file); `classes` are all class names by number, including empty classes; `ignored` counts things in the source
    that are not images of a class, by kind. Names that are URLs keep the credentials needed to fetch them in these
    files, and nowhere else.
    """

    root: str
    entries: NDArray[np.void]
    names: mmap.mmap
    containers: tuple[str, ...]
    classes: tuple[str, ...]
    ignored: Mapping[str, int]

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def labels(self) -> NDArray[np.uint32]:
        """(N,) u4, a view: the class number of each image."""
        return self.entries["label"]

    def name(self, i: int) -> str:
        """The name of image `i` for records and reports, without credentials."""
        return os.fsdecode(_without_credentials(self._raw_name(i)))

    def _raw_name(self, i: int) -> bytes:
        ends = self.entries["name_end"]
        return self.names[int(ends[i - 1]) if i else 0 : int(ends[i])]

    def byte_range(self, i: int) -> ByteRange:
        """The location of the bytes of image `i`, for `fetch`."""
        _, offset, nbytes, size_bytes, _, container, packed = self.entries[i].item()
        path = self.containers[container - 1] if container else _join(self.root, os.fsdecode(self._raw_name(i)))
        return ByteRange(path, offset, nbytes, packed, size_bytes)

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

        The digits change with the source's content, but not with the way it is packed or its URLs are signed.
        """
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


def write_catalog(
    source: Source,
    folder: Path,
    *,
    classes: Sequence[str] | None = None,
    classes_file: str = "CLASSES",
    training: Catalog | None = None,
    run_records: int = RUN_RECORDS,
) -> Catalog:
    """Write everything that `source` yields to files in `folder`, which is created if necessary, and map them.

    Class numbers are those of `classes` (the names in `classes_file`) or, for a validation source, of `training`;
    otherwise classes are numbered in order of their names' code points, or keep their numbers if the source is
    `numbered`. Memory does not grow with the number of images.

    Raises `ResoluteError` for a source without images; for training, with fewer than two classes; for an unknown class
    or a number out of range; and if the disk refuses.
    """
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    files = RecordFile.at(folder, "catalog")
    labels: dict[str, int] = {}
    containers: dict[str, int] = {}
    repeated = sort_records(_records(source, labels, containers), files, run_records=run_records)
    ignored = Counter(source.ignored)
    if repeated:
        ignored["duplicate names"] += repeated
    if not labels:
        ignored_text = describe_ignored(ignored)
        raise ResoluteError(
            f"{source.root}: no classes, got no image with a class (ignored: {ignored_text}), expected one folder per "
            f"class, or one label per image; point {'SRC' if training is None else 'VAL'} at the class folders' parent"
        )
    if training is not None:
        classes = training.classes
    names, numbers = _number_classes(source, tuple(labels), classes, classes_file, training)
    if training is None and len(labels) < 2:
        raise ResoluteError(
            f"{source.root}: too few classes, got one class ({names[numbers[next(iter(labels))]]}), expected "
            "at least two; point SRC at the folder that holds the class folders"
        )
    table = np.array([numbers[label] for label in labels], np.uint32)
    entries, blob = files.map("r+")
    for first in range(0, len(entries), _CHUNK):
        block = entries["label"][first : first + _CHUNK]
        block[:] = table[block]
    return Catalog(
        root=source.root,
        entries=entries,
        names=blob,
        containers=tuple(containers),
        classes=names,
        ignored=dict(ignored),
    )


def _records(source: Source, labels: dict[str, int], containers: dict[str, int]) -> Iterator[Record]:
    """Yield records with labels and containers numbered in order of first appearance; fills both tables."""
    for image in source:
        label = labels.setdefault(image.label, len(labels))
        if label == MAX_CLASSES:
            raise ResoluteError(
                f"{source.root}: too many classes, got more than {MAX_CLASSES} different labels such as "
                f"{image.label[:80]!r}, expected class names; name the column or file that holds them"
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


def _number_classes(
    source: Source, labels: Sequence[str], classes: Sequence[str] | None, listed_in: str, training: Catalog | None
) -> tuple[tuple[str, ...], Mapping[str, int]]:
    src, trained_on = source.root, training.root if training is not None else None
    if source.numbered:
        own = source.label_names
        return by_number(labels, names=own, classes=classes, src=src, listed_in=listed_in, training=trained_on)
    return by_name(labels, classes=classes, src=src, listed_in=listed_in, training=trained_on)


def _without_credentials(name: bytes) -> bytes:
    return os.fsencode(strip_credentials(os.fsdecode(name))) if b"://" in name else name


def _join(root: str, name: str) -> str:
    return name if name.startswith("/") or is_url(name) else f"{root.rstrip('/')}/{name}"
