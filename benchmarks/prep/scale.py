"""Measures prep against the number of photos: made-up lists of up to a hundred million, and thousands of tars.

    python -m resolute.benchmarks.prep.scale [--photos 1000000,10000000,100000000] [--tars 2000]

The photos are URLs in a list, which are not requested. The commands are the real ones, each a process of its own: the
plan of jobs, one job up to its first photo, finish, a prep with nothing to do, and the plan of an extension by 1 %.
Only the shards are not converted: their records are written directly, with sparse files in place of their tars, which
is not measured. Seconds are of the whole command, `peak_mib` is the peak resident memory of its process, or of this
program at its start if that is more (about 110 MiB).

The tars hold samples of 20 small photos, in an S3 server on loopback with 30 or 200 ms to the first byte; they are
listed in processes of their own by prep's source, one after another (a part of them) and as prep does.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from resolute.console import guard_process

    guard_process()

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from resolute.benchmarks.cli import Parser, command
from resolute.benchmarks.record import check_writable, header, write
from resolute.benchmarks.storage.object_store import store as object_store
from resolute.pipeline.dataset.format import SAMPLE, SOURCE, STORED, shard_name
from resolute.prep.run.planned import read_set_plan
from resolute.prep.shard_set.record import ShardRecord
from resolute.prep.storage.hashed_file import FileInfo
from resolute.prep.storage.output import open_store

CLASSES = 1000
PER_SHARD = 4096
RES = "128,160,224"
LATENCIES_S = {0.03: 10, 0.2: 50}  # and the part of the tars that is listed one after another: a tenth, a fiftieth
SAMPLES = 20  # of a tar
# A job that ends at its first photo: what it does until then is its start.
JOB = """
import sys
from resolute.prep.run import planned
def stop(pool, options, specs, *args, **more):
    print(len(next(iter(specs)).byte_ranges))
    sys.exit()
planned.convert_shards = stop
planned.convert_range(sys.argv[1], (0, 1), workers=1)
"""
LIST = """
import sys, tempfile
from pathlib import Path
from resolute.prep.sources import scan_cache
from resolute.prep.sources.detect import open_source
if sys.argv[2] == "1":
    scan_cache.scans_at_once = lambda paths: 1
with tempfile.TemporaryDirectory() as folder:
    print(sum(1 for image in open_source(sys.argv[1], scan_cache=Path(folder))))
"""


def measured(name: str, words: Sequence[str], rows: dict[str, Any]) -> str:
    """Run a command; adds its seconds and peak memory to `rows` and returns its output."""
    began = time.perf_counter()
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        out = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)  # which `Popen` cannot ask for any more
    if status:
        raise RuntimeError(f"{name} failed with status {process.returncode}: {out}")
    rows[name] = {"seconds": time.perf_counter() - began, "peak_mib": usage.ru_maxrss / 1024}
    print(f"{name:<20} {rows[name]['seconds']:8.2f} s {rows[name]['peak_mib']:7.0f} MiB", flush=True)
    return out


def add_photos(path: Path, first: int, end: int) -> None:
    """Append the URLs of the photos with these numbers to a list."""
    with path.open("a") as file:
        for start in range(first, end, 100_000):
            numbers = range(start, min(end, start + 100_000))
            file.writelines(
                f"https://photos.example/n{n % CLASSES:04d}/img_{n:09d}.jpg n{n % CLASSES:04d}\n" for n in numbers
            )


def write_shards(out: Path) -> int:
    """Finish all planned shards without converting them; returns the bytes of their records."""
    store, nbytes = open_store(str(out)), 0
    plan = read_set_plan(store)
    for res in plan.short_sides:
        (out / str(res)).mkdir(parents=True, exist_ok=True)
    for split, number in plan.layout:
        keys = np.asarray(plan.layout.keys(split, number), np.uint64)
        samples, sources, stored = (np.zeros(len(keys), dtype) for dtype in (SAMPLE, SOURCE, STORED))
        samples["key"], samples["label"] = keys, keys % CLASSES
        # An odd factor, and another parity for each split: no two photos are equal.
        sources["digest"] = (2 * keys + (split == "val")) * np.uint64(0x9E37_79B9_7F4A_7C15)
        sources["width"] = sources["height"] = 500
        stored["offset"], stored["nbytes"] = 512 + 20_480 * np.arange(len(keys)), 17_000
        stored["width"] = stored["height"] = 256
        name = shard_name(split, number)
        for res in plan.short_sides:
            info = FileInfo(nbytes=20_480 * len(keys) + 1024, sha256="0" * 64)
            files = {f"{res}/{name}.{kind}": info for kind in ("tar", "idx")}
            for file in files:
                with (out / file).open("wb") as sparse:
                    sparse.truncate(info.nbytes)
            data = ShardRecord(
                plan=plan.hash_of(split, number), split=split, number=number, res=res, samples=samples,
                sources=sources, stored=stored, files=files, rejects=(),
            )
            content = data.to_bytes()
            (out / data.name).write_bytes(content)
            nbytes += len(content)
    return nbytes


def measure_photos(count: int, folder: Path) -> dict[str, Any]:
    """All steps for a list of `count` photos."""
    photos, out = folder / "photos.txt", folder / "set"
    rows: dict[str, Any] = {"photos": count}
    print(f"{count} photos", flush=True)
    add_photos(photos, 0, count)
    words = ["--src", str(photos), "--out", str(out), "--res", RES, "--shard-samples", str(PER_SHARD)]
    prep = [sys.executable, "-m", "resolute"]
    measured("plan", [*prep, "jobs", "plan", *words], rows)
    started = measured("start of a job", [sys.executable, "-c", JOB, str(out)], rows)
    if int(started) != min(count, PER_SHARD):
        raise RuntimeError(f"the job started with {started} photos")
    rows["record_bytes"] = write_shards(out)
    measured("finish", [*prep, "jobs", "finish", "--out", str(out)], rows)
    done = measured("nothing to do", [*prep, "shards", *words], rows)
    if "nothing to do" not in done:
        raise RuntimeError(done)
    add_photos(photos, count, count + count // 100)
    measured("plan of 1 % more", [*prep, "jobs", "plan", *words, "--extend"], rows)
    return rows


def measure_tars(count: int, folder: Path) -> list[dict[str, Any]]:
    """Listing `count` tars of samples in stores of each latency, and a part of them one after another."""
    (folder / "tars").mkdir()
    for number in range(count):
        with tarfile.open(folder / "tars" / f"x-{number:05d}.tar", "w") as tar:
            for n in range(SAMPLES):
                for suffix, data in (("jpg", bytes(10_000)), ("cls", b"%d" % (n % 10))):
                    info = tarfile.TarInfo(f"{number:05d}{n:02d}.{suffix}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    return [_measure_store(folder, count, latency_s, part) for latency_s, part in LATENCIES_S.items()]


def _measure_store(folder: Path, count: int, latency_s: float, part: int) -> dict[str, Any]:
    rows: dict[str, Any] = {"tars": count, "latency_s": latency_s, "samples": SAMPLES}
    with object_store(folder, latency_s=latency_s, bytes_per_s=80e6, total_bytes_per_s=1e9) as url:
        for name, last, how in (("one after another", max(1, count // part), "1"), ("as prep does", count, "")):
            src = f"{url}/tars/x-{{00000..{last - 1:05d}}}.tar"
            listed = measured(name, [sys.executable, "-c", LIST, src, how], rows)
            if int(listed) != last * SAMPLES:
                raise RuntimeError(f"{listed} photos were listed")
            rows[name]["tars_per_s"] = last / rows[name]["seconds"]
    rows["ratio"] = rows["as prep does"]["tars_per_s"] / rows["one after another"]["tars_per_s"]
    print(f"{1e3 * latency_s:g} ms: {rows['ratio']:.1f} times as fast", flush=True)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = Parser(prog="python -m resolute.benchmarks.prep.scale", description=__doc__)
    parser.add_argument("--photos", default="1000000,10000000,100000000", help="(default: %(default)s)")
    parser.add_argument("--tars", type=int, default=2000, help="tars in the store (default: %(default)s)")
    parser.add_argument("--work", type=Path, default=None, help="a folder with room for 60 GB (default: /tmp)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/prep-scale.json"), help="JSON file")
    return command(parser, _measure_all, argv)


def _measure_all(args: argparse.Namespace) -> None:
    check_writable(args.out)
    result: dict[str, Any] = {**header(), "resolutions": RES, "shard_samples": PER_SHARD, "lists": [], "tars": []}
    if args.tars:
        with tempfile.TemporaryDirectory(dir=args.work) as folder:
            result["tars"] = measure_tars(args.tars, Path(folder))
    for count in map(int, filter(None, args.photos.split(","))):
        with tempfile.TemporaryDirectory(dir=args.work) as folder:
            result["lists"].append(measure_photos(count, Path(folder)))
        write(args.out, result)
    print(json.dumps(result["lists"]))


if __name__ == "__main__":
    from resolute.console import run_main

    run_main(main)
