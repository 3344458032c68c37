"""Measures time and memory of prep against the number of images, up to a set of ten million entries.

    python -m resolute.benchmarks.prep.scale --src photos/train [--copies 1,4,16] [--entries 10000000]

Two measurements in separate processes: complete runs of prep over 1, 4 and 16 hard links of every photo (peak
proportional set size of the main process and of all workers, sampled every 50 ms); and index and manifest of a
synthetic set, written by prep's `finalize_set`.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from resolute.console import guard_process

    guard_process()

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from resolute.benchmarks.cli import Parser, command
from resolute.benchmarks.proc import descendants, in_new_process
from resolute.benchmarks.record import check_writable, header, write
from resolute.pipeline.dataset.format import SAMPLE, SOURCE, STORED, shard_name
from resolute.prep.plan.generations import SUPERSEDED, read_inputs, write_inputs
from resolute.prep.plan.set_plan import SetPlan, layout_of
from resolute.prep.shards.duplicates import InputNames
from resolute.prep.shards.manifest import finalize_set
from resolute.prep.shards.record import Records, ShardRecord
from resolute.prep.storage.hashed_file import FileInfo
from resolute.prep.storage.output import LocalStore

MIB = 1 << 20
PER_SHARD = 4096
RESOLUTIONS = (128, 160, 224)


def peak_mib() -> float:
    """Peak resident memory of this process in MiB. Source: getrusage(2), kB on Linux."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run_watched(words: list[str]) -> tuple[float, float]:
    """Run a command; returns the peak proportional set size in MiB of its process and of its descendants together."""
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    main_mib = others_mib = 0.0
    while process.poll() is None:
        time.sleep(0.05)
        main_mib = max(main_mib, _pss_mib(process.pid))
        others_mib = max(others_mib, sum(map(_pss_mib, descendants(process.pid))))
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
    main_mib, workers_mib = run_watched([sys.executable, "-m", "resolute", "shards", *words, "--max-bad", "1"])
    elapsed_s = time.perf_counter() - began
    images = json.loads((out / "manifest.json").read_text())["source"]["images"]
    return {"images": images, "elapsed_s": elapsed_s, "main_mib": main_mib, "workers_mib": workers_mib}


def link_copies(src: Path, copies: int, root: Path) -> None:
    for path in sorted(path for path in src.rglob("*") if path.is_file()):
        folder = root / path.parent.relative_to(src)
        folder.mkdir(parents=True, exist_ok=True)
        for copy in range(copies):
            (folder / f"{copy:03d}-{path.name}").hardlink_to(path)


class _MadeUpNames(InputNames):
    def names(self, split: str, keys: Sequence[int]) -> list[str]:
        return [f"class/{key:09d}.jpg" for key in keys]


def write_entries(root: str, entries: int) -> dict[str, Any]:
    """A synthetic set of `entries` samples: index, sources and manifest derived by prep, sparse files as tars."""
    store, shards = LocalStore(Path(root)), -(-entries // PER_SHARD)
    for res in RESOLUTIONS:
        (store.root / str(res)).mkdir(parents=True)
    settings = {"margin": 8 / 7, "val": {"how": "folder"}, "shard_samples": PER_SHARD, "quality": 90, "seed": 0}
    own = {"generation": 0, "settings": settings, "classes": [str(n) for n in range(1000)], "codecs": {}, "source": {},
           "target": {"kind": "class"}, "images": {"train": entries}}  # fmt: skip
    plan = SetPlan(
        plans=(own,), src="-", layout=layout_of((own,)), short_sides={res: round(res * 8 / 7) for res in RESOLUTIONS},
        max_bad=0.0, ignored=Counter(), warnings=(), damaged=frozenset(),
    )  # fmt: skip
    write_inputs(store, 0, own, {}, np.empty(0, SUPERSEDED))  # why none: their names are made up
    records = Records(store, plan.hash_of, store.root / "records-copy")
    for number in range(shards):
        n = min(PER_SHARD, entries - number * PER_SHARD)
        keys = np.arange(n, dtype=np.uint64) + number * PER_SHARD
        samples, sources, stored = np.zeros(n, SAMPLE), np.zeros(n, SOURCE), np.zeros(n, STORED)
        samples["key"], samples["label"] = keys, keys % 1000
        sources["digest"] = keys * np.uint64(0x9E37_79B9_7F4A_7C15)  # odd: no two are equal
        stored["offset"], stored["nbytes"] = np.arange(n) * 20_000 + 512, 17_000
        name, info = shard_name("train", number), FileInfo(nbytes=n, sha256="0" * 64)
        for res in RESOLUTIONS:
            with (store.root / str(res) / f"{name}.tar").open("wb") as tar:
                tar.truncate(n)
            files = {f"{res}/{name}.{kind}": info for kind in ("tar", "idx")}
            record = ShardRecord(
                plan=plan.hashes[0], split="train", number=number, res=res, samples=samples, sources=sources,
                stored=stored, files=files, rejects=(),
            )  # fmt: skip
            records.add(record.to_bytes())
    before, began = peak_mib(), time.perf_counter()
    photos = partial(read_inputs, store, plan=None, scratch=store.root)
    finalize_set(store, plan, records, _MadeUpNames(), photos, None, store.root)
    elapsed_s = time.perf_counter() - began
    records.close()
    return {
        "entries": entries, "elapsed_s": elapsed_s, "before_mib": before, "peak_mib": peak_mib(),
        "index_bytes_per_sample": sum(f.stat().st_size for f in (store.root / "index").glob("*.npy")) / entries,
        "manifest_bytes": (store.root / "manifest.json").stat().st_size,
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = Parser(prog="python -m resolute.benchmarks.prep.scale", description=__doc__)
    parser.add_argument("--src", type=Path, required=True, help="folder of class folders")
    parser.add_argument("--copies", default="1,4,16")
    parser.add_argument("--entries", type=int, default=10_000_000)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/prep-scale.json"), help="JSON to write")
    return command(parser, _run, argv)


def _run(args: argparse.Namespace) -> None:
    check_writable(args.out)
    result: dict[str, Any] = {**header(), "runs": []}
    # why: hard links need the photos' own disk
    with tempfile.TemporaryDirectory(dir=args.src.resolve().parent) as folder:
        for copies in map(int, args.copies.split(",")):
            root = Path(folder) / f"photos-{copies}"
            link_copies(args.src, copies, root)
            result["runs"].append(run_prep(root, Path(folder) / f"set-{copies}"))
            print(json.dumps(result["runs"][-1]), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        result["write"] = in_new_process(write_entries, folder, args.entries)
        print(json.dumps(result["write"]), flush=True)
    write(args.out, result)


if __name__ == "__main__":
    from resolute.console import run_main

    run_main(main)
