"""`python -m resolute.benchmarks --shards DIR`: loader throughput, cost of stage changes, and stalls of training.

What `make bench-all` runs: the loader and the change are compared with torch's DataLoader on the same images. Each part
prints a table; one JSON file records every round's values, the machine and the versions.
"""

from __future__ import annotations

import time
from pathlib import Path

from .cli import chosen, show_progress
from .options import BenchAllOptions
from .record import check_writable, write
from .setting import default_file, set_up

__all__ = ["PARTS", "main"]

PARTS = ("loader", "change", "training")


def main(args: BenchAllOptions) -> None:
    """Measure and write the result. Raises `ResoluteError`."""
    parts = chosen(args.only, PARTS)
    setting = set_up(args, rounds=args.rounds, changes="change" in parts)
    # why here: --help and command line errors should not wait for slow imports
    from . import change, loader
    from .loaders.run import Runner
    from .training import stalls

    device, result = setting.device, setting.result
    out: Path = args.out or default_file("bench", result["machine"]["gpu"] or "cpu")
    check_writable(out, named=args.out is not None)
    result["settings"] |= {"parts": parts, "seconds": args.seconds}
    runner = Runner(
        job=setting.job(args, seconds=args.seconds),
        loaders=("ours", "pillow"),
        rounds=args.rounds,
        isolated=False,
    )
    for part in parts:
        began = time.perf_counter()
        if part == "loader":
            values = loader.measure_rates(runner)
            text = loader.rates_table(values)
        elif part == "change":
            values = change.measure(runner, batches=max(30, 10 * args.threads))
            text = change.table(values)
        else:
            values = stalls.measure(
                setting.shards,
                device=device,
                threads=args.threads,
                batch_size=setting.batch_size,
                seconds=args.seconds,
                rounds=args.rounds,
                model=args.model,
            )
            text = stalls.table(values)
        show_progress("")
        result[part] = {"took_s": round(time.perf_counter() - began, 1), **values}
        print(f"\n{text}", flush=True)
    write(out, result)
