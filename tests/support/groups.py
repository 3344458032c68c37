"""Writes into a copy of a shard set which of its samples belong together, as prep does."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from resolute.pipeline.dataset.format import GROUP, WITH_GROUPS, groups_name, manifest_bytes
from resolute.pipeline.dataset.shard_set import ShardSet

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
    content, path = buffer.getvalue(), root / "manifest.json"
    (root / groups_name()).write_bytes(content)
    manifest = json.loads(path.read_text())
    entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest["version"] = WITH_GROUPS
    manifest["files"] = dict(sorted({**manifest["files"], groups_name(): entry}.items()))
    path.write_bytes(manifest_bytes(manifest))
