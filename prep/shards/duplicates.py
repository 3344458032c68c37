"""Groups of byte-identical input images, found by the digests in the index."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .tar_format import target_file

__all__ = ["Duplicates", "InputNames", "find_duplicates"]

Parts = Callable[[], Iterator[tuple[NDArray[Any], ...]]]


class InputNames(Protocol):
    """Knows the input images of a set."""

    def names(self, split: str, keys: Sequence[int]) -> list[str]:
        """The names of the input images of samples."""
        ...


@dataclass(frozen=True, kw_only=True)
class Duplicates:
    """Groups of samples made from identical files, as one sorted table.

    `digests`, `splits` (an index into `names`) and `keys` are (n,) each, `targets` (n,) or (n, …); equal digests are
    adjacent, and samples without a duplicate are left out.
    """

    names: Sequence[str]
    digests: NDArray[np.uint64]
    splits: NDArray[np.uint8]
    keys: NDArray[np.uint64]
    targets: NDArray[Any]
    inputs: InputNames

    def _groups(self) -> Iterator[slice]:
        edges = np.flatnonzero(self.digests[1:] != self.digests[:-1]) + 1
        bounds = [0, *edges.tolist(), len(self.digests)]
        for start, stop in pairwise(bounds):
            if stop > start:
                yield slice(start, stop)

    def summary(self) -> dict[str, int]:
        """Number of groups, of images beyond the first of each, of groups with two labels, of groups in two splits."""
        groups = two_labels = two_splits = 0
        for group in self._groups():
            groups += 1
            two_labels += int((self.targets[group] != self.targets[group.start]).any())
            two_splits += int(np.ptp(self.splits[group]) > 0)
        extra = len(self.digests) - groups
        return {"groups": groups, "extra": extra, "two_labels": two_labels, "across_splits": two_splits}

    def lines(self) -> Iterator[bytes]:
        """One JSON line per group: [{path, split, key, label}, …], or `labels` or `target` as in the tars."""
        for group in self._groups():
            entries = []
            for i in range(group.start, group.stop):
                split, key = self.names[self.splits[i]], int(self.keys[i])
                (path,) = self.inputs.names(split, [key])
                entries.append({"path": path, "split": split, "key": key, **_target_json(self.targets[i])})
            yield (json.dumps(entries) + "\n").encode()


def _target_json(target: Any) -> dict[str, Any]:
    if np.ndim(target) == 0:
        return {"label": int(target)}
    _, content = target_file("labels" if target.dtype == np.uint8 else "values", target, 0)
    table: dict[str, Any] = json.loads(content)
    return table


def find_duplicates(parts: Mapping[str, Parts], inputs: InputNames, total: int) -> Duplicates:
    """Find samples with equal digests; holds 8 bytes per sample in memory.

    `parts` maps a split to a function that yields its (digests, keys, targets) in pieces, and that is called twice.
    `total` is the number of samples of all splits.
    """
    names = sorted(parts)
    digests = np.empty(total, np.uint64)
    filled = 0
    for name in names:
        for piece, _, _ in parts[name]():
            digests[filled : filled + len(piece)] = piece
            filled += len(piece)
    digests.sort()
    repeated = np.unique(digests[1:][digests[1:] == digests[:-1]])
    columns: list[list[NDArray[Any]]] = [[np.empty(0, kind)] for kind in ("u8", "u1", "u8")]
    targets: list[NDArray[Any]] = []
    for number, name in enumerate(names):
        for piece, keys, piece_targets in parts[name]() if len(repeated) else ():
            twins = np.isin(piece, repeated)
            values_of_piece = (piece[twins], np.full(twins.sum(), number, np.uint8), keys[twins])
            for column, values in zip(columns, values_of_piece, strict=True):
                column.append(values)
            targets.append(piece_targets[twins])
    digests, splits, keys = (np.concatenate(column) for column in columns)
    order = np.argsort(digests, kind="stable")
    return Duplicates(
        names=names, digests=digests[order], splits=splits[order], keys=keys[order],
        targets=np.concatenate(targets)[order] if targets else np.empty(0, np.uint32), inputs=inputs,
    )  # fmt: skip
