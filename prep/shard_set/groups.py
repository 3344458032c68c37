"""The GROUP file of a set: which samples belong together, by the setting GROUP and as near copies."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from resolute.pipeline.dataset.format import GROUP

__all__ = ["group_rows"]

_Numbers = Mapping[str, tuple[NDArray[np.uint64], NDArray[np.uint32]]]  # {split: (keys, numbers from 1)}


def group_rows(stored: Mapping[str, NDArray[np.uint64]], *, groups: _Numbers, near: _Numbers) -> NDArray[np.void]:
    """(n,) GROUP, sorted by split and key, of the samples with a number; `stored` are the keys of all samples."""
    parts = []
    for split, own_keys in stored.items():
        keys = np.sort(np.asarray(own_keys, np.uint64))
        rows = np.zeros(len(keys), GROUP)
        rows["split"], rows["key"] = split == "val", keys
        for name, numbers in (("group", groups), ("near", near)):
            of_split, values = numbers.get(split, (np.empty(0, np.uint64), np.empty(0, np.uint32)))
            at = np.searchsorted(keys, of_split)
            is_stored = (
                (at < len(keys)) & (keys[np.minimum(at, max(0, len(keys) - 1))] == of_split) if len(keys) else at < 0
            )
            rows[name][at[is_stored]] = values[is_stored]
        parts.append(rows[(rows["group"] > 0) | (rows["near"] > 0)])
    joined = np.concatenate(parts)
    return joined[np.argsort(joined["split"], kind="stable")]
