"""Measures one loader: runs a job, read as JSON from standard input, and writes the result to standard output.

    python -m resolute.benchmarks.loaders.child

It runs with the interpreter that has the loader. The libraries' output goes to standard error.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from resolute.benchmarks.proc import cpu_time

from .job import Job
from .tars import Tars

__all__ = ["TASKS", "adapter", "clock", "main", "run", "synchronise", "timed"]


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # sync: ends the timed interval; batches and steps are asynchronous


def rate(module: Any, job: Job) -> dict[str, Any]:
    """`timed` over `job.seconds` after `job.warm_up` batches, and {"first_batch_s", "layout"}."""
    (res,), device = job.resolutions, torch.device(job.device)
    began = time.perf_counter()
    with closing(module.stream(job)) as stream:
        first = next(stream)
        synchronise(device)
        first_batch_s = time.perf_counter() - began
        # why: all loaders must do the same work
        assert first.shape == (job.batch_size, 3, res, res), first.shape
        assert str(first.dtype) == f"torch.{job.dtype}", first.dtype
        layout = "NCHW" if first.is_contiguous() else "NHWC"
        for _ in range(job.warm_up - 1):
            next(stream)
        return {
            **timed(stream, len, seconds=job.seconds, device=device),
            "first_batch_s": first_batch_s,
            "layout": layout,
        }


def timed(batches: Iterator[Any], use: Callable[[Any], int], *, seconds: float, device: torch.device) -> dict[str, Any]:
    """Images/s of `use(batch)`, which returns how many they were, for `seconds` s, and the CPU time that it took.

    cores_busy: of this process and its children. host_us_per_image: CPU time of the main thread alone, which is what
    loading costs the thread of a training loop.
    """
    synchronise(device)
    images, before, started, busy_s = 0, cpu_time(os.getpid()), time.perf_counter(), time.thread_time()
    while time.perf_counter() - started < seconds or not images:
        images += use(next(batches))
    busy_s = time.thread_time() - busy_s
    synchronise(device)  # sync: ends the timed interval
    elapsed_s = time.perf_counter() - started
    after = cpu_time(os.getpid())
    used_s = after[0] - before[0] if before and after else None
    return {
        "images_per_s": images / elapsed_s,
        "cpu_s_per_1000": None if used_s is None else 1000 * used_s / images,
        "cores_busy": None if used_s is None else used_s / elapsed_s,
        "host_us_per_image": 1e6 * busy_s / images,
        "processes": after[1] if after else None,
        "threads": after[2] if after else None,
    }


def clock(module: Any, job: Job) -> list[list[float]]:
    """Seconds that a consumer waited for each batch at each resolution, [resolution][batch].

    It sleeps `job.steps_s[resolution]` s after each batch, like a training step; with () it takes batches at once.
    """
    waits_s: dict[int, list[float]] = {}
    with closing(module.stream(job)) as stream:
        while True:
            began = time.perf_counter()
            batch = next(stream, None)
            synchronise(torch.device(job.device))  # sync: the wait ends when the batch is on the device
            now = time.perf_counter()
            if batch is None:
                return [*waits_s.values()]
            waits_s.setdefault(batch.shape[-1], []).append(now - began)
            if job.steps_s:
                time.sleep(job.steps_s[len(waits_s) - 1])


def crops(module: Any, job: Job) -> dict[str, str]:
    """ "RES FRAC" -> file name, in the scratch folder, of `images` and their `crops` (see `centre_crops`)."""
    files = {}
    for res, frac in itertools.product(job.resolutions, job.crop_fracs):
        tars = Tars(job.shards, res, "val")
        jpegs = [tars.jpeg(i) for i in range(min(job.images, len(tars)))]
        images, crops = module.centre_crops(replace(job, resolutions=(res,), crop_frac=frac), jpegs)
        files[f"{res} {frac}"] = name = f"{job.module}-{job.variant}-{res}-{frac}.npz"
        np.savez(Path(job.scratch, name), images=images, crops=crops)
    return files


TASKS: dict[str, Any] = {
    "rate": rate,
    "clock": clock,
    "crops": crops,
    "prepare": lambda module, job: module.prepare(job),
}


def adapter(job: Job) -> Any:
    """The module of the job's loader."""
    return importlib.import_module(f"{__package__}.{job.module}")


def run(job: Job) -> Any:
    """The result of a job, in this process."""
    return TASKS[job.task](adapter(job), job)


def main() -> None:
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    result = run(Job.from_json(sys.stdin.read()))
    with answer:
        json.dump(result, answer)


if __name__ == "__main__":
    main()
    os._exit(0)  # why: after FFCV's writer, the interpreter may hang while it ends
