"""Measures time per batch and memory of a set's index, from a thousand to a hundred million samples.

    python -m resolute.benchmarks.storage.index [--samples 1000,1000000,100000000] [--dir FOLDER] [--out FILE]

For each size, a synthetic set is created with a real index and sparse files as shards (10 GB of disk at 100 M samples,
deleted at the end). A separate process opens it at three resolutions and gets batches and labels from the plan, as the
loader does: first batches whose index blocks are not verified yet ("unchecked"), read from disk ("cold", if the system
drops its cache) or from memory, then the same batches again. With 100 M samples every record of a new batch lies in
another block, so "unchecked" is the worst case; a long run approaches "again".
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from resolute.console import guard_process

    guard_process()

import argparse
import hashlib
import io
import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from resolute.benchmarks.cli import Parser, command, text_table
from resolute.benchmarks.proc import evict_files, in_new_process, read_files
from resolute.benchmarks.record import check_writable, header, write
from resolute.pipeline.dataset.format import FORMAT, SAMPLE, STORED, VERSION, manifest_bytes, shard_name, tar_name
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.plan.order import Order
from resolute.pipeline.plan.plan import Plan
from resolute.pipeline.plan.stage import Stage

RESOLUTIONS = (128, 160, 224)
PER_SHARD, CHUNK, BATCH = 10_000, 1_000_000, 256
TAR_BYTES = 100_000_000


def make_set(root: Path, samples: int) -> None:
    """Create a shard set with a training split; its tars are sparse files."""
    shards = [shard_name("train", number) for number in range(math.ceil(samples / PER_SHARD))]
    files: dict[str, dict[str, Any]] = {}
    (root / "index").mkdir(parents=True)
    files |= _write(root, "index/train.npy", SAMPLE, samples)
    for res in RESOLUTIONS:
        files |= _write(root, f"index/train-{res}.npy", STORED, samples)
        (root / str(res)).mkdir()
        for shard in shards:
            name = tar_name(res, shard)
            with (root / name).open("wb") as tar:
                tar.truncate(TAR_BYTES)
            files[name] = {"bytes": TAR_BYTES, "sha256": hashlib.sha256(name.encode()).hexdigest()}
            files[name.replace(".tar", ".idx")] = {"bytes": 1000, "sha256": files[name]["sha256"]}
    manifest = {
        "format": FORMAT, "version": VERSION, "settings": {"margin": 8 / 7, "val": {"how": "folder"}},
        "classes": [str(n) for n in range(1000)],
        "target": {"kind": "class"},
        "resolutions": {str(res): {"short_side": round(res * 8 / 7)} for res in RESOLUTIONS},
        "splits": {"train": {"samples": samples, "shards": shards}}, "files": files,
        "generations": [
            {"samples": {"train": samples}, "shards": {"train": len(shards)}, "classes": 1000, "dropped": {}}
        ],
    }  # fmt: skip
    (root / "manifest.json").write_bytes(manifest_bytes(manifest))


def _write(root: Path, name: str, dtype: np.dtype[Any], samples: int) -> dict[str, dict[str, Any]]:
    """Write an index array in chunks; returns its manifest entry."""

    def chunks() -> Iterator[bytes]:
        head = io.BytesIO()
        fields = np.lib.format.header_data_from_array_1_0(np.empty(0, dtype)) | {"shape": (samples,)}
        np.lib.format.write_array_header_1_0(head, fields)
        yield head.getvalue()
        random = np.random.default_rng(0)
        for first in range(0, samples, CHUNK):
            count = min(CHUNK, samples - first)
            rows, number = np.zeros(count, dtype), np.arange(first, first + count, dtype=np.uint64)
            if dtype == SAMPLE:
                rows["key"], rows["label"] = number, random.integers(0, 1000, count)
            else:
                rows["offset"], rows["shard"] = number % PER_SHARD * 10_000 + 512, number // PER_SHARD
                rows["width"], rows["height"] = random.integers(146, 400, count), 146
                rows["nbytes"], rows["crc32"] = random.integers(5000, 9000, count), random.integers(0, 2**32, count)
            yield rows.tobytes()

    with (root / name).open("wb") as file:
        for chunk in chunks():
            file.write(chunk)
    with (root / name).open("rb") as finished:
        sha256 = hashlib.file_digest(finished, "sha256").hexdigest()
    return {name: {"bytes": (root / name).stat().st_size, "sha256": sha256}}


def memory_mib() -> dict[str, float]:
    """Resident memory of this process: anonymous ("own") and memory-mapped files, which the system can reclaim."""
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = {line.split(":")[0]: float(line.split()[1]) / 1024 for line in lines if line.endswith("kB")}
    return {"own": sizes["RssAnon"], "mapped": sizes["RssFile"]}


def measure(root: Path, order: Order, *, cold: bool, batches: int) -> dict[str, Any]:
    """Times of opening the set (s) and of batches at random positions of a run (µs per batch), and memory."""
    _compile()
    before, began = memory_mib(), time.perf_counter()
    shards = ShardSet.open(root)
    open_s = time.perf_counter() - began
    opened = memory_mib()
    stages = [Stage(res=res, epochs=3, batch_size=BATCH) for res in RESOLUTIONS]
    plan = Plan(shards, stages, order=order, eval_batch_size=None)
    positions = np.random.default_rng(1).integers(0, plan.total_batches, batches).tolist()
    first = _times_us(plan, positions)
    again = _times_us(plan, positions)
    after = memory_mib()
    return {
        "samples": len(shards.splits["train"]), "order": order, "cold": cold, "batch": BATCH, "batches": batches,
        "open_s": open_s, "own_mib_open": opened["own"] - before["own"], "own_mib_after": after["own"] - before["own"],
        "mapped_mib_after": after["mapped"] - before["mapped"],
        "unchecked_us": statistics.median(first), "unchecked_p95_us": float(np.quantile(first, 0.95)),
        "again_us": statistics.median(again), "again_p95_us": float(np.quantile(again, 0.95)),
    }  # fmt: skip


def _compile() -> None:
    """Have everything compiled before it is timed."""
    with tempfile.TemporaryDirectory() as folder:
        make_set(Path(folder) / "set", 1000)
        shards = ShardSet.open(Path(folder) / "set")
        for order in ("full", "block"):
            stage = Stage(res=128, epochs=1, batch_size=BATCH, order=order)
            _times_us(Plan(shards, [stage], eval_batch_size=None), [0])


def _times_us(plan: Plan, positions: list[int]) -> list[float]:
    samples, times_us = plan.shards.splits["train"].samples, []
    for index in positions:
        began = time.perf_counter()
        spec = plan.batch(index)
        samples[spec.ids]["label"].astype(np.int64)
        times_us.append(1e6 * (time.perf_counter() - began))
    return times_us


def table(runs: list[dict[str, Any]]) -> str:
    rows = [
        [f"{run['samples']:,}", run["order"], "disk" if run["cold"] else "memory", f"{1e3 * run['open_s']:.0f}",
         f"{run['own_mib_after']:.1f}", f"{run['mapped_mib_after']:.0f}", f"{run['unchecked_us']:.0f}",
         f"{run['again_us']:.0f}", f"{run['again_us'] / BATCH:.2f}"]
        for run in runs
    ]  # fmt: skip
    header = ["samples", "order", "index in", "open ms", "own MiB", "mapped MiB", "unchecked us", "again us",
              "us/sample"]  # fmt: skip
    return text_table(f"batches of {BATCH} with labels, {len(RESOLUTIONS)} resolutions open", header, rows, left=3)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = Parser(prog="python -m resolute.benchmarks.storage.index", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", default="1000,1000000,100000000", metavar="N,…")
    parser.add_argument("--batches", type=int, default=400, metavar="N")
    parser.add_argument("--dir", type=Path, help="folder for the sets (default: the system's temporary folder)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/index.json"), metavar="FILE")
    return command(parser, _run, argv)


def _run(args: argparse.Namespace) -> None:
    check_writable(args.out)
    head = header()
    runs: list[dict[str, Any]] = []
    bytes_of: dict[int, float] = {}
    orders: tuple[Order, ...] = ("full", "block")
    for samples in map(int, args.samples.split(",")):
        with tempfile.TemporaryDirectory(dir=args.dir) as folder:
            root, began = Path(folder) / "set", time.perf_counter()
            make_set(root, samples)
            bytes_of[samples] = sum(path.stat().st_size for path in (root / "index").glob("*.npy")) / samples
            print(f"{samples:,}: index made in {time.perf_counter() - began:.0f} s, "
                  f"{(root / 'manifest.json').stat().st_size / 1e6:.1f} MB of manifest", flush=True)  # fmt: skip
            for cold in (True, False):
                for order in orders:
                    (evict_files if cold else read_files)((root / "index").iterdir())
                    # why a new process: its own memory, and nothing verified yet
                    runs.append(in_new_process(measure, root, order, cold=cold, batches=args.batches))
    print(table(runs))
    write(args.out, {**head, "resolutions": RESOLUTIONS, "index_bytes_per_sample": bytes_of, "runs": runs})


if __name__ == "__main__":
    from resolute.console import run_main

    run_main(main)
