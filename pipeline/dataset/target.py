"""`Target`: what the samples of a set are labelled with: a class each, a set of classes, or a vector of numbers.

    kind      a sample has               SAMPLE column               in a batch (`Batch.targets`)
    class     exactly one class          label: <u4                  (N,) int64, the class number
    labels    any number of classes      labels: ceil(C / 8) bytes   (N, C) float32, 1 for each of its classes, else 0
    values    D finite numbers           values: D times <f4         (N, D) float32

All samples of a set have targets of the same kind; the manifest's table `target` holds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from .format import SAMPLE

__all__ = ["CLASS", "Target", "TargetKind", "sample_dtype", "widened"]

TargetKind = Literal["class", "labels", "values"]
CLASS: Final = "class"
_CHUNK = 1 << 22  # labels per step when those of a complete split are read


def sample_dtype(kind: TargetKind, count: int) -> np.dtype[Any]:
    """dtype of the records in index/SPLIT.npy for targets of `count` classes or values."""
    if kind == "labels":
        return np.dtype([("key", "<u8"), ("labels", "u1", (-(-count // 8),))])
    if kind == "values":
        return np.dtype([("key", "<u8"), ("values", "<f4", (count,))])
    return SAMPLE


def widened(samples: NDArray[np.void], dtype: np.dtype[Any]) -> NDArray[np.void]:
    """`samples` as records of `dtype`, in which labels may take more bytes, as when classes were added to a set."""
    if samples.dtype == dtype:
        return samples
    out = np.zeros(len(samples), dtype)
    out["key"] = samples["key"]
    out["labels"][:, : samples["labels"].shape[1]] = samples["labels"]
    return out


@dataclass(frozen=True, kw_only=True)
class Target:
    """The kind of a set's targets and their `names`: of the C classes, or of the D values, whose `units` may be ""."""

    kind: TargetKind
    names: tuple[str, ...]
    units: tuple[str, ...] = ()

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
        return sample_dtype(self.kind, len(self))

    def decode(self, samples: NDArray[np.void]) -> NDArray[Any]:
        """The targets of records (N,) of `sample_dtype`, in the form of a batch: see the table above."""
        if self.kind == "labels":
            bits = np.unpackbits(samples["labels"], axis=1, count=len(self), bitorder="little")
            return bits.astype(np.float32)
        if self.kind == "values":
            return samples["values"].astype(np.float32)
        return samples["label"].astype(np.int64)

    def encode(self, keys: Sequence[int], targets: Sequence[Any]) -> NDArray[np.void]:
        """Records (N,) of `sample_dtype` from keys and a class number, class numbers, or D numbers for each."""
        records = np.zeros(len(keys), self.sample_dtype)
        records["key"] = keys
        if self.kind == "class":
            records["label"] = targets
        elif self.kind == "values":
            records["values"] = np.asarray(targets, np.float32).reshape(len(keys), len(self))
        else:
            for bits, classes in zip(records["labels"], targets, strict=True):
                numbers = np.asarray(classes, np.int64)
                np.bitwise_or.at(bits, numbers >> 3, (1 << (numbers & 7)).astype(np.uint8))
        return records

    def counts(self, samples: NDArray[np.void]) -> NDArray[np.int64]:
        """(C,) int64: how many of `samples` have each class; (0,) for values."""
        counts = np.zeros(len(self.classes), np.int64)
        for chunk in self._chunks(samples) if self.kind != "values" else ():
            if self.kind == "class":
                counts += np.bincount(chunk["label"], minlength=len(self))
            else:
                counts += self.decode(chunk).sum(0).astype(np.int64)
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
            has_class = self.decode(chunk)[:, order] > 0
            parts.append(np.where(has_class.any(1), order[has_class.argmax(1)], len(self)))
        return np.concatenate(parts).astype(np.int64)

    def _chunks(self, samples: NDArray[np.void]) -> Iterator[NDArray[np.void]]:
        step = max(1, _CHUNK // (len(self) if self.kind == "labels" else 1))
        for at in range(0, max(1, len(samples)), step):
            yield samples[at : at + step]

    def to_json(self) -> dict[str, Any]:
        """The manifest's table `target`; class names are in the manifest's `classes`."""
        if self.kind != "values":
            return {"kind": self.kind}
        return {"kind": self.kind, "names": list(self.names), "units": list(self.units)}

    @classmethod
    def from_manifest(cls, manifest: Mapping[str, Any]) -> Target:
        table = manifest["target"]
        if table["kind"] != "values":
            return cls(kind=table["kind"], names=tuple(manifest["classes"]))
        return cls(kind="values", names=tuple(table["names"]), units=tuple(table["units"]))
