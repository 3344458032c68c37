"""Cost of a stage change: this project's loader, and a torch DataLoader that is rebuilt at each change.

One run over all resolutions of the set, ascending. The cost of a change is the time of the first N batches after it
minus N steady batches of the new stage. `around` adds the time lost by the last N batches before it, so that work
moved ahead of the change counts too. N is 5, rounded up to a multiple of the workers; the steady batch time is the
median over rounds of the mean of a round. why: W workers deliver W batches at once and then pause, so a plain median of
batch times is arbitrary, mostly in our favour. Two consumers:

drained  takes batches as fast as possible; the time from batch to batch is measured.
paced    sleeps a fixed time per batch, like a training step; only the time waiting for data is measured. The step takes
         1.3 times the slower loader's drained batch time at that resolution, so that neither loader is the bottleneck
         and only the change itself remains.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from typing import Any

import torch

from pipeline.dataset.shard_set import ShardSet
from pipeline.errors import ResoluteError

from .loader import synchronise
from .ours import full_batches, our_batches, train_plan
from .peer import peer_batches
from .table import each_repeated, spread, text_table

__all__ = ["around_s", "clock", "cost_s", "first_batches", "measure", "steady_s", "summary", "table"]

_FIRST = 5  # minimum number of batches counted after a change
_PACE = 1.3  # paced consumer's step time / drained batch time


def first_batches(workers: int) -> int:
    """Number of batches counted after a change: `_FIRST` rounded up to a multiple of `workers`."""
    return workers * math.ceil(_FIRST / workers)


def steady_s(times_s: Sequence[float], workers: int) -> float:
    """A stage's steady batch time in s: median over rounds of their mean, without its first and last batches."""
    first = first_batches(workers)
    inner = times_s[first : len(times_s) - first]
    rounds = [inner[i : i + workers] for i in range(0, len(inner) - workers + 1, workers)]
    return statistics.median(statistics.fmean(times) for times in rounds)


def cost_s(times_s: Sequence[float], workers: int) -> float:
    """Switch cost of a stage from its batch times in s. Source: our design, section 7."""
    first = first_batches(workers)
    return sum(times_s[:first]) - first * steady_s(times_s, workers)


def around_s(before_s: Sequence[float], times_s: Sequence[float], workers: int) -> float:
    """The cost plus the time that the last batches of the previous stage took beyond its steady ones, in s."""
    first = first_batches(workers)
    return cost_s(times_s, workers) + sum(before_s[-first:]) - first * steady_s(before_s, workers)


def slowest_ratio(times_s: Sequence[float], workers: int) -> float:
    """Slowest of the first batches / steady batch time."""
    return max(times_s[: first_batches(workers)]) / steady_s(times_s, workers)


def measure(
    shards: ShardSet, *, device: torch.device, threads: int, batch_size: int, repeats: int, batches: int | None = None,
    show_progress: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """{"batches", "consumers": {"drained" | "paced": {"step_s", "changes", "batch_s"}}}; see `summary`.

    `batches`: per stage; by default ten rounds of the workers and at least 30.
    """
    resolutions = list(shards.resolutions)
    if len(resolutions) < 2:
        raise ResoluteError(
            f"{shards.root}: got one resolution, expected two or more for a stage change; leave switch out with --only"
        )
    batches = batches or max(30, 10 * threads)
    stages = [full_batches(shards, res, batches=batches, batch_size=batch_size) for res in resolutions]
    plan = train_plan(shards, stages)
    per_stage = [sum(s.batches for s in plan.passes if s.stage == i) for i in range(len(stages))]
    loaders: dict[str, Callable[[], Generator[torch.Tensor, None, None]]] = {
        "ours": lambda: our_batches(plan, device=device, threads=threads),
        "peer": lambda: peer_batches(
            shards, resolutions, batches=batches, batch_size=batch_size, device=device, workers=threads
        ),
    }

    def runs(kind: str, steps_s: Sequence[float]) -> dict[str, list[list[list[float]]]]:
        raw: dict[str, list[list[list[float]]]] = {name: [] for name in loaders}
        for repeat in range(repeats):
            for name, start in loaders.items():
                show_progress(f"switch: {kind}, {name}, repeat {repeat + 1} of {repeats}")
                counts = per_stage if name == "ours" else [batches] * len(resolutions)
                with closing(start()) as stream:
                    raw[name].append(clock(stream, counts, steps_s, device))
        return raw

    drained = runs("drained", [0.0] * len(resolutions))
    steps_s = [
        _PACE * max(statistics.median(steady_s(run[i], threads) for run in each) for each in drained.values())
        for i in range(len(resolutions))
    ]
    paced = runs("paced", steps_s)
    return {
        "batches": batches, "first": first_batches(threads), "resolutions": resolutions,
        "consumers": {
            name: {"step_s": step_s, "changes": summary(raw, resolutions, threads), "batch_s": raw}
            for name, step_s, raw in (("drained", None, drained), ("paced", steps_s, paced))
        },
    }  # fmt: skip


def clock(
    stream: Iterator[Any], counts: Sequence[int], steps_s: Sequence[float], device: torch.device
) -> list[list[float]]:
    """Seconds waited for each batch of each stage, by a consumer with a step time of `steps_s[stage]` s."""
    times_s = []
    for count, step_s in zip(counts, steps_s, strict=True):
        stage_s = []
        for _ in range(count):
            began = time.perf_counter()
            next(stream)
            synchronise(device)  # sync: the wait ends when the batch is on the device
            stage_s.append(time.perf_counter() - began)
            if step_s:
                time.sleep(step_s)
        times_s.append(stage_s)
    return times_s


def summary(
    runs: dict[str, list[list[list[float]]]], resolutions: Sequence[int], workers: int, *, of: str = "loaders",
    without: str = "",
) -> list[dict[str, Any]]:  # fmt: skip
    """[{"from_res", "to_res", of: {name: {"cost_s", ...}}}], values `repeated`; `runs` {name: [run][stage][batch]}."""

    def figures(run: list[list[float]], i: int) -> dict[str, float]:
        results = {
            "cost_s": cost_s(run[i], workers), "around_s": around_s(run[i - 1], run[i], workers),
            "slowest_s": max(run[i][: first_batches(workers)]), "slowest_ratio": slowest_ratio(run[i], workers),
            "steady_s": steady_s(run[i], workers),
        }  # fmt: skip
        results.pop(without, None)
        return results

    return [
        {"from_res": before, "to_res": after,
         of: {name: each_repeated([figures(run, i) for run in each]) for name, each in runs.items()}}
        for i, (before, after) in enumerate(itertools.pairwise(resolutions), start=1)
    ]  # fmt: skip


def table(result: dict[str, Any]) -> str:
    """One table per consumer, times in ms."""
    tables = []
    for results in result["consumers"].values():
        rows = []
        for change in results["changes"]:
            for name, values in change["loaders"].items():
                rows.append([
                    f"{change['from_res']} -> {change['to_res']} px",
                    "DataLoader rebuilt" if name == "peer" else name, spread(values["cost_s"], 1, 1e3),
                    spread(values["around_s"], 1, 1e3), f"{1e3 * values['slowest_s']['median']:.1f}",
                    f"{1e3 * values['steady_s']['median']:.2f}",
                ])  # fmt: skip
        title = "stage change, drained: time a batch"
        if results["step_s"]:
            steps = " / ".join(f"{1e3 * step_s:.0f}" for step_s in results["step_s"])
            title = f"stage change, a consumer of {steps} ms a batch: its wait for data"
        header = ["", "loader", "cost ms", "around ms", f"slowest of {result['first']} ms", "steady ms"]
        tables.append(text_table(title, header, rows, left=2))
    return "\n\n".join(tables)
