"""`python -m benchmarks.peers --shards DIR`: the loaders of today beside ours, on the very same stored images.

Every peer crops (random-resized-crop), flips and normalises the same JPEGs to float32 batches on the CPU with the same
number of workers or threads. Each is measured in a process of its own, one at a time, in rounds (A B C, A B C, ...),
after a warm-up. `--switch` measures instead what a change of resolution costs. How FFCV's environment is made:
benchmarks/peers/with_ffcv.py.
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
from benchmarks.shell import check_numbers, chosen, command, header, ready_to_write, tell, write
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
    add("--shards", type=Path, required=True, metavar="DIR", help="folder that `make shards` wrote, on this machine")
    add("--only", metavar="PEER,…", help=f"some of {','.join(PEERS)} (default: all that can run)")
    add("--res", metavar="PX,…", help="resolutions, ascending (default: all of the set)")
    add("--seconds", type=float, default=5.0, metavar="S", help="length of a window (default: %(default)s)")
    add("--rounds", type=int, default=3, metavar="N", help="interleaved rounds (default: %(default)s)")
    add("--workers", type=int, default=2, metavar="N", help="processes or threads of each (default: %(default)s)")
    add("--batch-size", type=int, default=64, metavar="N", help="samples a batch (default: %(default)s)")
    add("--switch", action="store_true", help="measure stage changes, not rates and quality")
    add("--batches", type=int, default=40, metavar="N", help="--switch: batches at each resolution (default: 40)")
    add("--ffcv-python", default=os.environ.get("FFCV_PYTHON"), metavar="PY",
        help="interpreter of an environment with FFCV (default: $FFCV_PYTHON)")  # fmt: skip
    add("--out", type=Path, metavar="FILE",
        help="JSON to write (default: benchmarks/results/peers.json, or peers-switch.json)")  # fmt: skip
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status. Prints one line to stderr for a `ResoluteError`."""
    return command(_parser(), _run, argv)


def _run(got: argparse.Namespace) -> None:
    names, left_out = _names(got)
    batches = {"batches": 3 * 5 * got.workers} if got.switch else {}
    check_numbers(got, rounds=1, workers=1, batch_size=2, **batches)
    # why: --help and mistakes on the command line need not wait for these
    from pipeline.dataset.shard_set import ShardSet
    from pipeline.plan.stage import Augment

    from . import report, run
    from .job import Job
    from .tars import Tars

    out: Path = got.out or Path("benchmarks/results") / ("peers-switch.json" if got.switch else "peers.json")
    shards = ShardSet.open(got.shards)
    resolutions = _resolutions(got, tuple(shards.resolutions))
    smallest = {res: len(Tars(got.shards, res)) for res in resolutions}
    if min(smallest.values()) < got.batch_size:
        raise ResoluteError(
            f"{got.shards}: got {min(smallest.values())} training images in tars, expected a batch of "
            f"{got.batch_size}; use a smaller --batch-size or a set on this machine"
        )
    augment = Augment()
    head = header(FORMAT, packages=sorted({package for name in names for package in PEERS[name].versions}))
    record = head["machine"]
    result: dict[str, Any] = {
        **head,
        "settings": {
            "peers": names, "left_out": left_out, "workers": got.workers, "batch_size": got.batch_size,
            "seconds": got.seconds, "rounds": got.rounds, "crop_area": augment.crop_area,
            "crop_ratio": augment.crop_ratio, "flip_prob": augment.flip_prob,
        },
        "shards": {
            "hash": shards.hash, "resolutions": resolutions, "train_samples": smallest[resolutions[0]],
            "mean_bytes": {str(res): Tars(got.shards, res).mean_bytes for res in resolutions},
            "page_cache": "warmed" if read_into_cache(shards) else "as found",
        },
    }  # fmt: skip
    ready_to_write(out)
    print(f"{record['cpu']}, {record['cores']} cores, {got.workers} workers, batch {got.batch_size}, "
          f"{result['shards']['train_samples']} training images, load before: {record['load_before']}")  # fmt: skip
    for name, why in left_out.items():
        print(f"left out: {name}: {why}")
    scratch = tempfile.mkdtemp(prefix="resolute-peers-")
    began = time.perf_counter()
    try:
        job = Job(
            task="rate", module="", shards=str(got.shards.resolve()), scratch=scratch, resolutions=resolutions,
            batch_size=got.batch_size, workers=got.workers, seconds=got.seconds, crop_area=augment.crop_area,
            crop_ratio=augment.crop_ratio, flip_prob=augment.flip_prob,
        )  # fmt: skip
        runner = run.Runner(job=job, peers=tuple(names), ffcv_python=got.ffcv_python, tell=tell)
        result["ffcv"] = run.prepare(runner, names)
        if got.switch:
            result["changes"] = run.changes(runner, rounds=got.rounds, batches=got.batches)
            texts = [report.changes_table(result["changes"])]
        else:
            result["rates"] = run.rates(runner, rounds=got.rounds)
            result["quality"] = run.quality(runner)
            texts = [report.rates_table(result["rates"]), report.quality_table(result["quality"]), report.words(names)]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    tell("")
    result["took_s"] = round(time.perf_counter() - began, 1)
    print("\n" + "\n\n".join(texts))
    write(out, result)
    print(f"\nwritten: {out}")


def _names(got: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """The peers to measure, and why others are left out."""
    able = [name for name in PEERS if got.switch or PEERS[name].rates]
    wanted = able if got.only is None else chosen(got.only, able)
    left_out = {}
    if not got.ffcv_python:
        for name in wanted:
            if PEERS[name].module == "with_ffcv":
                if got.only is not None:
                    raise ResoluteError(
                        f"--only {name}: got no interpreter, expected one of an environment with FFCV; give "
                        "--ffcv-python PY or FFCV_PYTHON (benchmarks/peers/with_ffcv.py says how to make it)"
                    )
                left_out[name] = "no --ffcv-python PY or FFCV_PYTHON given (benchmarks/peers/with_ffcv.py says how)"
    elif not (shutil.which(got.ffcv_python) or Path(got.ffcv_python).is_file()):
        raise ResoluteError(f"--ffcv-python: got {got.ffcv_python}, expected an interpreter; correct it")
    return [name for name in wanted if name not in left_out], left_out


def _resolutions(got: argparse.Namespace, stored: tuple[int, ...]) -> tuple[int, ...]:
    """Raises `ResoluteError` for one that is not in the set, and for a single one with --switch."""
    try:
        wanted = stored if got.res is None else tuple(int(part) for part in got.res.split(","))
    except ValueError:
        raise ResoluteError(f"--res: got {got.res}, expected numbers such as 128,224; correct it") from None
    if not set(wanted) <= set(stored) or list(wanted) != sorted(set(wanted)):
        raise ResoluteError(f"--res: got {got.res}, expected some of {','.join(map(str, stored))}, ascending; correct")
    if got.switch and len(wanted) < 2:
        raise ResoluteError("--switch: got one resolution, expected two or more for a stage change; change --res")
    return wanted


if __name__ == "__main__":
    from pipeline.cli import run_main

    run_main(main)
