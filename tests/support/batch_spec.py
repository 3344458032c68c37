"""A batch's specification by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from resolute.pipeline.dataset.format import STORED
from resolute.pipeline.plan.augment_params import UNMIXED, used_ops
from resolute.pipeline.plan.plan import BatchSpec
from resolute.pipeline.plan.rows import empty_rows, train_rows
from resolute.pipeline.plan.stage import Augment

__all__ = ["batch_spec", "drawn_rows"]


def batch_spec(n: int, *, res: int, rows: NDArray[np.void] | None = None, **changed: Any) -> BatchSpec:
    """The first training batch of a run at `res` px: n samples, each its neighbour's partner, nothing mixed.

    `rows`: other rows than these, which are copied. `changed`: fields of `BatchSpec` or of its rows, see `row_dtype`.
    """
    header: dict[str, Any] = {
        "index": 0,
        "step": 0,
        "split": "train",
        "stage": 0,
        "epoch": 0,
        "res": res,
        "stored_res": res,
        "last": False,
        "global_size": n,
        "ids": np.arange(n),
    }
    if rows is None:
        rows = empty_rows(n, np.shape(changed["kinds"])[1] if "kinds" in changed else 0)
        rows["partner"], rows["lam"] = np.arange(n) ^ 1, 1
    rows = rows.copy()
    for name, values in changed.items():
        (header if name in header else rows)[name] = values
    rows["tag"], rows["place"], rows["res"] = header["index"], np.arange(n), res
    mixed = rows["mode"] != UNMIXED
    rows["shared"] = mixed
    rows["shared"][rows["partner"][mixed]] = 1
    return BatchSpec(**header, rows=rows)


def drawn_rows(
    augment: Augment, ids: NDArray[np.int64], *, res: int, seed: int = 0, epoch: int = 0
) -> NDArray[np.void]:
    """The rows (N,) of samples `ids` (N,) of `res` x `res` px, in the first batch of a run with `augment` alone."""
    stored = np.zeros(len(ids), STORED)
    stored["width"] = stored["height"] = res
    slots = used_ops([augment]).slots
    drawn = {"seed": seed, "epoch": epoch, "res": res, "batch": 0, "index": 0}
    return train_rows(augment, slots, ids=ids, counters=ids, stored=stored, **drawn)
