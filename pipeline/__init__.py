"""The data pipeline: one planned sequence of batches for a complete progressive-resizing run.

    from pipeline import Loader, Plan, ShardSet, Stage

    report/    toolkit of the HTML reports of prep and train
    storage/   bytes from disks and object stores
    dataset/   shard sets, and third-party WebDataset tars
    plan/      samples, crops, flips and mixes of batch i
    graph/     decoding and augmentation in one DALI graph
    loader/    iterates over the batches, for a training loop

Each package imports only those above it; `storage`, `dataset` and `plan` need neither torch nor DALI.
Names are imported on first use, so that commands can install their signal handling before anything slow is loaded.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .dataset.shard_set import ShardSet
    from .dataset.webdataset.open import open_webdataset
    from .errors import ResoluteError
    from .loader.loader import Batch, Loader
    from .plan.plan import BatchSpec, Plan
    from .plan.stage import Augment, Stage

__all__ = ["Augment", "Batch", "BatchSpec", "Loader", "Plan", "ResoluteError", "ShardSet", "Stage", "open_webdataset"]

_MODULES = {
    "Augment": "plan.stage", "Batch": "loader.loader", "BatchSpec": "plan.plan", "Loader": "loader.loader",
    "Plan": "plan.plan", "ResoluteError": "errors", "ShardSet": "dataset.shard_set", "Stage": "plan.stage",
    "open_webdataset": "dataset.webdataset.open",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
