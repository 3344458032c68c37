"""`python -m benchmarks --shards DIR`: loader speed, stage changes and stalls, beside a torch DataLoader.

Every part prints a table; one JSON file takes every repeat's values, the machine and the versions.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from pipeline.cli import guard_process

    guard_process()

import argparse
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.cli import Parser

from .machine import cores, find_device, read_into_cache
from .shell import check_numbers, chosen, command, header, ready_to_write, tell, write

__all__ = ["PARTS", "main"]

PARTS = ("loader", "switch", "stalls")
FORMAT = "resolute-benchmark-1"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m benchmarks",
        description="Measure on your own shards: how fast the loader is at each resolution, what a stage change "
        "costs (both beside torch's DataLoader with Pillow on the same images), and how much of training is lost "
        "to loading.",
        epilog="On a quiet machine this takes minutes: about repeats x resolutions x (5 x seconds + 15 s). Other work "
        "on the machine shows as a wide (min..max). Prep has its own: python -m benchmarks.prep --help. "
        "Exit status: 0 done, 2 for a problem that the one line on stderr explains, 130 interrupted.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--shards", type=Path, required=True, metavar="DIR", help="folder that `make shards` wrote")
    add("--only", default=",".join(PARTS), metavar="PART,…", help="parts to run (default: %(default)s)")
    add("--seconds", type=float, default=5.0, metavar="S",
        help="length of each measured window, in loader and stalls (default: %(default)s)")  # fmt: skip
    add("--repeats", type=int, default=3, metavar="N", help="interleaved repeats of everything (default: %(default)s)")
    add("--device", default="auto", metavar="auto|cpu|cuda", help="a GPU if there is one (default: %(default)s)")
    add("--threads", type=int, default=cores(), metavar="N",
        help="our CPU threads, and the DataLoader's workers (default: all cores, %(default)s)")  # fmt: skip
    add("--batch-size", type=int, default=64, metavar="N", help="samples a batch (default: %(default)s)")
    add("--model", default="resnet10t", metavar="NAME", help="timm model of the stalls part (default: %(default)s)")
    add("--out", type=Path, metavar="FILE",
        help="JSON to write (default: benchmarks/results/bench-cpu.json, or bench-<name of the GPU>.json)")  # fmt: skip
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status. Prints one line to stderr for a `ResoluteError`."""
    return command(_parser(), _run, argv)


def _run(got: argparse.Namespace) -> None:
    parts = chosen(got.only, PARTS)
    check_numbers(got, repeats=1, threads=1, batch_size=2)
    # why: --help and mistakes on the command line need not wait for these
    from pipeline.shards import ShardSet

    from . import loader, stalls, switch

    device = find_device(got.device)
    shards = ShardSet.open(got.shards)
    head = header(FORMAT, device=device)
    record = head["machine"]
    train = shards.splits["train"]
    out: Path = got.out or Path("benchmarks/results") / f"bench-{_slug(record['gpu'] or 'cpu')}.json"
    ready_to_write(out)
    result: dict[str, Any] = {
        **head,
        "settings": {
            "parts": parts, "device": device.type, "threads": got.threads, "batch_size": got.batch_size,
            "seconds": got.seconds, "repeats": got.repeats, "model": got.model,
        },
        "shards": {
            "name": Path(shards.root).resolve().name, "hash": shards.hash, "resolutions": shards.resolutions,
            "train_samples": len(train),
            "mean_bytes": {res: float(stored["nbytes"].mean()) for res, stored in train.stored.items()},
            "page_cache": "warmed" if read_into_cache(shards) else "as found",
        },
    }  # fmt: skip
    print(f"{record['gpu'] or record['cpu']}, {record['cores']} cores, {got.threads} threads, batch {got.batch_size}, "
          f"{result['shards']['train_samples']} training images of {result['shards']['name']}, "
          f"repeats: {got.repeats}, load before: {record['load_before']}")  # fmt: skip
    common: dict[str, Any] = {
        "device": device, "threads": got.threads, "batch_size": got.batch_size, "repeats": got.repeats, "tell": tell,
    }  # fmt: skip
    for part in parts:
        began = time.perf_counter()
        if part == "loader":
            values = loader.measure(shards, seconds=got.seconds, **common)
            text = loader.table(values)
        elif part == "switch":
            values = switch.measure(shards, **common)
            text = switch.table(values)
        else:
            values = stalls.measure(shards, seconds=got.seconds, model=got.model, **common)
            text = stalls.table(values)
        tell("")
        result[part] = {"took_s": round(time.perf_counter() - began, 1), **values}
        print(f"\n{text}", flush=True)
    write(out, result)
    print(f"\nwritten: {out}")


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower().replace("nvidia", "")).strip("-")


if __name__ == "__main__":
    from pipeline.cli import run_main

    run_main(main)
