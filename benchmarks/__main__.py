"""`python -m benchmarks --shards DIR`: loader throughput, cost of stage changes, and stalls of training.

What `make bench` runs: the loader and the change are compared with torch's DataLoader on the same images. Each part
prints a table; one JSON file records every round's values, the machine and the versions.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from pipeline.cli import guard_process

    guard_process()

import argparse
import dataclasses
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.cpu_count import available_cpus
from pipeline.errors import ResoluteError
from pipeline.storage.atomic_file import write_errors

from .cli import Parser, check_numbers, chosen, command, parse_resolutions, show_progress
from .record import check_writable, find_device, header, read_into_cache, write

__all__ = ["PARTS", "main"]

PARTS = ("loader", "change", "training")
_BATCH_SIZE = 64
_RESOLUTIONS = (128, 160, 224)  # default for plain tars, which can be read at any resolution


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m benchmarks",
        description="Measure on your own shards: the loader's throughput at each resolution and the cost of a stage "
        "change (both compared with torch's DataLoader and Pillow on the same images), and how much training time is "
        "lost to loading.",
        epilog="On a quiet machine this takes minutes: about rounds x resolutions x (5 x seconds + 15 s). Other work "
        "on the machine shows as a wide (min..max). More: python -m benchmarks.loader, .change, .storage, .training "
        "and .prep, each with --help. Exit status: 0 done, 2 for a problem that the one line on stderr explains, "
        "130 interrupted.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--shards", required=True, metavar="DIR", help="shard set (folder or URL), or plain WebDataset tars")
    add("--val", metavar="PATTERN|PART", help="plain tars: validation tars, or fraction of samples (0.05)")
    add("--classes", metavar="FILE", help="plain tars: text file with one class name per line")
    add("--res", metavar="PX,…", help="resolutions (default: all of the set; for plain tars 128,160,224)")
    add("--only", default=",".join(PARTS), metavar="PART,…", help="parts to run (default: %(default)s)")
    add("--seconds", type=float, default=5.0, metavar="S",
        help="length of a measurement, in loader and training (default: %(default)s)")  # fmt: skip
    add("--rounds", type=int, default=3, metavar="N", help="interleaved rounds of everything (default: %(default)s)")
    add("--device", default="auto", metavar="auto|cpu|cuda", help="a GPU if there is one (default: %(default)s)")
    add("--threads", type=int, default=available_cpus(), metavar="N",
        help="our CPU threads = the DataLoader's workers (default: all cores, %(default)s)")  # fmt: skip
    add("--batch-size", type=int, metavar="N", help="samples per batch (default: 64, or all of a smaller set)")
    add("--model", default="resnet10t", metavar="NAME", help="timm model of the training part (default: %(default)s)")
    add("--out", type=Path, metavar="FILE",
        help="JSON to write (default: bench/bench-cpu.json, or bench/bench-<name of the GPU>.json)")  # fmt: skip
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status. Prints one line to stderr for a `ResoluteError`."""
    return command(_parser(), _run, argv)


def _run(args: argparse.Namespace) -> None:
    parts = chosen(args.only, PARTS)
    check_numbers(args, rounds=1, threads=1, **({} if args.batch_size is None else {"batch_size": 2}))
    # why here: --help and command line errors should not wait for slow imports
    import timm

    from pipeline.dataset.open_dataset import open_dataset

    from . import change, loader
    from .loaders.job import Job
    from .loaders.ours import full_batches
    from .loaders.run import Runner
    from .training import stalls

    if not timm.is_model(args.model):
        raise ResoluteError(f"--model: got {args.model!r}, expected a timm model; see timm.list_models()")
    device = find_device(args.device)
    shards = open_dataset(args.shards, val=args.val, classes=args.classes)
    stored = shards.resolutions or _RESOLUTIONS
    resolutions = parse_resolutions(args.res, stored, any_size=shards.single_resolution)
    if "change" in parts and len(resolutions) < 2:
        raise ResoluteError(
            f"{shards.root}: got one resolution, expected two or more for a stage change; leave change out with --only"
        )
    shards = dataclasses.replace(shards, resolutions=resolutions)
    train = shards.splits["train"]
    batch_size = min(_BATCH_SIZE, len(train)) if args.batch_size is None else args.batch_size
    full_batches(shards, resolutions[0], batches=1, batch_size=batch_size)  # raises if the set is too small
    head = header(args, rounds=args.rounds, device=device)
    machine = head["machine"]
    out: Path = args.out or _folder() / f"bench-{_slug(machine['gpu'] or 'cpu')}.json"
    check_writable(out)
    result: dict[str, Any] = {
        **head,
        "settings": {
            "parts": parts, "device": device.type, "threads": args.threads, "batch_size": batch_size,
            "seconds": args.seconds, "model": args.model,
        },
        "shards": {
            "name": Path(shards.root).resolve().name, "hash": shards.hash, "resolutions": resolutions,
            "train_samples": len(train),
            "mean_bytes": {res: float(train.stored[res]["nbytes"].mean()) for res in resolutions},
            "page_cache": read_into_cache(shards),
        },
    }  # fmt: skip
    print(f"{machine['gpu'] or machine['cpu']}, {machine['cores']} cores, {args.threads} threads, batch {batch_size}, "
          f"{len(train)} training images of {result['shards']['name']}, "
          f"rounds: {args.rounds}, load before: {machine['load_before']}")  # fmt: skip
    runner = Runner(
        job=Job(shards=args.shards, val=args.val, classes=args.classes, resolutions=resolutions, seconds=args.seconds,
                batch_size=batch_size, workers=args.threads, device=str(device)),
        loaders=("ours", "pillow", *(["ours-cpu-decode"] if device.type == "cuda" else [])),
        rounds=args.rounds, isolated=False,
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
                shards, device=device, threads=args.threads, batch_size=batch_size, seconds=args.seconds,
                rounds=args.rounds, model=args.model,
            )  # fmt: skip
            text = stalls.table(values)
        show_progress("")
        result[part] = {"took_s": round(time.perf_counter() - began, 1), **values}
        print(f"\n{text}", flush=True)
    write(out, result)


def _folder() -> Path:
    """The default folder for results, created on demand and ignored by git."""
    folder = Path("bench")
    with write_errors(folder):
        folder.mkdir(exist_ok=True)
    return folder


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower().replace("nvidia", "")).strip("-")


if __name__ == "__main__":
    from pipeline.cli import run_main

    run_main(main)
