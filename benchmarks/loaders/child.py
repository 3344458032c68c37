"""Runs a peer's job, read as JSON from standard input, and writes the result as JSON to standard output.

    python -m benchmarks.peers.child

It runs with the peer's own interpreter. The libraries' output goes to standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from .cpu import tree
from .job import Job
from .tars import Tars

__all__ = ["TASKS", "main"]


def rate(module: Any, job: Job) -> dict[str, Any]:
    """Images/s over `job.seconds` after `job.warm_up` batches, and the CPU time used."""
    (res,) = job.resolutions
    began = time.perf_counter()
    with closing(module.stream(job)) as stream:
        first = next(stream)
        first_batch_s = time.perf_counter() - began
        # why: all peers must do the same work
        assert first.shape == (job.batch_size, 3, res, res), first.shape
        assert str(first.dtype) == "torch.float32", first.dtype
        nchw = first.is_contiguous()
        for _ in range(job.warm_up - 1):
            next(stream)
        images, before, started = 0, tree(os.getpid()), time.perf_counter()
        while time.perf_counter() - started < job.seconds or not images:
            images += len(next(stream))
        elapsed_s = time.perf_counter() - started
        after = tree(os.getpid())
    used = before is not None and after is not None
    return {
        "images_per_s": images / elapsed_s,
        "cpu_s_per_1000": 1000 * (after[0] - before[0]) / images if used else None,  # type: ignore[index]
        "cores_busy": (after[0] - before[0]) / elapsed_s if used else None,  # type: ignore[index]
        "processes": after[1] if after else None,
        "threads": after[2] if after else None,
        "first_batch_s": first_batch_s,
        "layout": "NCHW" if nchw else "NHWC",
    }


def clock(module: Any, job: Job) -> list[list[float]]:
    """Seconds from batch to batch for each resolution, taking batches as fast as possible."""
    times: dict[int, list[float]] = {res: [] for res in job.resolutions}
    with closing(module.stream(job)) as stream:
        began = time.perf_counter()
        for batch in stream:
            now = time.perf_counter()
            times[batch.shape[-1]].append(now - began)
            began = now
    return [times[res] for res in job.resolutions]


def crops(module: Any, job: Job) -> dict[str, str]:
    """"RES FRAC" -> file name, in the scratch folder, of `images` and `windows` (see the peers' `centre_crops`)."""
    files = {}
    for res in job.resolutions:
        tars = Tars(job.shards, res, "val")
        jpegs = [tars.jpeg(i) for i in range(min(job.images, len(tars)))]
        for frac in job.crop_fracs:
            images, windows = module.centre_crops(replace(job, resolutions=(res,), crop_frac=frac), jpegs)
            files[f"{res} {frac}"] = name = f"{job.module}-{job.variant}-{res}-{frac}.npz"
            np.savez(Path(job.scratch, name), images=images, windows=windows)
    return files


TASKS: dict[str, Any] = {
    "rate": rate, "clock": clock, "crops": crops, "prepare": lambda module, job: module.prepare(job)
}  # fmt: skip


def main() -> int:
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    job = Job.read(sys.stdin.read())
    module = importlib.import_module(f"{__package__}.{job.module}")
    result = TASKS[job.task](module, job)
    with answer:
        json.dump(result, answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
