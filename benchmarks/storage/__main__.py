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

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from resolute.benchmarks.cli import chosen, default_file, show_progress, text_table
from resolute.benchmarks.proc import evict_files
from resolute.benchmarks.record import check_writable, header, write
from resolute.cli import program
from resolute.pipeline.plan.order import Order
from resolute.pipeline.storage.base import Files
from resolute.pipeline.storage.open_files import open_files
from resolute.settings import described, setting, settings

__all__ = ["Delayed", "main", "paced"]

PARTS = ("local", "cold", "store")
DELAYS_S = (0.0, 1e-3, 5e-3, 20e-3)


@settings("")
class StorageOptions:
    shards: Annotated[Path, described("local shard set")]
    res: int = setting(128, "resolution, px", ge=1)
    pace: float = setting(1500, "images/s of the consumer", gt=0)
    batch_size: int = setting(64, "samples per batch", ge=1)
    seconds: float = setting(10, "length of an epoch without stalls", gt=0)
    threads: int = setting(2, "decoding threads", ge=1)
    latency_ms: float = setting(30, "store: time to the first byte", ge=0)
    mib_per_s: float = setting(80, "store: bandwidth of a request", gt=0)
    total_mib_per_s: float = setting(
        100,
        "store: bandwidth of all requests together; should be about four times pace x bytes per sample, as 1 GB/s is "
        "for 20 000 images/s",
        gt=0,
    )
    only: tuple[str, ...] = setting(PARTS, "parts to run")
    out: Path | None = setting(None, "JSON file to write (default: bench/storage.json)")


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


def measure_one(open_set: Callable[[], Any], args: StorageOptions, *, order: Order, epochs: int) -> dict[str, Any]:
    """Measure `epochs` epochs of the same samples at the pace of the options."""
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


def measure(args: StorageOptions) -> list[dict[str, Any]]:
    from resolute.pipeline.dataset.shard_set import ShardSet

    def open_with(files: Callable[[], Any]) -> Any:
        opened = files()
        return ShardSet.open(opened.root, resolutions=(args.res,), files=opened)

    def local() -> Files:
        return open_files(args.shards)

    def delayed(delay_s: float) -> Delayed:
        return Delayed(local(), delay_s)

    rows: list[dict[str, Any]] = []

    def add(name: str, files: Callable[[], Any], **words: Any) -> None:
        show_progress(name)
        rows.append({"name": name, **measure_one(partial(open_with, files), args, **words)})

    if "local" in args.only:
        add("page cache (warming)", local, order="shuffled", epochs=1)
        rows.clear()
        add("page cache", local, order="shuffled", epochs=1)
        for delay_s in DELAYS_S:
            add(f"{1e3 * delay_s:g} ms per sample", partial(delayed, delay_s), order="shuffled", epochs=1)
    for order in ("shuffled", "windowed") if "cold" in args.only else ():
        evict_files((args.shards / str(args.res)).glob("*.tar"))
        add("cold disk", local, order=order, epochs=2)
    for order in ("shuffled", "windowed") if "store" in args.only else ():
        with remote(args) as files:
            add("store, empty cache", files, order=order, epochs=2)
    show_progress("")
    return rows


@contextmanager
def remote(args: StorageOptions) -> Iterator[Callable[[], Files]]:
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


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    name, about = "python -m resolute.benchmarks.storage", "Measure how long training waits for data on slow storage."
    return program(name, StorageOptions, _run, words, help=about)


def _run(options: StorageOptions) -> None:
    only = chosen(options.only, PARTS)
    out = options.out or default_file("storage")
    check_writable(out)
    head = header()
    rows = measure(options)
    print(table(rows))
    values = {name: value for name, value in dataclasses.asdict(options).items() if name not in ("shards", "out")}
    write(out, {**head, "settings": {**values, "only": only, "set": options.shards.resolve().name}, "rows": rows})


if __name__ == "__main__":
    from resolute.console import run_main

    run_main(main)
