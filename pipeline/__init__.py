"""The stream: one planned sequence of batches for a whole progressive-resizing run.

    from pipeline import Loader, Plan, Recipe, ShardSet

`recipe`, `shards`, `plan` and `rng` need neither torch nor DALI; `reader`, `graph` and `loader` are the stream.
Every name is imported on first use, so that a command line can guard itself before anything slow is loaded.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .augment import Augment
    from .errors import ResoluteError
    from .foreign import open_webdataset
    from .loader import Batch, Loader
    from .plan import BatchSpec, Plan
    from .recipe import Recipe, Stage
    from .shards import ShardSet

__all__ = ["Augment", "Batch", "BatchSpec", "Loader", "Plan", "Recipe", "ResoluteError", "ShardSet", "Stage",
           "open_webdataset"]  # fmt: skip

_MODULES = {
    "Augment": "augment", "Batch": "loader", "BatchSpec": "plan", "Loader": "loader", "Plan": "plan",
    "Recipe": "recipe", "ResoluteError": "errors", "ShardSet": "shards", "Stage": "recipe",
    "open_webdataset": "foreign",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
