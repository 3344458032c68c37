"""`python -m benchmarks.peers --shards DIR`: compares this project's loader with others on the same stored images.

Every peer applies random resized crop, flip and normalisation to the same JPEGs and delivers float32 batches on the CPU
with the same number of workers or threads. Each runs in its own process, one at a time, in rounds (A B C, A B C, ...),
after a warm-up. `--switch` measures the cost of a change of resolution instead. benchmarks/peers/with_ffcv.py explains
how to install FFCV.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from pipeline.cli import guard_process

    guard_process()

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import read_into_cache
from benchmarks.shell import check_numbers, chosen, command, header, ready_to_write, show_progress, write
from pipeline.cli import Parser
from pipeline.errors import ResoluteError

from .registry import PEERS

__all__ = ["FORMAT", "main"]

FORMAT = "resolute-peers-1"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m benchmarks.peers",
        description="Measure on your own shards what other loaders deliver: torch's DataLoader with Pillow and with "
        "torchvision v2, timm's, webdataset's, stock DALI, FFCV; and what a stage change costs them (--switch).",
        epilog="Takes about rounds x resolutions x peers x (seconds + 8 s). Other work on the machine shows as a wide "
        "(min..max); CPU s / 1000 suffers least. Exit status: 0 done, 2 for a problem that the one line on stderr "
        "explains, 130 interrupted.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--shards", type=Path, required=True, metavar="DIR", help="local folder written by `make shards`")
    add("--only", metavar="PEER,…", help=f"some of {','.join(PEERS)} (default: all available)")
    add("--res", metavar="PX,…", help="resolutions, ascending (default: all of the set)")
    add("--seconds", type=float, default=5.0, metavar="S", help="length of a measurement (default: %(default)s)")
    add("--rounds", type=int, default=3, metavar="N", help="interleaved rounds (default: %(default)s)")
    add("--workers", type=int, default=2, metavar="N", help="processes or threads per peer (default: %(default)s)")
    add("--batch-size", type=int, default=64, metavar="N", help="samples per batch (default: %(default)s)")
    add("--switch", action="store_true", help="measure stage changes instead of rates and quality")
    add("--batches", type=int, default=40, metavar="N", help="--switch: batches per resolution (default: 40)")
    add("--ffcv-python", default=os.environ.get("FFCV_PYTHON"), metavar="PY",
        help="interpreter of an environment with FFCV (default: $FFCV_PYTHON)")  # fmt: skip
    add("--out", type=Path, metavar="FILE",
        help="JSON to write (default: benchmarks/results/peers.json, or peers-switch.json)")  # fmt: skip
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status. Prints one line to stderr for a `ResoluteError`."""
    return command(_parser(), _run, argv)


def _run(args: argparse.Namespace) -> None:
    names, left_out = _names(args)
    batches = {"batches": 3 * 5 * args.workers} if args.switch else {}
    check_numbers(args, rounds=1, workers=1, batch_size=2, **batches)
    # why here: --help and command line errors should not wait for slow imports
    from pipeline.dataset.shard_set import ShardSet
    from pipeline.plan.stage import Augment

    from . import report, run
    from .job import Job
    from .tars import Tars

    out: Path = args.out or Path("benchmarks/results") / ("peers-switch.json" if args.switch else "peers.json")
    shards = ShardSet.open(args.shards)
    resolutions = _resolutions(args, tuple(shards.resolutions))
    smallest = {res: len(Tars(args.shards, res)) for res in resolutions}
    if min(smallest.values()) < args.batch_size:
        raise ResoluteError(
            f"{args.shards}: got {min(smallest.values())} training images in tars, expected a batch of "
            f"{args.batch_size}; use a smaller --batch-size or a set on this machine"
        )
    augment = Augment()
    head = header(FORMAT, packages=sorted({package for name in names for package in PEERS[name].versions}))
    record = head["machine"]
    result: dict[str, Any] = {
        **head,
        "settings": {
            "peers": names, "left_out": left_out, "workers": args.workers, "batch_size": args.batch_size,
            "seconds": args.seconds, "rounds": args.rounds, "crop_area": augment.crop_area,
            "crop_ratio": augment.crop_ratio, "flip_prob": augment.flip_prob,
        },
        "shards": {
            "hash": shards.hash, "resolutions": resolutions, "train_samples": smallest[resolutions[0]],
            "mean_bytes": {str(res): Tars(args.shards, res).mean_bytes for res in resolutions},
            "page_cache": "warmed" if read_into_cache(shards) else "as found",
        },
    }  # fmt: skip
    ready_to_write(out)
    print(f"{record['cpu']}, {record['cores']} cores, {args.workers} workers, batch {args.batch_size}, "
          f"{result['shards']['train_samples']} training images, load before: {record['load_before']}")  # fmt: skip
    for name, why in left_out.items():
        print(f"left out: {name}: {why}")
    scratch = tempfile.mkdtemp(prefix="resolute-peers-")
    began = time.perf_counter()
    try:
        job = Job(
            task="rate", module="", shards=str(args.shards.resolve()), scratch=scratch, resolutions=resolutions,
            batch_size=args.batch_size, workers=args.workers, seconds=args.seconds, crop_area=augment.crop_area,
            crop_ratio=augment.crop_ratio, flip_prob=augment.flip_prob,
        )  # fmt: skip
        runner = run.Runner(job=job, peers=tuple(names), ffcv_python=args.ffcv_python, show_progress=show_progress)
        result["ffcv"] = run.prepare(runner, names)
        if args.switch:
            result["changes"] = run.changes(runner, rounds=args.rounds, batches=args.batches)
            texts = [report.changes_table(result["changes"])]
        else:
            result["rates"] = run.rates(runner, rounds=args.rounds)
            result["quality"] = run.quality(runner)
            texts = [report.rates_table(result["rates"]), report.quality_table(result["quality"]), report.words(names)]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    show_progress("")
    result["took_s"] = round(time.perf_counter() - began, 1)
    print("\n" + "\n\n".join(texts))
    write(out, result)
    print(f"\nwritten: {out}")


def _names(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """The peers to measure, and the reasons for omitting others."""
    able = [name for name in PEERS if args.switch or PEERS[name].rates]
    wanted = able if args.only is None else chosen(args.only, able)
    left_out = {}
    if not args.ffcv_python:
        for name in wanted:
            if PEERS[name].module == "with_ffcv":
                if args.only is not None:
                    raise ResoluteError(
                        f"--only {name}: got no interpreter, expected one of an environment with FFCV; give "
                        "--ffcv-python PY or FFCV_PYTHON (benchmarks/peers/with_ffcv.py says how to make it)"
                    )
                left_out[name] = "no --ffcv-python PY or FFCV_PYTHON given (benchmarks/peers/with_ffcv.py says how)"
    elif not (shutil.which(args.ffcv_python) or Path(args.ffcv_python).is_file()):
        raise ResoluteError(f"--ffcv-python: got {args.ffcv_python}, expected an interpreter; correct it")
    return [name for name in wanted if name not in left_out], left_out


def _resolutions(args: argparse.Namespace, stored: tuple[int, ...]) -> tuple[int, ...]:
    """Raises `ResoluteError` for one that is not in the set, and for a single one with --switch."""
    try:
        wanted = stored if args.res is None else tuple(int(part) for part in args.res.split(","))
    except ValueError:
        raise ResoluteError(f"--res: got {args.res}, expected numbers such as 128,224; correct it") from None
    if not set(wanted) <= set(stored) or list(wanted) != sorted(set(wanted)):
        raise ResoluteError(f"--res: got {args.res}, expected some of {','.join(map(str, stored))}, ascending; correct")
    if args.switch and len(wanted) < 2:
        raise ResoluteError("--switch: got one resolution, expected two or more for a stage change; change --res")
    return wanted


if __name__ == "__main__":
    from pipeline.cli import run_main

    run_main(main)
