"""Time and memory of prep as a function of the number of images, and for a set of ten million entries.

    python -m benchmarks.prep_scale --src photos/train [--copies 1,4,16] [--entries 10000000] [--files 200000]

Three measurements in separate processes: complete runs of prep over 1, 4 and 16 hard links of every photo (peak
proportional set size of the main process and of all workers, sampled every 50 ms); the scan of a folder of empty files
named like photos; and index and manifest of a synthetic set, written by prep's `finish` and opened by `ShardSet.open`.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from pipeline.cli import guard_process

    guard_process()

import argparse
import contextlib
import json
import multiprocessing
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.cli import Parser
from pipeline.dataset.shard_set import SAMPLE, SOURCE, STORED, ShardSet, shard_name
from prep.config import Settings
from prep.plan.inputs import list_inputs
from prep.shards.manifest import SplitTotals, SplitView, finalize_set
from prep.shards.writer import ShardRecord
from prep.storage.hashed_file import FileInfo
from prep.storage.output import LocalStore

from .machine import machine
from .shell import command, ready_to_write, write

MIB = 1 << 20
PER_SHARD = 4096
RESOLUTIONS = (128, 160, 224)


def peak_mib() -> float:
    """Peak resident memory of this process in MiB. Source: getrusage(2), kB on Linux."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def in_a_process(work: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """The result of `work`, run in a fresh process so that its peak memory is measured alone."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(theirs, work, args))
    process.start()
    theirs.close()
    result: dict[str, Any] = ours.recv()
    process.join()
    return result


def _answer(conn: Any, work: Callable[..., dict[str, Any]], args: tuple[Any, ...]) -> None:
    conn.send(work(*args))


def watched(command: list[str]) -> tuple[float, float]:
    """Run a command; returns the peak proportional set size in MiB of its process and of its descendants together."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    main_mib = others_mib = 0.0
    while process.poll() is None:
        time.sleep(0.05)
        parents = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        family = {process.pid}
        while more := {pid for pid, parent in parents.items() if parent in family} - family:
            family |= more
        main_mib = max(main_mib, _pss_mib(process.pid))
        others_mib = max(others_mib, sum(_pss_mib(pid) for pid in family - {process.pid}))
    if process.returncode:
        raise RuntimeError(f"prep failed with exit status {process.returncode}")
    return main_mib, others_mib


def _pss_mib(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def run_prep(src: Path, out: Path) -> dict[str, Any]:
    res = ",".join(map(str, RESOLUTIONS))
    words = ["--src", str(src), "--out", str(out), "--res", res, "--workers", "2", "--shard-samples", "1024"]
    began = time.perf_counter()
    main_mib, workers_mib = watched([sys.executable, "-m", "prep", *words, "--max-bad", "1"])
    elapsed_s = time.perf_counter() - began
    images = json.loads((out / "manifest.json").read_text())["source"]["images"]
    return {"images": images, "elapsed_s": elapsed_s, "main_mib": main_mib, "workers_mib": workers_mib}


def link_copies(src: Path, copies: int, root: Path) -> None:
    for path in sorted(path for path in src.rglob("*") if path.is_file()):
        folder = root / path.parent.relative_to(src)
        folder.mkdir(parents=True, exist_ok=True)
        for copy in range(copies):
            (folder / f"{copy:03d}-{path.name}").hardlink_to(path)


def scan(root: str) -> dict[str, Any]:
    before = peak_mib()
    began = time.perf_counter()
    settings = Settings(src=root, out=f"{root}-out", resolutions=(128,))
    with tempfile.TemporaryDirectory() as scratch:
        inputs = list_inputs(settings, Path(scratch), Path(scratch) / "spool")
        return {
            "files": inputs.images, "elapsed_s": time.perf_counter() - began, "before_mib": before,
            "peak_mib": peak_mib(),
        }  # fmt: skip


def make_files(root: Path, count: int) -> None:
    for label in range(1000):
        folder = root / f"n{label:08d}"
        folder.mkdir(parents=True)
        for i in range(label, count, 1000):
            (folder / f"n{label:08d}_{i}.JPEG").touch()


def write_entries(root: str, entries: int) -> dict[str, Any]:
    """A synthetic set of `entries` samples: index, sources and manifest written by prep, sparse files as tars."""
    store, shards = LocalStore(Path(root)), -(-entries // PER_SHARD)
    before = peak_mib()

    def written(number: int) -> ShardRecord:
        n = min(PER_SHARD, entries - number * PER_SHARD)
        keys = np.arange(n, dtype=np.uint64) + number * PER_SHARD
        samples, sources, stored = np.zeros(n, SAMPLE), np.zeros(n, SOURCE), np.zeros(n, STORED)
        samples["key"], samples["label"] = keys, keys % 1000
        sources["digest"] = keys * np.uint64(0x9E37_79B9_7F4A_7C15)  # odd: no two are equal
        stored["offset"], stored["nbytes"] = np.arange(n) * 20_000 + 512, 17_000
        name = shard_name("train", number)
        info = FileInfo(nbytes=n, sha256="0" * 64)
        files = {f"{res}/{name}.{kind}": info for res in RESOLUTIONS for kind in ("tar", "idx")}
        return ShardRecord(
            split="train", number=number, samples=samples, sources=sources, rejects=(), files=files,
            stored={res: stored.copy() for res in RESOLUTIONS},
        )  # fmt: skip

    for res in RESOLUTIONS:
        (store.root / str(res)).mkdir(parents=True)
        for number in range(shards):
            with (store.root / str(res) / f"{shard_name('train', number)}.tar").open("wb") as tar:
                tar.truncate(min(PER_SHARD, entries - number * PER_SHARD))
    view = SplitView(shards=shards, record=written, names_of=lambda keys: [f"class/{key:09d}.jpg" for key in keys])
    lengths = {shard_name("train", n): min(PER_SHARD, entries - n * PER_SHARD) for n in range(shards)}
    counts = {"train": SplitTotals(samples=entries, shards=lengths)}
    settings = {"margin": 8 / 7, "val": {"how": "folder"}}
    plan = {"settings": settings, "classes": [str(n) for n in range(1000)], "source": {}}
    began = time.perf_counter()
    finalize_set(store, plan, {res: round(res * 8 / 7) for res in RESOLUTIONS}, {"train": view}, counts)
    return {
        "entries": entries, "elapsed_s": time.perf_counter() - began, "before_mib": before, "peak_mib": peak_mib(),
        "index_bytes_a_sample": sum(f.stat().st_size for f in (store.root / "index").glob("*.npy")) / entries,
        "manifest_bytes": (store.root / "manifest.json").stat().st_size,
    }  # fmt: skip


def open_entries(root: str) -> dict[str, Any]:
    before, began = peak_mib(), time.perf_counter()
    shards = ShardSet.open(root)
    opened = time.perf_counter()
    split = shards.splits["train"]
    assert split.samples[:: max(1, len(split) // 1000)]["label"].max() < 1000
    return {"elapsed_s": opened - began, "before_mib": before, "peak_mib": peak_mib()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = Parser(prog="python -m benchmarks.prep_scale", description=__doc__)
    parser.add_argument("--src", type=Path, required=True, help="folder of class folders")
    parser.add_argument("--copies", default="1,4,16")
    parser.add_argument("--entries", type=int, default=10_000_000)
    parser.add_argument("--files", type=int, default=200_000)
    parser.add_argument("--out", type=Path, help="result file (JSON)")
    return command(parser, _run, argv)


def _run(args: argparse.Namespace) -> None:
    if args.out:
        ready_to_write(args.out)
    result: dict[str, Any] = {"machine": machine(), "runs": []}
    # why: hard links need the photos' own disk
    with tempfile.TemporaryDirectory(dir=args.src.resolve().parent) as folder:
        for copies in map(int, args.copies.split(",")):
            root = Path(folder) / f"photos-{copies}"
            link_copies(args.src, copies, root)
            result["runs"].append(run_prep(root, Path(folder) / f"set-{copies}"))
            print(json.dumps(result["runs"][-1]), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        make_files(Path(folder) / "files", args.files)
        result["scan"] = in_a_process(scan, str(Path(folder) / "files"))
        print(json.dumps(result["scan"]), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        result["write"] = in_a_process(write_entries, folder, args.entries)
        print(json.dumps(result["write"]), flush=True)
        result["open"] = in_a_process(open_entries, folder)
        print(json.dumps(result["open"]), flush=True)
    if args.out:
        write(args.out, result)


if __name__ == "__main__":
    from pipeline.cli import run_main

    run_main(main)
