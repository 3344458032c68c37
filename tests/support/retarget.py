"""Gives a finished shard set other targets, for tests of what reads them; only its index and manifest change."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from resolute.pipeline.dataset.format import manifest_bytes
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.dataset.target import Target

__all__ = ["retarget"]


def retarget(root: Path, target: Target, targets: Mapping[str, Sequence[Any]]) -> ShardSet:
    """Replace the targets of the set in `root` by `targets`, {split: one per sample}, as `Target.encode` takes them."""
    manifest = json.loads((root / "manifest.json").read_bytes())
    keys = {name: split.samples["key"].tolist() for name, split in ShardSet.open(root).splits.items()}
    for split, values in targets.items():
        name = f"index/{split}.npy"
        rows = io.BytesIO()
        np.save(rows, target.encode(keys[split], values))
        data = rows.getvalue()
        (root / name).write_bytes(data)
        manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest |= {"classes": list(target.classes), "target": target.to_json()}
    (root / "manifest.json").write_bytes(manifest_bytes(manifest))
    return ShardSet.open(root)
