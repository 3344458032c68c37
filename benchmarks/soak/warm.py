"""Work that every forked command would repeat, done once in the parent process, without starting threads."""

from __future__ import annotations

import sys
from typing import Any

from numba.core.dispatcher import Dispatcher

import pipeline.graph.graph
from pipeline.plan.sampling import Features

__all__ = ["load_compiled", "trace_graph"]


def load_compiled() -> None:
    """Load all of this project's compiled functions from numba's cache."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in ("pipeline", "prep", "train"):
            continue
        dispatchers: list[Any] = [value for value in vars(module).values() if isinstance(value, Dispatcher)]
        for value in dispatchers:
            if value._can_compile and hasattr(value._cache, "_cache_file"):
                for key in list(value._cache._cache_file._load_index()):
                    value.compile(key[0])


def trace_graph() -> None:
    """Let DALI translate the graph of a run with mixing, which takes seconds and is cached per function."""
    pipeline.graph.graph._graph(
        batch_size=4, num_threads=1, device_id=None, prefetch_queue_depth=2, exec_dynamic=True, decode_device="cpu",
        features=Features(mixing=True), on_cpu=True, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), half=False,
        largest_res=64,
    )  # fmt: skip
