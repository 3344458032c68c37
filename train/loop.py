"""The training loop: every batch of a run, as the loader gives it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from resolute.pipeline.loader.batch import Batch
from resolute.pipeline.plan.plan import BatchSpec
from resolute.train.logs.metrics import Meter

from .learner import Learner

__all__ = ["run_batches"]


def run_batches(batches: Iterable[Batch], learner: Learner, meter: Meter, after: Callable[[BatchSpec], bool]) -> bool:
    """Run all batches. `after`, called after each, may save and print, and returns False to stop.

    Returns whether all batches ran.
    """
    source = iter(batches)
    while True:
        start = time.perf_counter()
        batch = next(source, None)
        ready = time.perf_counter()
        if batch is None:
            return True
        if batch.spec.split == "train":
            began = meter.mark()
            loss, lr = learner.train_step(batch)
            marks, compute_s = (began, meter.mark()), time.perf_counter() - ready
            meter.step(
                batch.spec, loss, lr, momentum=learner.momentum, wait_s=ready - start, compute_s=compute_s, marks=marks
            )
        else:
            scores = learner.eval_step(batch)
            meter.eval_step(batch.spec, scores, elapsed_s=time.perf_counter() - start)
        if not after(batch.spec):
            return False
