"""Writes the index file of the samples that belong together: by GROUP, or because they show the same picture."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resolute.pipeline.dataset.format import GROUP, groups_name
from resolute.prep.storage.hashed_file import FileInfo
from resolute.prep.storage.output import Store

__all__ = ["Numbers", "group_rows", "write_groups"]

Numbers = Mapping[str, tuple[NDArray[Any], NDArray[Any]]]  # {split: (keys, group of each, from 1; 0 is none)}
_SPLITS = ("train", "val")  # by their number in GROUP


def group_rows(near: Numbers, groups: Numbers | None = None) -> NDArray[np.void]:
    """(n,) GROUP, sorted by split and key: the samples with a number in `near` or in `groups`."""
    parts = []
    for number, split in enumerate(_SPLITS):
        columns = {"near": near.get(split), "group": (groups or {}).get(split)}
        keys = np.unique(np.concatenate([np.empty(0, np.uint64), *(c[0][c[1] > 0] for c in columns.values() if c)]))
        rows = np.zeros(len(keys), GROUP)
        rows["split"], rows["key"] = number, keys
        for name, column in columns.items():
            if column is not None:
                own_keys, own_numbers = column
                has = own_numbers > 0
                rows[name][np.searchsorted(keys, own_keys[has])] = own_numbers[has]
        parts.append(rows)
    return np.concatenate(parts)


def write_groups(store: Store, generation: int, near: Numbers, groups: Numbers | None = None) -> dict[str, FileInfo]:
    """Write the GROUP file of a generation, about the samples up to and including it; no file if none has a number.

    Returns {name: what is written}.
    """
    rows = group_rows(near, groups)
    if not len(rows):
        return {}
    content = io.BytesIO()
    np.lib.format.write_array(content, rows, version=(1, 0), allow_pickle=False)
    name = groups_name(generation)
    return {name: store.write(name, content.getvalue())}
