"""Measures the time lost at a change between stages or epochs.

    python -m resolute.benchmarks.change --shards shards [--only ours,pillow]     # of resolution, for every loader
    python -m resolute.benchmarks.change --shards shards --kinds                  # of every kind, for ours

The first runs each loader over all resolutions of the set, ascending. The cost of a change is the time of the first N
batches after it minus N steady batches of the new stage. `around` adds the time lost by the last N batches before it,
so that work moved ahead of the change counts too. N is 5, rounded up to a multiple of the workers; the steady batch
time is the median over rounds of the mean of a round. why: W workers deliver W batches at once and then pause, so a
plain median of batch times is arbitrary, mostly in our favour. Two consumers:

drained  takes batches as fast as possible; the time from batch to batch is measured.
paced    sleeps a fixed time per batch, like a training step; only the time waiting for data is measured. The step takes
         1.3 times the slowest loader's drained batch time at that resolution, so that no loader is the bottleneck and
         only the change itself remains.

`--kinds` runs such a paced consumer over one plan with changes of resolution, batch size, fraction, augmentation, order
and so on. The time lost is how much longer it waited for the first ten batches after a change than in the steady part
of that pass, in ms and in steady steps.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from resolute.console import guard_process

    guard_process()

import argparse
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from resolute.errors import ResoluteError

from .cli import Parser, check_numbers, command, repeated, show_progress, spread, summarize, text_table
from .loaders.registry import LOADERS
from .loaders.run import Runner, add_arguments, compare
from .record import check_writable, header, read_into_cache, write

if TYPE_CHECKING:
    from resolute.pipeline.dataset.shard_set import ShardSet
    from resolute.pipeline.plan.plan import Phase, Plan
    from resolute.pipeline.plan.stage import Stage

__all__ = ["around_s", "cost_s", "first_batches", "main", "measure", "measure_kinds", "steady_s", "summary", "table"]

_FIRST = 5  # minimum number of batches counted after a change of resolution
_FIRST_OF_KIND = 10  # the same for --kinds: more than are prefetched
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

    "changes": [{"from_res", "to_res", "loaders": {name: {"cost_s", "around_s", "slowest_s", "slowest_ratio",
    "steady_s"}}}], all `repeated`; "batch_s": {name: [round][stage][batch]}.
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


def stages_of_kinds(shards: ShardSet, batch_size: int) -> list[tuple[str, Stage]]:
    """(kind of change, stage after the change) for consecutive stages."""
    from resolute.pipeline.plan.stage import Augment, Stage

    small, *_, large = shards.resolutions
    rich = Augment(
        policy="randaugment", jitter=(0.3, 0.3, 0.3, 0.1), random_erasing_prob=0.25, mixup_alpha=0.4, cutmix_alpha=1.0
    )

    def stage(res: int, size: int = batch_size, fraction: float = 1.0, **more: Any) -> Stage:
        return Stage(res=res, epochs=3 if fraction == 1.0 else 4, batch_size=size, fraction=fraction, **more)

    return [
        ("start", stage(small)),
        ("resolution, up", stage(large)),
        ("resolution, down", stage(small)),
        ("batch size, half", stage(small, batch_size // 2)),
        ("batch size, double", stage(small)),
        ("fraction 1 to 0.7", stage(small, fraction=0.7)),
        ("fraction 0.7 to 1", stage(small)),
        ("augmentation on", stage(small, augment=rich)),
        ("augmentation off", stage(small)),
        ("order, shuffled to windowed", stage(small, order="windowed")),
        ("order, block to full", stage(small)),
        ("all at once", stage(large, batch_size // 2, 0.7, augment=rich, order="windowed")),
    ]


def measure_kinds(shards: ShardSet, *, batch_size: int, rounds: int, threads: int) -> dict[str, Any]:
    """{"changes": [{"kind", "times", "lost_s", "lost_steps", "slowest_steps"}], "step_s", "waits_s"}.

    Each value is `repeated` over rounds, of the median over the changes of that kind.
    """
    from resolute.pipeline.plan.plan import Plan

    named = stages_of_kinds(shards, batch_size)
    plan = Plan(shards, [stage for _, stage in named], eval_batch_size=batch_size, eval_every_epochs=2)
    drained = _waits_s(plan, threads, ())
    steps_s = [_PACE * statistics.fmean(waits[len(waits) // 4 :]) for waits in drained]
    raw = [_waits_s(plan, threads, steps_s) for _ in range(rounds)]
    kinds = [_kind(before, after, named) for before, after in itertools.pairwise(plan.phases)]
    by_kind: dict[str, dict[str, list[float]]] = {}
    for waits in raw:
        lost = [_lost(*each) for each in zip(waits[1:], steps_s[1:], strict=True)]
        for kind in dict.fromkeys(kinds):
            values = by_kind.setdefault(kind, {"lost_s": [], "lost_steps": [], "slowest_steps": []})
            own = zip(*(each for each, of in zip(lost, kinds, strict=True) if of == kind), strict=True)
            for name, each in zip(values, own, strict=True):
                values[name].append(statistics.median(each))
    times = Counter(kinds)
    changes = [
        {"kind": kind, "times": times[kind], **{name: repeated(each) for name, each in values.items()}}
        for kind, values in by_kind.items()
    ]
    waits_s = [list(itertools.chain(*waits)) for waits in raw]
    return {
        "batch_size": batch_size,
        "first": _FIRST_OF_KIND,
        "step_s": steps_s,
        "changes": changes,
        "waits_s": waits_s,
    }


def _kind(before: Phase, after: Phase, named: list[tuple[str, Stage]]) -> str:
    if after.split == "val":
        return "training to validation"
    if before.stage != after.stage:  # also if a validation lies between the two stages
        return named[after.stage][0]
    return "validation to training" if before.split == "val" else "epoch to epoch"


def _waits_s(plan: Plan, threads: int, steps_s: Sequence[float]) -> list[list[float]]:
    """Seconds that a consumer with a step time of `steps_s[pass]` s waited for each batch of each pass."""
    import torch

    from resolute.pipeline.loader.loader import Loader

    from .loaders.child import clock

    with Loader(plan, num_threads=threads) as loader:
        waits_s = clock(loader, lambda batch: (batch.spec.epoch, batch.spec.split), steps_s, torch.device("cpu"))
    assert [len(waits) for waits in waits_s] == [each.batches for each in plan.phases]
    return waits_s


def _lost(waits: Sequence[float], step_s: float) -> tuple[float, float, float]:
    """(seconds lost in the first batches, the same in steady steps, slowest of these steps / steady step)."""
    first = min(_FIRST_OF_KIND, len(waits) // 2)
    steady = statistics.median(waits[first:])
    step = steady + step_s
    lost = sum(waits[:first]) - first * steady
    return lost, lost / step, (max(waits[:first]) + step_s) / step


def kinds_table(result: dict[str, Any]) -> str:
    rows = [
        [
            change["kind"],
            str(change["times"]),
            spread(change["lost_s"], 1, 1e3),
            spread(change["lost_steps"], 2),
            spread(change["slowest_steps"], 2),
        ]
        for change in result["changes"]
    ]
    head = ["change", "times", f"lost in {result['first']} batches ms", "in steps", "slowest / steady step"]
    return text_table(f"time lost at a change, batches of {result['batch_size']}", head, rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status. Prints one line to stderr for a `ResoluteError`."""
    parser = Parser(
        prog="python -m resolute.benchmarks.change",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser, "change.json")
    parser.add_argument("--batches", type=int, default=40, metavar="N", help="per resolution (default: %(default)s)")
    parser.add_argument("--kinds", action="store_true", help="every kind of change, for ours")
    return command(parser, _run, argv)


def _run(args: argparse.Namespace) -> None:
    if args.kinds:
        _run_kinds(args)
        return
    check_numbers(args, batches=3 * first_batches(max(1, args.workers)))

    def both(runner: Runner) -> tuple[dict[str, Any], str]:
        result = measure(runner, batches=args.batches)
        return {"change": result}, table(result)

    compare(args, both, rates=False, resolutions=2)


def _run_kinds(args: argparse.Namespace) -> None:
    from resolute.pipeline.dataset.shard_set import ShardSet

    check_numbers(args, rounds=1, workers=1, batch_size=2)
    check_writable(args.out)
    shards = ShardSet.open(args.shards)
    if len(shards.resolutions) < 2:
        raise ResoluteError(f"{args.shards}: got one resolution, expected two or more for --kinds; use another set")
    read_into_cache(shards)
    result = header(rounds=args.rounds)
    result |= measure_kinds(shards, batch_size=args.batch_size, rounds=args.rounds, threads=args.workers)
    print(kinds_table(result))
    write(args.out, result, indent=None)


if __name__ == "__main__":
    from resolute.console import run_main

    run_main(main)
