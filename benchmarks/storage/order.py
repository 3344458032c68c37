"""Measures how well each sample order shuffles, and how much it reads, relative to random permutations.

    python -m resolute.benchmarks.storage.order [--shards DIR | --samples 1281167 --classes 1000] [--out FILE]

Measured over complete training epochs, for `full`, for `block` with several window sizes, and without shuffling:

* class mix: mean total variation distance between the class distributions of a batch and of the set, relative to
  independent random permutations (1 is ideal); for classes as prep stores them (shuffled), and as if they were stored
  one after another, which only `full` can fully compensate;
* kept pairs: fraction of the pairs in a batch that share a batch again in the next epoch, relative to chance (1 is
  ideal);
* blocks per batch: number of different storage blocks that a batch takes samples from;
* reads per 1000: blocks fetched per 1000 samples with an LRU cache of two windows.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from resolute.console import guard_process

    guard_process()

import argparse
import itertools
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resolute.benchmarks.cli import Parser, command, text_table
from resolute.benchmarks.record import check_writable, header, write
from resolute.errors import ResoluteError
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.plan.order import WINDOW_BLOCKS, block_samples, sample_ids

WINDOWS = (1, 4, 16, 64)
IDEAL = 8  # random permutations to compare with


def orders_of(total: int, epochs: int, seed: int = 0) -> dict[str, list[NDArray[np.int64]]]:
    """Name -> the sample ids of each epoch, in order."""
    positions = np.arange(total)

    def epoch(number: int, **how: Any) -> NDArray[np.int64]:
        return sample_ids(positions=positions, seed=seed, epoch=number, samples=total, offset=0, total=total, **how)

    orders = {"full": [epoch(number, order="full") for number in range(epochs)]}
    for window in WINDOWS:
        orders[f"block, window {window}"] = [epoch(number, order="block", window=window) for number in range(epochs)]
    return orders | {"as stored": [positions] * epochs}


def class_distance(ids: NDArray[np.int64], labels: NDArray[np.int64], batch_size: int) -> float:
    """Mean total variation distance between the class distributions of full batches and of the set."""
    classes = int(labels.max()) + 1
    share = np.bincount(labels, minlength=classes) / len(labels)
    batches = len(ids) // batch_size
    number = np.repeat(np.arange(batches), batch_size)
    seen = np.zeros((batches, classes))
    np.add.at(seen, (number, labels[ids[: len(number)]]), 1 / batch_size)
    return float(np.abs(seen - share).sum(axis=1).mean() / 2)


def kept_pairs(before: NDArray[np.int64], after: NDArray[np.int64], batch_size: int) -> float:
    """Fraction of the pairs of samples in a batch that share a batch again in the next epoch, relative to chance."""
    total = len(before)
    batch_of = np.empty((2, total), np.int64)
    for which, ids in enumerate((before, after)):
        batch_of[which, ids] = np.arange(total) // batch_size
    sizes = np.bincount(batch_of[0])
    after_sizes = np.bincount(batch_of[1])
    _, shared = np.unique(batch_of[0] * len(after_sizes) + batch_of[1], return_counts=True)
    pairs, kept = (sizes * (sizes - 1)).sum(), (shared * (shared - 1)).sum()
    chance = (after_sizes * (after_sizes - 1)).sum() / (total * (total - 1))
    return float(kept / pairs / chance)


def fetches(ids: NDArray[np.int64], block: int, capacity: int) -> int:
    """Number of blocks (of `block` samples) fetched to read `ids` in order, with an LRU cache of `capacity` blocks."""
    cache: OrderedDict[int, None] = OrderedDict()
    count = 0
    for number in (ids // block).tolist():
        if number in cache:
            cache.move_to_end(number)
            continue
        count += 1
        cache[number] = None
        if len(cache) > capacity:
            cache.popitem(last=False)
    return count


def measure(labels: NDArray[np.int64], batch_size: int, epochs: int) -> list[dict[str, Any]]:
    """One row of results per order; `labels` (N,) as stored."""
    total, block = len(labels), block_samples(len(labels))
    layouts = {"shuffled": labels, "sorted": np.sort(labels)}
    random = np.random.default_rng(0)
    ideal = np.mean([class_distance(random.permutation(total), labels, batch_size) for _ in range(IDEAL)])
    rows = []
    for name, order in orders_of(total, epochs).items():
        window = int(name.rpartition(" ")[2]) if name.startswith("block") else WINDOW_BLOCKS
        full_batches = order[0][: total // batch_size * batch_size].reshape(-1, batch_size)
        touched = np.sort(full_batches // block, axis=1)
        rows.append({
            "order": name,
            **{f"class_mix_{layout}": float(np.mean([class_distance(ids, stored, batch_size) for ids in order]) / ideal)
               for layout, stored in layouts.items()},
            "kept_pairs": float(np.mean([kept_pairs(a, b, batch_size) for a, b in itertools.pairwise(order)])),
            "blocks_per_batch": float(1 + (np.diff(touched, axis=1) > 0).sum(axis=1).mean()),
            "reads_per_1000": 1000 * fetches(order[0], block, 2 * window) / total,
        })  # fmt: skip
    return rows


def table(result: dict[str, Any]) -> str:
    rows = [
        [row["order"], f"{row['class_mix_shuffled']:.3f}", f"{row['class_mix_sorted']:.3f}", f"{row['kept_pairs']:.2f}",
         f"{row['blocks_per_batch']:.1f}", f"{row['reads_per_1000']:.2f}"]
        for row in result["orders"]
    ]  # fmt: skip
    title = (f"{result['samples']:,} samples, {result['classes']} classes, batches of {result['batch_size']}, blocks "
             f"of {result['block_samples']}: each over ideal random draws")  # fmt: skip
    header = ["order", "class mix", "stored sorted", "kept pairs", "blocks per batch", "reads per 1000"]
    return text_table(title, header, rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = Parser(prog="python -m resolute.benchmarks.storage.order", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shards", type=Path, metavar="DIR", help="shard set whose samples and classes to use")
    parser.add_argument("--samples", type=int, default=1_281_167, help="size of a synthetic set (default: ImageNet's)")
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/order.json"), metavar="FILE")
    return command(parser, _run, argv)


def _run(args: argparse.Namespace) -> None:
    if args.shards:
        labels = ShardSet.open(args.shards).splits["train"].samples["label"].astype(np.int64)
    else:
        labels = np.random.default_rng(1).permutation(np.arange(args.samples) % args.classes)
    if min(len(labels) // 2, args.epochs) < 2 or not 2 <= args.batch_size <= len(labels):
        raise ResoluteError("order: got too few samples or epochs, expected two batches and two epochs; raise them")
    check_writable(args.out)
    result = {
        **header(),
        "samples": len(labels), "classes": int(labels.max()) + 1, "batch_size": args.batch_size,
        "block_samples": block_samples(len(labels)), "default_window": WINDOW_BLOCKS, "epochs": args.epochs,
        "orders": measure(labels, args.batch_size, args.epochs),
    }  # fmt: skip
    print(table(result))
    write(args.out, result)


if __name__ == "__main__":
    from resolute.console import run_main

    run_main(main)
