"""`Target`: what the samples of a set are labelled with: a class each, a set of classes, or a vector of numbers.

    kind      a sample has               SAMPLE column               in a batch (`Batch.targets`)
    class     exactly one class          label: <u4                  (N,) int64, the class number
    labels    any number of classes      labels: ceil(C / 8) bytes   (N, C) float32, 1 for each of its classes, else 0
    values    D finite numbers           values: D times <f4         (N, D) float32

All samples of a set have targets of the same kind; the manifest's table `target` holds it.

In a set whose table `target` has `"ignored": true`, it may be unknown whether a sample has a label: that label is
ignored in the loss and in metrics. Its column `labels` is (2, ceil(C / 8)) bytes, the sample's classes and then its
ignored ones, and in a batch these are `IGNORED_TARGET`, -1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from .format import SAMPLE

__all__ = ["CLASS", "IGNORED", "IGNORED_TARGET", "Target", "TargetKind", "sample_dtype"]

TargetKind = Literal["class", "labels", "values"]
CLASS: Final = "class"
IGNORED = 1 << 31  # added to the number of a label that is ignored, where targets are lists of class numbers
IGNORED_TARGET = -1.0  # in a batch. why not NaN: a single one that is not left out would end the training
_CHUNK = 1 << 22  # labels per step when those of a complete split are read


def sample_dtype(kind: TargetKind, count: int, *, ignored: bool = False) -> np.dtype[Any]:
    """dtype of the records in index/SPLIT.npy for targets of `count` classes or values; `ignored` as in `Target`."""
    if kind == "labels":
        shape = (-(-count // 8),)
        return np.dtype([("key", "<u8"), ("labels", "u1", (2, *shape) if ignored else shape)])
    if kind == "values":
        return np.dtype([("key", "<u8"), ("values", "<f4", (count,))])
    return SAMPLE


@dataclass(frozen=True, kw_only=True)
class Target:
    """The kind of a set's targets and their `names`: of the C classes, or of the D values, whose `units` may be "".

    `ignored`: whether labels of a sample may be unknown, and are then left out of loss and metrics; only for the kind
    "labels".
    """

    kind: TargetKind
    names: tuple[str, ...]
    units: tuple[str, ...] = ()
    ignored: bool = False

    def __len__(self) -> int:
        """C or D: the number of outputs of a network that predicts the target."""
        return len(self.names)

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names; none for values."""
        return () if self.kind == "values" else self.names

    @property
    def sample_dtype(self) -> np.dtype[Any]:
        """dtype of the records in index/SPLIT.npy."""
        return sample_dtype(self.kind, len(self), ignored=self.ignored)

    def packed_labels(self, samples: NDArray[np.void]) -> NDArray[np.uint8]:
        """(N, ceil(C / 8)) uint8: a bit for each label, 1 if the sample has it, the lowest bits first."""
        packed: NDArray[np.uint8] = samples["labels"][:, 0] if self.ignored else samples["labels"]
        return packed

    def has_label(self, samples: NDArray[np.void]) -> NDArray[np.uint8]:
        """(N, C) uint8: 1 for each label that a sample has, else 0."""
        return np.unpackbits(self.packed_labels(samples), axis=1, count=len(self), bitorder="little")

    def ignores_label(self, samples: NDArray[np.void]) -> NDArray[np.uint8]:
        """(N, C) uint8: 1 for each label of a sample that is ignored, else 0."""
        if not self.ignored:
            return np.zeros((len(samples), len(self)), np.uint8)
        return np.unpackbits(samples["labels"][:, 1], axis=1, count=len(self), bitorder="little")

    def decode(self, samples: NDArray[np.void]) -> NDArray[Any]:
        """The targets of records (N,) of `sample_dtype`, in the form of a batch: see the table above."""
        if self.kind == "labels":
            targets = self.has_label(samples).astype(np.float32)
            if self.ignored:
                targets[self.ignores_label(samples) > 0] = IGNORED_TARGET
            return targets
        if self.kind == "values":
            return samples["values"].astype(np.float32)
        return samples["label"].astype(np.int64)

    def encode(self, keys: Sequence[int], targets: Sequence[Any]) -> NDArray[np.void]:
        """Records (N,) of `sample_dtype` from keys and a class number, class numbers, or D numbers for each.

        To the number of a label that is ignored, `IGNORED` is added.
        """
        records = np.zeros(len(keys), self.sample_dtype)
        records["key"] = keys
        if self.kind == "class":
            records["label"] = targets
        elif self.kind == "values":
            records["values"] = np.asarray(targets, np.float32).reshape(len(keys), len(self))
        else:
            for bits, classes in zip(
                records["labels"].reshape(len(keys), records.dtype["labels"].itemsize), targets, strict=True
            ):
                numbers = np.asarray(classes, np.int64)
                if self.ignored:  # why: the bits of ignored labels follow those of the others
                    numbers = np.where(numbers < IGNORED, numbers, numbers - IGNORED + 4 * len(bits))
                np.bitwise_or.at(bits, numbers >> 3, (1 << (numbers & 7)).astype(np.uint8))
        return records

    def counts(self, samples: NDArray[np.void]) -> NDArray[np.int64]:
        """(C,) int64: how many of `samples` have each class; (0,) for values."""
        counts = np.zeros(len(self.classes), np.int64)
        for chunk in self._chunks(samples) if self.kind != "values" else ():
            if self.kind == "class":
                counts += np.bincount(chunk["label"], minlength=len(self))
            else:
                counts += self.has_label(chunk).sum(0, dtype=np.int64)
        return counts

    def ignored_counts(self, samples: NDArray[np.void]) -> NDArray[np.int64]:
        """(C,) int64: in how many of `samples` each label is ignored; (0,) for values."""
        counts = np.zeros(len(self.classes), np.int64)
        for chunk in self._chunks(samples) if self.ignored else ():
            counts += self.ignores_label(chunk).sum(0, dtype=np.int64)
        return counts

    def strata(self, samples: NDArray[np.void]) -> NDArray[np.int64]:
        """(N,) int64: the group of each of the samples of a split, by which folds and sampling are balanced.

        That is the class; of several classes the rarest in the split (C for a sample without any); 0 for values.
        """
        if self.kind == "class":
            return np.concatenate([chunk["label"].astype(np.int64) for chunk in self._chunks(samples)])
        if self.kind == "values":
            return np.zeros(len(samples), np.int64)
        order = np.argsort(self.counts(samples), kind="stable")  # the rarest first
        parts = []
        for chunk in self._chunks(samples):
            has_class = self.has_label(chunk)[:, order] > 0
            parts.append(np.where(has_class.any(1), order[has_class.argmax(1)], len(self)))
        return np.concatenate(parts).astype(np.int64)

    def _chunks(self, samples: NDArray[np.void]) -> Iterator[NDArray[np.void]]:
        step = max(1, _CHUNK // (len(self) if self.kind == "labels" else 1))
        for at in range(0, max(1, len(samples)), step):
            yield samples[at : at + step]

    def to_json(self) -> dict[str, Any]:
        """The manifest's table `target`; class names are in the manifest's `classes`."""
        if self.kind != "values":
            return {"kind": self.kind, **({"ignored": True} if self.ignored else {})}
        return {"kind": self.kind, "names": list(self.names), "units": list(self.units)}

    @classmethod
    def from_manifest(cls, manifest: Mapping[str, Any]) -> Target:
        table = manifest["target"]
        if table["kind"] != "values":
            return cls(kind=table["kind"], names=tuple(manifest["classes"]), ignored=bool(table.get("ignored", False)))
        return cls(kind="values", names=tuple(table["names"]), units=tuple(table["units"]))
