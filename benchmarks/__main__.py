"""`python -m benchmarks --shards DIR`: loader throughput, cost of stage changes, and stalls, beside torch's DataLoader.

Each part prints a table; one JSON file records every repeat's values, the machine and the versions.
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
from typing import TYPE_CHECKING, Any

from pipeline.cli import Parser
from pipeline.cpu_count import available_cpus
from pipeline.errors import ResoluteError
from pipeline.storage.atomic_file import explain_write_error

from .machine import find_device, read_into_cache
from .shell import check_numbers, chosen, command, header, ready_to_write, show_progress, write

if TYPE_CHECKING:
    from pipeline.dataset.shard_set import ShardSet

__all__ = ["PARTS", "main"]

PARTS = ("loader", "switch", "stalls")
FORMAT = "resolute-benchmark-1"
_BATCH_SIZE = 64
_RESOLUTIONS = (128, 160, 224)  # default for plain tars, which can be read at any resolution


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m benchmarks",
        description="Measure on your own shards: the loader's throughput at each resolution and the cost of a stage "
        "change (both compared with torch's DataLoader and Pillow on the same images), and how much training time is "
        "lost to loading.",
        epilog="On a quiet machine this takes minutes: about repeats x resolutions x (5 x seconds + 15 s). Other work "
        "on the machine shows as a wide (min..max). Benchmark of prep: python -m benchmarks.prep --help. "
        "Exit status: 0 done, 2 for a problem that the one line on stderr explains, 130 interrupted.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--shards", required=True, metavar="DIR", help="shard set (folder or URL), or plain WebDataset tars")
    add("--val", metavar="PATTERN|PART", help="plain tars: validation tars, or fraction of samples (0.05)")
    add("--classes", metavar="FILE", help="plain tars: text file with one class name per line")
    add("--res", metavar="PX,…", help="resolutions (default: all of the set; for plain tars 128,160,224)")
    add("--only", default=",".join(PARTS), metavar="PART,…", help="parts to run (default: %(default)s)")
    add("--seconds", type=float, default=5.0, metavar="S",
        help="length of a measurement, in loader and stalls (default: %(default)s)")  # fmt: skip
    add("--repeats", type=int, default=3, metavar="N", help="interleaved repeats of everything (default: %(default)s)")
    add("--device", default="auto", metavar="auto|cpu|cuda", help="a GPU if there is one (default: %(default)s)")
    add("--threads", type=int, default=available_cpus(), metavar="N",
        help="our CPU threads = the DataLoader's workers (default: all cores, %(default)s)")  # fmt: skip
    add("--batch-size", type=int, metavar="N", help="samples per batch (default: 64, or all of a smaller set)")
    add("--model", default="resnet10t", metavar="NAME", help="timm model of the stalls part (default: %(default)s)")
    add("--out", type=Path, metavar="FILE",
        help="JSON to write (default: bench/bench-cpu.json, or bench/bench-<name of the GPU>.json)")  # fmt: skip
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status. Prints one line to stderr for a `ResoluteError`."""
    return command(_parser(), _run, argv)


def _run(args: argparse.Namespace) -> None:
    parts = chosen(args.only, PARTS)
    check_numbers(args, repeats=1, threads=1, **({} if args.batch_size is None else {"batch_size": 2}))
    # why here: --help and command line errors should not wait for slow imports
    import timm

    from pipeline.dataset.open_dataset import open_dataset

    from . import loader, stalls, switch

    if not timm.is_model(args.model):
        raise ResoluteError(f"--model: got {args.model!r}, expected a timm model; see timm.list_models()")
    device = find_device(args.device)
    shards = open_dataset(args.shards, val=args.val, classes=args.classes)
    shards = dataclasses.replace(shards, resolutions=_resolutions(args.res, shards))
    head = header(FORMAT, device=device)
    record = head["machine"]
    train = shards.splits["train"]
    batch_size = min(_BATCH_SIZE, len(train)) if args.batch_size is None else args.batch_size
    out: Path = args.out or _folder() / f"bench-{_slug(record['gpu'] or 'cpu')}.json"
    ready_to_write(out)
    result: dict[str, Any] = {
        **head,
        "settings": {
            "parts": parts, "device": device.type, "threads": args.threads, "batch_size": batch_size,
            "seconds": args.seconds, "repeats": args.repeats, "model": args.model,
        },
        "shards": {
            "name": Path(shards.root).resolve().name, "hash": shards.hash, "resolutions": shards.resolutions,
            "train_samples": len(train),
            "mean_bytes": {res: float(train.stored[res]["nbytes"].mean()) for res in shards.resolutions},
            "page_cache": "warmed" if read_into_cache(shards) else "as found",
        },
    }  # fmt: skip
    print(f"{record['gpu'] or record['cpu']}, {record['cores']} cores, {args.threads} threads, batch {batch_size}, "
          f"{result['shards']['train_samples']} training images of {result['shards']['name']}, "
          f"repeats: {args.repeats}, load before: {record['load_before']}")  # fmt: skip
    common: dict[str, Any] = {
        "device": device, "threads": args.threads, "batch_size": batch_size, "repeats": args.repeats,
        "show_progress": show_progress,
    }  # fmt: skip
    for part in parts:
        began = time.perf_counter()
        if part == "loader":
            values = loader.measure(shards, seconds=args.seconds, **common)
            text = loader.table(values)
        elif part == "switch":
            values = switch.measure(shards, **common)
            text = switch.table(values)
        else:
            values = stalls.measure(shards, seconds=args.seconds, model=args.model, **common)
            text = stalls.table(values)
        show_progress("")
        result[part] = {"took_s": round(time.perf_counter() - began, 1), **values}
        print(f"\n{text}", flush=True)
    write(out, result)
    print(f"\nwritten: {out}")


def _resolutions(text: str | None, shards: ShardSet) -> tuple[int, ...]:
    if text is None:
        return shards.resolutions or _RESOLUTIONS
    words = text.split(",")
    if not all(word.isdecimal() and int(word) for word in words):
        raise ResoluteError(f"--res: got {text}, expected px separated by commas; write it as 128,160")
    chosen = tuple(sorted({int(word) for word in words}))
    if not shards.single_resolution and not set(chosen) <= set(shards.resolutions):
        stored = ",".join(map(str, shards.resolutions))
        raise ResoluteError(f"--res: got {text}, expected some of {stored}, which {shards.root} holds; correct it")
    return chosen


def _folder() -> Path:
    """The default folder for results, created on demand and ignored by git."""
    folder = Path("bench")
    with explain_write_error(folder):
        folder.mkdir(exist_ok=True)
    return folder


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower().replace("nvidia", "")).strip("-")


if __name__ == "__main__":
    from pipeline.cli import run_main

    run_main(main)
