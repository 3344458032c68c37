"""The stream: one planned sequence of batches for a whole progressive-resizing run.

    from pipeline import Loader, Plan, Recipe, ShardSet

`recipe`, `shards`, `plan` and `rng` are the contract (no torch, no DALI); `reader`, `graph` and `loader` the
stream. The loader is imported on first use, so that the contract can be used without DALI.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .augment import Augment
from .errors import ResoluteError
from .plan import BatchSpec, Plan
from .recipe import Recipe, Stage
from .shards import ShardSet

if TYPE_CHECKING:
    from .foreign import open_webdataset
    from .loader import Batch, Loader

__all__ = ["Augment", "Batch", "BatchSpec", "Loader", "Plan", "Recipe", "ResoluteError", "ShardSet", "Stage",
           "open_webdataset"]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in ("Batch", "Loader"):
        from . import loader

        return getattr(loader, name)
    if name == "open_webdataset":
        from .foreign import open_webdataset

        return open_webdataset
    raise AttributeError(name)
