"""Leak test of the loader: memory, open files and threads over many batches and stage changes.

    python -m benchmarks.memory --shards shards [--batches 100000] [--changes 50] [--batch-size 8]

One `Loader` is drained over a plan in which each stage differs from the previous one in resolution, batch size,
fraction, augmentation and order. Memory is sampled a thousand times; the result is the growth from the median of the
second fifth to that of the last fifth, which separates a leak from allocator noise.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from pipeline.cli import guard_process

    guard_process()

import argparse
import itertools
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.cli import Parser
from pipeline.dataset.shard_set import ShardSet
from pipeline.loader.loader import Loader
from pipeline.plan.plan import Plan
from pipeline.plan.stage import Augment, Stage

from .shell import command, header, ready_to_write, show_progress, write

__all__ = ["main", "measure", "varied"]

_AUGMENTS = (
    Augment(),
    Augment(mixup_alpha=0.4, cutmix_alpha=1.0),
    Augment(policy="randaugment", random_erasing_prob=0.25),
    Augment(policy="trivialaugment", mixup_alpha=0.2, mixup_mode="elem"),
)


def varied(shards: ShardSet, *, batches: int, changes: int, batch_size: int) -> list[Stage]:
    """`changes` + 1 stages with at least `batches` batches in total; consecutive stages differ in every setting."""
    total, per_stage = len(shards.splits["train"]), -(-batches // (changes + 1))
    stages = []
    for i, res in zip(range(changes + 1), itertools.cycle(shards.resolutions), strict=False):
        size, fraction = (batch_size, 1.0) if i % 2 else (max(2, batch_size // 2), 0.5)
        epoch = -(-max(1, round(total * fraction)) // size)
        stages.append(
            Stage(
                res=res, epochs=-(-per_stage // epoch), batch_size=size, fraction=fraction,
                augment=_AUGMENTS[i % len(_AUGMENTS)], order="block" if i % 2 else "full",
            )
        )
    return stages


def rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def measure(shards: ShardSet, *, batches: int, changes: int, batch_size: int, threads: int) -> dict[str, Any]:
    """{"curve": [[batch, stage, RSS in MiB, open files, threads], ...], "growth_mib", ...}."""
    plan = Plan(
        shards, varied(shards, batches=batches, changes=changes, batch_size=batch_size), eval_batch_size=batch_size,
        eval_every_epochs=10,
    )  # fmt: skip
    curve: list[list[float]] = []
    every = max(1, plan.total_batches // 1000)
    began = time.perf_counter()
    with Loader(plan, threads=threads) as loader:
        for batch in loader:
            i = batch.spec.index
            if i % every == 0:
                files = len(list(Path("/proc/self/fd").iterdir()))
                curve.append([i, batch.spec.stage, round(rss_mib(), 1), files, threading.active_count()])
                show_progress(f"{i} of {plan.total_batches}, {curve[-1][2]} MiB")
    show_progress("")
    fifth = len(curve) // 5
    first, last = (statistics.median(row[2] for row in part) for part in (curve[fifth : 2 * fifth], curve[-fifth:]))
    return {
        "batches": plan.total_batches, "stages": len(plan.stages), "segments": len(plan.passes),
        "took_s": round(time.perf_counter() - began, 1), "rss_second_fifth_mib": first, "rss_last_fifth_mib": last,
        "growth_mib": round(last - first, 1), "most_files": max(row[3] for row in curve),
        "most_threads": max(row[4] for row in curve), "curve": curve,
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = Parser(prog="python -m benchmarks.memory", description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--shards", type=Path, required=True, metavar="DIR")
    parser.add_argument("--batches", type=int, default=100_000, metavar="N")
    parser.add_argument("--changes", type=int, default=50, metavar="N")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N")
    parser.add_argument("--threads", type=int, default=2, metavar="N")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/memory.json"), metavar="FILE")
    return command(parser, _run, argv)


def _run(args: argparse.Namespace) -> None:
    ready_to_write(args.out)
    head = header()
    result = measure(
        ShardSet.open(args.shards), batches=args.batches, changes=args.changes, batch_size=args.batch_size,
        threads=args.threads,
    )  # fmt: skip
    write(args.out, {**head, **result}, indent=None)
    steps = max(1, len(result["curve"]) // 10)
    for row in result["curve"][::steps]:
        print(f"batch {row[0]:>8,}  stage {row[1]:>3}  {row[2]:8.1f} MiB  {row[3]:>4} files  {row[4]:>3} threads")
    print(f"{result['batches']:,} batches, {result['stages']} stages in {result['took_s']} s: "
          f"{result['growth_mib']:+.1f} MiB from the second fifth to the last; written: {args.out}")  # fmt: skip


if __name__ == "__main__":
    from pipeline.cli import run_main

    run_main(main)
