"""Gives a finished shard set other targets, for tests of what reads them; only its index and manifest change."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.dataset.target import Target
from tests.support.manifests import update_manifest

__all__ = ["retarget"]


def retarget(root: Path, target: Target, targets: Mapping[str, Sequence[Any]]) -> ShardSet:
    """Replace the targets of the set in `root` by `targets`, {split: one per sample}, as `Target.encode` takes them."""
    keys = {name: split.samples["key"].tolist() for name, split in ShardSet.open(root).splits.items()}
    for split, values in targets.items():
        name = f"index/{split}.npy"
        rows = io.BytesIO()
        np.save(rows, target.encode(keys[split], values))
        (root / name).write_bytes(rows.getvalue())
        update_manifest(root, [name])
    update_manifest(root, classes=list(target.classes), target=target.to_json())
    return ShardSet.open(root)
