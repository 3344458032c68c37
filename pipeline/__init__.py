"""The stream: one planned sequence of batches for a whole progressive-resizing run.

    from pipeline import Loader, Plan, ShardSet, Stage

    storage/   bytes from disks and object stores
    dataset/   shard sets, and WebDataset tars that others made
    plan/      which samples, crops, flips and mixes make up batch i of the run
    graph/     what happens to the pixels, in one DALI graph
    loader/    the run's batches, for a training loop

Each imports only what stands above it. `storage`, `dataset` and `plan` need neither torch nor DALI.
Every name is imported on first use, so that a command line can guard itself before anything slow is loaded.
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
