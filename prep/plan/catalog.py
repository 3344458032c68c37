"""Which images does a source hold, in one fixed order, however many there are?

A catalog is files in a folder, mapped into memory: images in ascending order of their names' bytes.
"""

from __future__ import annotations

import hashlib
import json
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
    """`entries` (N,) ENTRY and the `names` they end in, both mapped; N is at least 1.

    `root` is what plain files' names are relative to; `places` are the containers that ENTRY counts from 1 (0:
    a plain file); `classes` are all class names by number, with images or not; `ignored` says, by kind, how
    many things in the source are no image of a class. Names that are URLs keep their credentials in these files, to be
    fetched with, and nowhere else.
    """

    root: str
    entries: NDArray[np.void]
    names: mmap.mmap
    containers: tuple[str, ...]
    classes: tuple[str, ...]
    ignored: Mapping[str, int]

    @classmethod
    def open(cls, folder: Path) -> Catalog:
        """What `write_catalog` left in `folder`."""
        about = json.loads((folder / "catalog.json").read_bytes())
        entries, names = RecordFile.at(folder, "catalog").map()
        return cls(
            root=about["root"],
            entries=entries,
            names=names,
            containers=tuple(about["places"]),
            classes=tuple(about["classes"]),
            ignored=about["ignored"],
        )

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def labels(self) -> NDArray[np.uint32]:
        """(N,) u4, a view: the class number of each image."""
        return self.entries["label"]

    def name(self, i: int) -> str:
        """What image `i` is called in records and reports."""
        return os.fsdecode(_without_credentials(self._raw_name(i)))

    def _raw_name(self, i: int) -> bytes:
        ends = self.entries["name_end"]
        return self.names[int(ends[i - 1]) if i else 0 : int(ends[i])]

    def byte_range(self, i: int) -> ByteRange:
        """Where image `i` lies, for `fetch`."""
        _, offset, nbytes, size_bytes, _, container, packed = self.entries[i].item()
        path = self.containers[container - 1] if container else _join(self.root, os.fsdecode(self._raw_name(i)))
        return ByteRange(path, offset, nbytes, packed, size_bytes)

    def find(self, name: str) -> int | None:
        """The position of the image with that name, by bisection."""
        target = os.fsencode(name)
        low, high = 0, len(self)
        while low < high:
            middle = (low + high) // 2
            if self._raw_name(middle) < target:
                low = middle + 1
            else:
                high = middle
        return low if low < len(self) and self._raw_name(low) == target else None

    def fingerprint(self) -> str:
        """SHA-256 over (name, class name, size in bytes) of every image, in order: changes with the source, but
        not with the way it is packed."""
        digest = hashlib.sha256()
        classes = [b"\0%b\0" % os.fsencode(name) for name in self.classes]
        for name, label, size_bytes in self._rows():
            digest.update(b"%b%b%d\n" % (name, classes[label], size_bytes))
        return digest.hexdigest()

    def by_class(self) -> dict[str, tuple[int, str]]:
        """{class with images: (their number, 16 hex digits over their names and sizes)}: tells what changed."""
        digests = [hashlib.sha256() for _ in self.classes]
        counts = np.zeros(len(self.classes), np.int64)
        for name, label, size_bytes in self._rows():
            digests[label].update(b"%b\0%d\n" % (name, size_bytes))
            counts[label] += 1
        return {name: (int(counts[n]), digests[n].hexdigest()[:16]) for n, name in enumerate(self.classes) if counts[n]}

    def _rows(self) -> Iterator[tuple[bytes, int, int]]:
        """(public name, class number, size in bytes) of every image: a signature that was renewed changes nothing."""
        start = 0
        for first in range(0, len(self), _CHUNK):
            block = self.entries[first : first + _CHUNK]
            columns = (block[field].tolist() for field in ("name_end", "label", "size_bytes"))
            for end, label, size_bytes in zip(*columns, strict=True):
                yield _without_credentials(self.names[start:end]), label, size_bytes
                start = end


def write_catalog(
    source: Source,
    folder: Path,
    *,
    classes: Sequence[str] | None = None,
    classes_file: str = "CLASSES",
    training: Catalog | None = None,
    run_records: int = RUN_RECORDS,
) -> Catalog:
    """Write everything `source` yields to `folder` (made if need be; an older catalog there is replaced).

    Class numbers: those of `classes` (the names in `classes_file`) or, for a validation source, of `training`;
    else the names sorted by code point, or the numbers themselves where the source is `numbered`. Memory does
    not grow with the number of images. Raises `ResoluteError` for a source without images or, for training,
    with fewer than two classes; for a class that is not known or a number out of range; and when the disk refuses.
    """
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    files = RecordFile.at(folder, "catalog")
    labels: dict[str, int] = {}
    containers: dict[str, int] = {}
    repeated = sort_records(_records(source, labels, containers), files, run_records=run_records)
    ignored = Counter(source.ignored)
    if repeated:
        ignored["given twice"] += repeated
    if not labels:
        about = describe_ignored(ignored)
        raise ResoluteError(
            f"{source.root}: no classes, got no image of a class ({about}), expected one folder per class, or one "
            f"label per image; point {'SRC' if training is None else 'VAL'} at the folder that holds the class folders"
        )
    if training is not None:
        classes = training.classes
    names, numbers = _number_classes(source, tuple(labels), classes, classes_file, training)
    if training is None and len(labels) < 2:
        raise ResoluteError(
            f"{source.root}: nothing to tell apart, got one class ({names[numbers[next(iter(labels))]]}), expected "
            "at least two; point SRC at the folder that holds the class folders"
        )
    table = np.array([numbers[label] for label in labels], np.uint32)
    entries, _ = files.map("r+")
    for first in range(0, len(entries), _CHUNK):
        block = entries["label"][first : first + _CHUNK]
        block[:] = table[block]
    about = {"root": source.root, "places": list(containers), "classes": names, "ignored": dict(ignored)}
    with write_errors(folder):
        (folder / "catalog.json").write_text(json.dumps(about))
    return Catalog.open(folder)


def _records(source: Source, labels: dict[str, int], containers: dict[str, int]) -> Iterator[Record]:
    """Records with labels and places numbered as they first come; fills both tables."""
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
