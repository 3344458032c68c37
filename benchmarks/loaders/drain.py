"""Throughput of the loader in images/s at each resolution, compared with torch's DataLoader and Pillow.

Both read the same stored training images, apply random resized crop, flip and normalisation, and deliver float32
batches on the device. They run one at a time, interleaved; after a warm-up each is drained for a few seconds. Host time
is the CPU time of the main thread alone: what loading costs the training loop's thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any

import torch

from pipeline.dataset.shard_set import ShardSet

from .ours import full_batches, our_batches, train_plan
from .peer import peer_batches
from .table import each_repeated, spread, text_table

__all__ = ["drain", "measure", "synchronise", "table"]

_FASTEST = 100_000  # images/s; upper bound of any loader, so that none runs out of batches


def measure(
    shards: ShardSet, *, device: torch.device, threads: int, batch_size: int, seconds: float, repeats: int,
    show_progress: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """{"res": [{"res", "loaders": {name: {"images_per_s", "host_us_per_image", "first_batch_s"}}}]}.

    Every value is `repeated`; each repeat measures `seconds` s after a warm-up.
    """
    warm_up = max(8, 2 * threads)
    batches = warm_up + math.ceil(seconds * _FASTEST / batch_size)
    results = []
    for res in shards.resolutions:
        plan = train_plan(shards, [full_batches(shards, res, batches=batches, batch_size=batch_size)])

        def ours(decode: Any = None, plan: Any = plan) -> Generator[torch.Tensor, None, None]:
            return our_batches(plan, device=device, threads=threads, decode=decode)

        def peer(res: int = res) -> Generator[torch.Tensor, None, None]:
            return peer_batches(shards, [res], batches=batches, batch_size=batch_size, device=device, workers=threads)

        loaders: dict[str, Callable[[], Generator[torch.Tensor, None, None]]] = {"ours": ours, "peer": peer}
        if device.type == "cuda":
            loaders["ours, CPU decode"] = lambda ours=ours: ours("cpu")  # type: ignore[misc]
        raw: dict[str, list[dict[str, float]]] = {name: [] for name in loaders}
        for repeat in range(repeats):
            for name, start in loaders.items():
                show_progress(f"loader: {res} px, {name}, repeat {repeat + 1} of {repeats}")
                with closing(start()) as stream:
                    raw[name].append(drain(stream, seconds=seconds, warm_up=warm_up, device=device))
        results.append({"res": res, "loaders": {name: each_repeated(each) for name, each in raw.items()}})
    return {"warm_up_batches": warm_up, "res": results}


def drain(
    stream: Generator[torch.Tensor, None, None], *, seconds: float, warm_up: int, device: torch.device
) -> dict[str, float]:
    """Rates while taking batches as fast as possible for `seconds` s, after `warm_up` batches."""
    began = time.perf_counter()
    next(stream)
    synchronise(device)
    first_batch_s = time.perf_counter() - began
    for _ in range(warm_up - 1):
        next(stream)
    synchronise(device)
    images, started, busy = 0, time.perf_counter(), time.thread_time()
    while time.perf_counter() - started < seconds or not images:
        images += len(next(stream))
    busy = time.thread_time() - busy
    synchronise(device)
    elapsed_s = time.perf_counter() - started
    return {
        "images_per_s": images / elapsed_s, "host_us_per_image": 1e6 * busy / images, "first_batch_s": first_batch_s
    }  # fmt: skip


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # sync: ends the timed interval; batches and steps are asynchronous


def table(result: dict[str, Any]) -> str:
    """One row per resolution and loader; the ratio is ours / the peer's, of medians."""
    rows = []
    for entry in result["res"]:
        base = entry["loaders"]["peer"]["images_per_s"]["median"]
        for name, values in entry["loaders"].items():
            rows.append([
                f"{entry['res']} px", "DataLoader + Pillow" if name == "peer" else name,
                spread(values["images_per_s"]), f"{values['images_per_s']['median'] / base:.2f}x",
                f"{values['host_us_per_image']['median']:.1f}", f"{values['first_batch_s']['median']:.2f}",
            ])  # fmt: skip
    header = ["", "loader", "images/s", "ratio", "host us/image", "first batch s"]
    return text_table("loader alone: median (min..max)", header, rows, left=2)
