"""Measures how long a training step waits for its data on slow storage.

    python -m resolute.benchmarks.storage --shards shards [--res 128] [--pace 1500] [--only local,cold,store]

local  a folder in the page cache, and the same with 1, 5 and 20 ms added per read (a network disk)
cold   a folder evicted from the page cache
store  an object store on loopback (object_store.py) with an empty cache: two epochs, both orders

The consumer takes a batch and then sleeps `batch / pace` s, like a training step at `pace` images/s. `stall` is the
fraction of the time after the first batch in which it waited in `next()`; `start` is the time to the first batch,
including opening the set and the loader. The second epoch reads the same samples as the first.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from resolute.console import guard_process

    guard_process()

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from resolute.benchmarks.cli import Parser, chosen, command, show_progress, text_table
from resolute.benchmarks.proc import evict_files
from resolute.benchmarks.record import check_writable, header, write
from resolute.errors import ResoluteError
from resolute.pipeline.plan.order import Order
from resolute.pipeline.storage.base import Files
from resolute.pipeline.storage.open_files import open_files

__all__ = ["Delayed", "main", "paced"]

PARTS = ("local", "cold", "store")
DELAYS_S = (0.0, 1e-3, 5e-3, 20e-3)


class Delayed:
    """A set's files, each read of which takes `delay_s` longer."""

    remote = True

    def __init__(self, files: Files, delay_s: float) -> None:
        self._files, self._delay_s = files, delay_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def open(self, *_: Any) -> None:
        """Have every sample fetched by `read`."""

    def read(self, *range_of: Any, **options: Any) -> bytes:
        time.sleep(self._delay_s)
        return self._files.read(*range_of, **options)


def paced(batches: Iterator[Any], *, step_s: float, began: float) -> list[dict[str, float]]:
    """Per epoch: `start_s` (time from `began` to the first batch), `stall_frac`, `slowest_s`, `images_per_s`, …

    `late_stall_frac` is that of the second half, when the cache is warmer. `batches` yields (epoch, samples); the
    consumer sleeps `step_s` s after each.
    """
    waits: dict[int, list[float]] = {}
    images: dict[int, int] = {}
    before = began
    for epoch, samples in batches:
        waits.setdefault(epoch, []).append(time.perf_counter() - before)
        images[epoch] = images.get(epoch, 0) + samples
        time.sleep(step_s)
        before = time.perf_counter()
    epochs = []
    for epoch, waits_s in waits.items():
        inner = waits_s[1:] if epoch == min(waits) else waits_s
        total_s = sum(inner) + step_s * len(waits_s)
        late = inner[len(inner) // 2 :]
        epochs.append(
            {
                "start_s": waits_s[0],
                "stall_frac": sum(inner) / total_s,
                "late_stall_frac": sum(late) / (sum(late) + step_s * max(1, len(late))),
                "slowest_s": max(inner, default=0.0),
                "typical_s": statistics.median(inner or waits_s),
                "images_per_s": images[epoch] / total_s,
            }
        )
    return epochs


def measure_one(open_set: Callable[[], Any], args: argparse.Namespace, *, order: Order, epochs: int) -> dict[str, Any]:
    """Measure `epochs` epochs of the same samples at the pace of the arguments."""
    from resolute.pipeline.loader.loader import Loader
    from resolute.pipeline.plan.plan import Plan
    from resolute.pipeline.plan.stage import Stage

    began = time.perf_counter()
    shards = open_set()
    try:
        samples = max(args.batch_size, min(len(shards.splits["train"]), round(args.pace * args.seconds)))
        fraction = min(1.0, samples // args.batch_size * args.batch_size / len(shards.splits["train"]))
        stage = Stage(res=args.res, epochs=epochs, batch_size=args.batch_size, fraction=fraction)
        plan = Plan(shards, [stage], order=order, fraction_mode="fixed", eval_batch_size=None)

        def batches() -> Iterator[tuple[int, int]]:
            with Loader(plan, num_threads=args.threads) as loader:
                for batch in loader:
                    yield batch.spec.epoch, len(batch.labels)

        results = paced(batches(), step_s=args.batch_size / args.pace, began=began)
        counts: dict[str, int] = getattr(shards.files, "counts", dict)()
    finally:
        shards.close()
    return {"order": order, "epochs": results, "counts": counts}


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    from resolute.pipeline.dataset.shard_set import ShardSet

    def open_with(files: Callable[[], Any]) -> Any:
        opened = files()
        return ShardSet.open(opened.root, resolutions=(args.res,), files=opened)

    def local() -> Files:
        return open_files(args.shards)

    rows: list[dict[str, Any]] = []

    def add(name: str, files: Callable[[], Any], **words: Any) -> None:
        show_progress(name)
        rows.append({"name": name, **measure_one(partial(open_with, files), args, **words)})

    if "local" in args.only:
        add("page cache (warming)", local, order="shuffled", epochs=1)
        rows.clear()
        add("page cache", local, order="shuffled", epochs=1)
        for delay_s in DELAYS_S:
            delayed = partial(lambda delay_s: Delayed(local(), delay_s), delay_s)
            add(f"{1e3 * delay_s:g} ms per sample", delayed, order="shuffled", epochs=1)
    for order in ("shuffled", "windowed") if "cold" in args.only else ():
        evict_files((args.shards / str(args.res)).glob("*.tar"))
        add("cold disk", local, order=order, epochs=2)
    for order in ("shuffled", "windowed") if "store" in args.only else ():
        with remote(args) as files:
            add("store, empty cache", files, order=order, epochs=2)
    show_progress("")
    return rows


@contextmanager
def remote(args: argparse.Namespace) -> Iterator[Callable[[], Files]]:
    """A function that opens the set's files in the store, through a new, empty cache."""
    from resolute.pipeline.storage.cache import CacheSettings

    from .object_store import store

    with (
        tempfile.TemporaryDirectory(prefix="resolute-cache-") as folder,
        store(
            args.shards,
            latency_s=args.latency_ms / 1e3,
            bytes_per_s=args.mib_per_s * 2**20,
            total_bytes_per_s=args.total_mib_per_s * 2**20,
        ) as url,
    ):
        yield lambda: open_files(url, cache=CacheSettings(folder=Path(folder)))


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        for number, epoch in enumerate(row["epochs"]):
            counts = row["counts"]
            lines.append(
                [
                    row["name"],
                    row["order"],
                    str(number + 1),
                    f"{100 * epoch['stall_frac']:.1f} %",
                    f"{100 * epoch['late_stall_frac']:.1f} %",
                    f"{1e3 * epoch['typical_s']:.1f}",
                    f"{1e3 * epoch['slowest_s']:.0f}",
                    f"{epoch['images_per_s']:.0f}",
                    f"{epoch['start_s']:.2f}" if not number else "",
                    f"{counts['requests']}, {counts['fetched_bytes'] / 2**20:.0f} MiB" if counts and not number else "",
                ]
            )
    header = [
        "storage",
        "order",
        "epoch",
        "stall",
        "2nd half",
        "wait ms",
        "slowest ms",
        "images/s",
        "start s",
        "requests in all",
    ]
    return text_table("a consumer that computes for a fixed time per batch", header, lines, left=2)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m resolute.benchmarks.storage",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--shards", type=Path, required=True, metavar="DIR", help="local folder written by `make shards`")
    add("--res", type=int, default=128, metavar="PX", help="resolution (default: %(default)s)")
    add("--pace", type=float, default=1500, metavar="IMAGES/S", help="rate of the consumer (default: %(default)s)")
    add("--batch-size", type=int, default=64, metavar="N", help="samples per batch (default: %(default)s)")
    add("--seconds", type=float, default=10, metavar="S", help="epoch length without stalls (default: %(default)s)")
    add("--threads", type=int, default=2, metavar="N", help="decoding threads (default: %(default)s)")
    add("--latency-ms", type=float, default=30, metavar="MS", help="store: time to first byte (default: %(default)s)")
    add("--mib-per-s", type=float, default=80, metavar="MIB", help="store: of a request (default: %(default)s)")
    add(
        "--total-mib-per-s",
        type=float,
        default=100,
        metavar="MIB",
        help="store: of all requests together; should be "
        "about four times pace x bytes per sample, as 1 GB/s is for 20 000 images/s (default: %(default)s)",
    )
    add("--only", default=",".join(PARTS), metavar="PART,…", help="parts to run (default: %(default)s)")
    add(
        "--out",
        type=Path,
        default=Path("benchmarks/results/storage.json"),
        metavar="FILE",
        help="JSON to write (default: %(default)s)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status. Prints one line to stderr for a `ResoluteError`."""
    return command(_parser(), _run, argv)


def _run(args: argparse.Namespace) -> None:
    args.only = chosen(args.only, PARTS)
    for name in ("pace", "seconds", "mib_per_s", "total_mib_per_s", "batch_size"):
        if not 0 < getattr(args, name) < math.inf:
            raise ResoluteError(f"--{name.replace('_', '-')}: got {getattr(args, name)}, expected above 0; raise it")
    check_writable(args.out)
    head = header()
    rows = measure(args)
    print(table(rows))
    settings = {name: value for name, value in vars(args).items() if name not in ("shards", "out")}
    settings["set"] = args.shards.resolve().name
    write(args.out, {**head, "settings": settings, "rows": rows})


if __name__ == "__main__":
    from resolute.console import run_main

    run_main(main)
