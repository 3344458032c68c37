"""Writes into a copy of a shard set which of its samples belong together, as prep does."""

from __future__ import annotations

import io
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from resolute.pipeline.dataset.format import GROUP, groups_name
from resolute.pipeline.dataset.shard_set import ShardSet
from tests.support.manifests import update_manifest

Pair = tuple[int, int]  # positions of a training and of a validation sample, in the order of their splits


def with_groups(root: Path, out: Path, *, near: Sequence[Pair] = (), group: Sequence[Pair] = ()) -> Path:
    """A copy of the set `root` in `out` in which the samples of each pair are near copies, or in one group."""
    shutil.copytree(root, out)
    rows: dict[tuple[int, int], list[int]] = {}  # (split, key) -> [group, near]
    with ShardSet.open(root) as shards:
        keys = [shards.splits[name].samples["key"].tolist() for name in ("train", "val")]
    for column, pairs in enumerate((group, near)):
        for number, pair in enumerate(pairs, 1):
            for split, position in enumerate(pair):
                rows.setdefault((split, keys[split][position]), [0, 0])[column] = number
    write_groups(out, np.array([(*where, *numbers) for where, numbers in sorted(rows.items())], GROUP))
    return out


def write_groups(root: Path, rows: np.ndarray) -> None:
    """Add `rows` (N,) of GROUP to the set `root` as its GROUP file."""
    buffer = io.BytesIO()
    np.save(buffer, rows)
    (root / groups_name()).write_bytes(buffer.getvalue())
    update_manifest(root, [groups_name()])
