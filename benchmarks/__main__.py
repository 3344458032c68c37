"""`python -m resolute.benchmarks --shards DIR`: loader throughput, cost of stage changes, and stalls of training.

What `make bench-all` runs: the loader and the change are compared with torch's DataLoader on the same images. Each part
prints a table; one JSON file records every round's values, the machine and the versions.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from resolute.console import guard_process

    guard_process()

import argparse
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

from .cli import Parser, check_numbers, chosen, command, show_progress
from .record import check_writable, write
from .setting import add_arguments, default_file, set_up

__all__ = ["PARTS", "main"]

PARTS = ("loader", "change", "training")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m resolute.benchmarks",
        description="Measure on your own shards: the loader's throughput at each resolution and the cost of a stage "
        "change (both compared with torch's DataLoader and Pillow on the same images), and how much training time is "
        "lost to loading.",
        epilog="On a quiet machine this takes minutes: about rounds x resolutions x (5 x seconds + 15 s). Other work "
        "on the machine shows as a wide (min..max). More: python -m resolute.benchmarks.loader, .change, .storage, .training "
        "and .prep, each with --help. Exit status: 0 done, 2 for a problem that the one line on stderr explains, "
        "130 interrupted.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add_arguments(parser)
    add("--only", default=",".join(PARTS), metavar="PART,…", help="parts to run (default: %(default)s)")
    add("--seconds", type=float, default=5.0, metavar="S",
        help="length of a measurement, in loader and training (default: %(default)s)")  # fmt: skip
    add("--rounds", type=int, default=3, metavar="N", help="interleaved rounds of everything (default: %(default)s)")
    add("--out", type=Path, metavar="FILE",
        help="JSON to write (default: bench/bench-cpu.json, or bench/bench-<name of the GPU>.json)")  # fmt: skip
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status. Prints one line to stderr for a `ResoluteError`."""
    return command(_parser(), _run, argv)


def _run(args: argparse.Namespace) -> None:
    parts = chosen(args.only, PARTS)
    check_numbers(args, rounds=1)
    setting = set_up(args, rounds=args.rounds, changes="change" in parts)
    # why here: --help and command line errors should not wait for slow imports
    from . import change, loader
    from .loaders.run import Runner
    from .training import stalls

    device, result = setting.device, setting.result
    out: Path = args.out or default_file("bench", result["machine"]["gpu"] or "cpu")
    check_writable(out)
    result["settings"] |= {"parts": parts, "seconds": args.seconds}
    runner = Runner(
        job=setting.job(args, seconds=args.seconds),
        loaders=("ours", "pillow"), rounds=args.rounds, isolated=False,
    )  # fmt: skip
    for part in parts:
        began = time.perf_counter()
        if part == "loader":
            values = loader.measure_rates(runner)
            text = loader.rates_table(values)
        elif part == "change":
            both = dataclasses.replace(runner, loaders=("ours", "pillow"))
            values = change.measure(both, batches=max(30, 10 * args.threads))
            text = change.table(values)
        else:
            values = stalls.measure(
                setting.shards, device=device, threads=args.threads, batch_size=setting.batch_size,
                seconds=args.seconds, rounds=args.rounds, model=args.model,
            )  # fmt: skip
            text = stalls.table(values)
        show_progress("")
        result[part] = {"took_s": round(time.perf_counter() - began, 1), **values}
        print(f"\n{text}", flush=True)
    write(out, result)


if __name__ == "__main__":
    from resolute.console import run_main

    run_main(main)
