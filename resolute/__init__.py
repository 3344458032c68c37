"""Resolute: progressive-resizing training of image classifiers, with stage changes that cost less than a step.

`from resolute import …` has what a training loop needs: `Loader`, `Plan`, `Stage`, `Augment`, `ShardSet`, `Target`,
`Batch`, and the errors `ResoluteError`, `DamagedSample` and `StorageError`. Each name is imported when it is first
used, so that `import resolute` costs nothing.

`pipeline`, `prep`, `train` and `benchmarks` are links to the folders beside this one; code imports them from here
(`from resolute.pipeline.loader.loader import Loader`), as their bare names may be those of a user's own modules.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if sys.platform != "linux":
    raise ImportError(f"resolute: runs on Linux only, as NVIDIA DALI does, got {sys.platform}; on Windows, use WSL 2")

if TYPE_CHECKING:
    from .errors import DamagedSample, ResoluteError, StorageError
    from .pipeline.dataset.shard_set import ShardSet
    from .pipeline.dataset.target import Target
    from .pipeline.loader.batch import Batch
    from .pipeline.loader.loader import Loader
    from .pipeline.plan.plan import Plan
    from .pipeline.plan.stage import Augment, Stage

__all__ = [
    "Augment",
    "Batch",
    "DamagedSample",
    "Loader",
    "Plan",
    "ResoluteError",
    "ShardSet",
    "Stage",
    "StorageError",
    "Target",
    "__version__",
]

__version__ = "0.2.0"
_MODULES = {
    "Augment": "pipeline.plan.stage",
    "Batch": "pipeline.loader.batch",
    "DamagedSample": "errors",
    "Loader": "pipeline.loader.loader",
    "Plan": "pipeline.plan.plan",
    "ResoluteError": "errors",
    "ShardSet": "pipeline.dataset.shard_set",
    "Stage": "pipeline.plan.stage",
    "StorageError": "errors",
    "Target": "pipeline.dataset.target",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
