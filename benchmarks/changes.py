"""Time lost at each kind of change between epochs and stages: resolution, batch size, fraction, augmentation, order, …

    python -m benchmarks.changes --shards shards [--rounds 5] [--batch-size 32]

A consumer slightly slower than the loader (like a training loop) runs over one plan that contains all the changes. The
time lost at a change is how much longer it waited for the first batches after it than in the steady part of that
segment, in ms and in steady steps. The budget is one step.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from pipeline.cli import guard_process

    guard_process()

import argparse
import itertools
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pipeline.cli import Parser
from pipeline.cpu_count import available_cpus
from pipeline.dataset.shard_set import ShardSet
from pipeline.loader.loader import Loader
from pipeline.plan.plan import Pass, Plan
from pipeline.plan.stage import Augment, Stage

from .machine import read_into_cache
from .shell import command, header, ready_to_write, write
from .switch import clock
from .table import repeated, spread, text_table

__all__ = ["main", "measure", "table"]

_FIRST = 10  # batches counted after a change: more than are prefetched
_PACE = 1.3  # the consumer's step time / the loader's batch time


def stages(shards: ShardSet, batch_size: int) -> list[tuple[str, Stage]]:
    """(kind of change, stage after the change) for consecutive stages."""
    small, *_, large = shards.resolutions
    rich = Augment(
        policy="randaugment", jitter=(0.3, 0.3, 0.3, 0.1), random_erasing_prob=0.25, mixup_alpha=0.4, cutmix_alpha=1.0
    )

    def stage(res: int, size: int = batch_size, fraction: float = 1.0, **more: Any) -> Stage:
        epochs = 3 if fraction == 1.0 else 4
        return Stage(res=res, epochs=epochs, batch_size=size, fraction=fraction, **more)

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
        ("order, full to block", stage(small, order="block")),
        ("order, block to full", stage(small)),
        ("all at once", stage(large, batch_size // 2, 0.7, augment=rich, order="block")),
    ]


def measure(shards: ShardSet, *, batch_size: int, rounds: int, threads: int) -> dict[str, Any]:
    """{"borders": [{"kind", "lost_s", "lost_steps", "slowest_steps"}], "raw": waits}; each `repeated` over rounds."""
    named = stages(shards, batch_size)
    plan = Plan(shards, [stage for _, stage in named], eval_batch_size=batch_size, eval_every_epochs=2)
    drained = _waits(plan, threads, [0.0] * len(plan.passes))
    pace = [_PACE * statistics.fmean(each[len(each) // 4 :]) for each in drained]
    raw = [_waits(plan, threads, pace) for _ in range(rounds)]
    by_kind: dict[str, dict[str, list[float]]] = {}
    for waits in raw:
        losses_of: dict[str, list[tuple[float, float, float]]] = {}
        for number, (before, segment) in enumerate(itertools.pairwise(plan.passes), start=1):
            kind = _kind(before, segment, named)
            losses_of.setdefault(kind, []).append(_lost(waits[number], pace[number]))
        for kind, losses in losses_of.items():
            values = by_kind.setdefault(kind, {"lost_s": [], "lost_steps": [], "slowest_steps": []})
            for name, each in zip(values, zip(*losses, strict=True), strict=True):
                values[name].append(statistics.median(each))
    times = Counter(_kind(a, b, named) for a, b in itertools.pairwise(plan.passes))
    borders = [
        {"kind": kind, "times": times[kind], **{name: repeated(each) for name, each in values.items()}}
        for kind, values in by_kind.items()
    ]
    waits_s = [list(itertools.chain(*waits)) for waits in raw]
    return {"batch_size": batch_size, "first": _FIRST, "step_s": pace, "borders": borders, "waits_s": waits_s}


def _kind(before: Pass, segment: Pass, named: list[tuple[str, Stage]]) -> str:
    if segment.split == "val":
        return "training to validation"
    if before.stage != segment.stage:  # also if a validation lies between the two stages
        return named[segment.stage][0]
    return "validation to training" if before.split == "val" else "epoch to epoch"


def _waits(plan: Plan, threads: int, pace: Sequence[float]) -> list[list[float]]:
    """Seconds that a consumer with a step time of `pace[segment]` s waited for each batch of each segment."""
    with Loader(plan, threads=threads) as loader:
        return clock(loader, [segment.batches for segment in plan.passes], pace, torch.device("cpu"))


def _lost(waits: Sequence[float], step_s: float) -> tuple[float, float, float]:
    """(seconds lost in the first batches, the same in steady steps, slowest of these steps / steady step)."""
    first = min(_FIRST, len(waits) // 2)
    steady = statistics.median(waits[first:])
    step = steady + step_s
    lost = sum(waits[:first]) - first * steady
    return lost, lost / step, (max(waits[:first]) + step_s) / step


def table(result: dict[str, Any]) -> str:
    rows = [
        [each["kind"], str(each["times"]), spread(each["lost_s"], 1, 1e3), spread(each["lost_steps"], 2),
         spread(each["slowest_steps"], 2)]
        for each in result["borders"]
    ]  # fmt: skip
    head = ["change", "times", f"lost in {result['first']} batches ms", "in steps", "slowest / steady step"]
    return text_table(f"time lost at a change, batches of {result['batch_size']}", head, rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    about = (__doc__ or "").splitlines()[0]
    parser = Parser(prog="python -m benchmarks.changes", description=about, allow_abbrev=False)
    parser.add_argument("--shards", type=Path, required=True, metavar="DIR")
    parser.add_argument("--batch-size", type=int, default=32, metavar="N")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--threads", type=int, default=available_cpus(), metavar="N")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/changes.json"), metavar="FILE")
    return command(parser, _run, argv)


def _run(args: argparse.Namespace) -> None:
    ready_to_write(args.out)
    shards = ShardSet.open(args.shards)
    read_into_cache(shards)
    head = header()
    result = measure(shards, batch_size=args.batch_size, rounds=args.rounds, threads=args.threads)
    write(args.out, {**head, **result}, indent=None)
    print(table(result))
    print(f"written: {args.out}")


if __name__ == "__main__":
    from pipeline.cli import run_main

    run_main(main)
