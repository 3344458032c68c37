"""Measures the time lost at a change of resolution.

    python -m resolute.benchmarks.change --shards shards [--only ours,pillow]

Each loader runs over all resolutions of the set, ascending. The cost of a change is the time of the first N
batches after it minus N steady batches of the new stage. `around` adds the time lost by the last N batches before it,
so that work moved ahead of the change counts too. N is 5, rounded up to a multiple of the workers; the steady batch
time is the median over rounds of the mean of a round. why: W workers deliver W batches at once and then pause, so a
plain median of batch times is arbitrary, mostly in our favour. Two consumers:

drained  takes batches as fast as possible; the time from batch to batch is measured.
paced    sleeps a fixed time per batch, like a training step; only the time waiting for data is measured. The step takes
         1.3 times the slowest loader's drained batch time at that resolution, so that no loader is the bottleneck and
         only the change itself remains.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from resolute.console import guard_process

    guard_process()

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from resolute.cli import program
from resolute.errors import ResoluteError

from .cli import default_file, show_progress, spread, summarize, text_table
from .loaders.registry import LOADERS
from .loaders.run import Runner, compare
from .options import ChangeOptions

__all__ = ["around_s", "cost_s", "first_batches", "main", "measure", "steady_s", "summary", "table"]

_FIRST = 5  # minimum number of batches counted after a change of resolution
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
    """Switch cost of a stage from its batch times in s."""
    first = first_batches(workers)
    return sum(times_s[:first]) - first * steady_s(times_s, workers)


def around_s(before_s: Sequence[float], times_s: Sequence[float], workers: int) -> float:
    """The cost plus the time that the last batches of the previous stage took beyond its steady ones, in s."""
    first = first_batches(workers)
    return cost_s(times_s, workers) + sum(before_s[-first:]) - first * steady_s(before_s, workers)


def measure(runner: Runner, *, batches: int) -> dict[str, Any]:
    """{"batches", "first", "consumers": {"drained" | "paced": {"step_s", "changes", "batch_s"}}}.

    "changes": [{"from_res", "to_res", "loaders": {name: {"cost_s", "cost_steps", "around_s", "slowest_s",
    "slowest_ratio", "steady_s"}}}], all `repeated`; "batch_s": {name: [round][stage][batch]}.
    """
    resolutions, workers = runner.job.resolutions, runner.job.workers

    def clock(kind: str, steps_s: tuple[float, ...]) -> dict[str, list[list[list[float]]]]:
        raw: dict[str, list[list[list[float]]]] = {name: [] for name in runner.loaders}
        for number in range(runner.rounds):
            for name in runner.loaders:
                show_progress(f"stage changes, {kind}, round {number + 1} of {runner.rounds}: {name}")
                times = runner.run(name, task="clock", batches=batches, steps_s=steps_s)
                # why: a loader that did not change the resolution would have no cost
                assert [len(stage) >= batches for stage in times] == [True] * len(resolutions), (name, times)
                raw[name].append(times)
        return raw

    drained = clock("drained", ())
    steps_s = [
        _PACE * max(statistics.median(steady_s(run[i], workers) for run in runs) for runs in drained.values())
        for i in range(len(resolutions))
    ]
    paced = clock("paced", tuple(steps_s))
    return {
        "batches": batches,
        "first": first_batches(workers),
        "consumers": {
            name: {"step_s": step_s, "changes": summary(raw, resolutions, workers), "batch_s": raw}
            for name, step_s, raw in (("drained", None, drained), ("paced", steps_s, paced))
        },
    }


def summary(
    raw: Mapping[str, Sequence[Sequence[Sequence[float]]]], resolutions: Sequence[int], workers: int
) -> list[dict[str, Any]]:
    """ "changes" of `measure`, from the seconds of each loader's batches, [round][resolution][batch]."""

    def figures(run: Sequence[Sequence[float]], i: int) -> dict[str, float]:
        slowest_s, steady = max(run[i][: first_batches(workers)]), steady_s(run[i], workers)
        return {
            "cost_s": cost_s(run[i], workers),
            "cost_steps": cost_s(run[i], workers) / steady,
            "around_s": around_s(run[i - 1], run[i], workers),
            "slowest_s": slowest_s,
            "slowest_ratio": slowest_s / steady,
            "steady_s": steady,
        }

    return [
        {
            "from_res": before,
            "to_res": after,
            "loaders": {name: summarize([figures(run, i) for run in runs]) for name, runs in raw.items()},
        }
        for i, (before, after) in enumerate(itertools.pairwise(resolutions), start=1)
    ]


def table(result: dict[str, Any]) -> str:
    """One table per consumer, times in ms."""
    tables = []
    for consumer in result["consumers"].values():
        rows = [
            [
                f"{change['from_res']} -> {change['to_res']} px",
                LOADERS[name].title,
                LOADERS[name].at_change,
                spread(values["cost_s"], 1, 1e3),
                spread(values["around_s"], 1, 1e3),
                f"{1e3 * values['slowest_s']['median']:.1f}",
                f"{1e3 * values['steady_s']['median']:.2f}",
            ]
            for change in consumer["changes"]
            for name, values in change["loaders"].items()
        ]
        title = "stage change, drained: time per batch"
        if consumer["step_s"]:
            steps = " / ".join(f"{1e3 * step_s:.0f}" for step_s in consumer["step_s"])
            title = f"stage change, a consumer of {steps} ms per batch: its wait for data"
        head = ["", "loader", "at the change", "cost ms", "around ms", f"slowest of {result['first']} ms", "steady ms"]
        tables.append(text_table(title, head, rows, left=3))
    return "\n\n".join(tables)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""

    def work(options: ChangeOptions) -> None:
        least = 3 * first_batches(options.workers)
        if options.batches < least:
            raise ResoluteError(f"--batches: got {options.batches}, expected at least {least}; raise it")

        def both(runner: Runner) -> tuple[dict[str, Any], str]:
            result = measure(runner, batches=options.batches)
            return {"change": result}, table(result)

        compare(options, both, out=options.out or default_file("change"), rates=False, least=2)

    return program(
        "python -m resolute.benchmarks.change",
        ChangeOptions,
        work,
        words,
        help="Measure the time that each image loader loses at a change of resolution.",
        positional="shards",
    )


if __name__ == "__main__":
    from resolute.console import run_main

    run_main(main)
