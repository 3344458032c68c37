"""A batch's specification by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from resolute.pipeline.plan.plan import BatchSpec


def batch_spec(n: int, *, res: int, **changed: Any) -> BatchSpec:
    """The first training batch of a run at `res` px: n samples, each its neighbour's partner, nothing mixed."""
    plain: dict[str, Any] = {
        "index": 0,
        "step": 0,
        "split": "train",
        "stage": 0,
        "epoch": 0,
        "stored_res": res,
        "last": False,
        "global_size": n,
        "ids": np.arange(n),
        "crops": np.zeros((n, 4), np.int32),
        "flips": np.zeros(n, bool),
        "partners": np.arange(n, dtype=np.int32) ^ 1,
        "modes": np.zeros(n, np.int32),
        "lam": np.ones(n, np.float32),
        "boxes": np.zeros((n, 4), np.int32),
    }
    return BatchSpec(**{**plain, "res": res, **changed})
