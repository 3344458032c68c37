"""Measures what it costs to add photos to a finished set (EXTEND=1) beside making it, and that no old byte changes.

    python -m resolute.benchmarks.prep.extend --src photos/train [photos/more …] [--rounds 3] [--entries 1281167]

Two measurements. First, complete commands on hard links of all photos, each with the CPU time of all its processes: the
first run, on all but every hundredth photo; an extension that finds nothing new; one by a single photo; one that adds
the rest, 1 %; and, as start-up, a first run on 24 photos. Second, without images, on a synthetic set with `--entries`
photos: the comparison of source and set, and index and manifest of an extension by 1 %, beside those of the set itself.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from resolute.console import guard_process

    guard_process()

import argparse
import ctypes
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from resolute.benchmarks.cli import Parser, command
from resolute.benchmarks.proc import in_new_process
from resolute.benchmarks.record import check_writable, header, write
from resolute.pipeline.dataset.format import SAMPLE, SOURCE, STORED, shard_name
from resolute.prep.plan.catalog import Catalog, write_catalog
from resolute.prep.plan.generations import SUPERSEDED, StoredNames, compare, read_inputs, rejected_keys, write_inputs
from resolute.prep.plan.set_plan import SetPlan, layout_of
from resolute.prep.plan.splits import Split, extend_splits
from resolute.prep.shards.manifest import finalize_set
from resolute.prep.shards.record import Records, ShardRecord, plan_hash
from resolute.prep.sources.image_ref import ImageRef, SourceTarget
from resolute.prep.storage.hashed_file import FileInfo
from resolute.prep.storage.output import LocalStore

FEW = 24
EVERY = 100  # one photo of so many is added later
PER_SHARD = 4096
RESOLUTIONS = (128, 160, 224)
CLASSES = 1000
_PR_SET_CHILD_SUBREAPER = 36  # processes whose parent has ended become our children. Source: prctl(2)


def run_prep(src: Path, out: Path, *more: str) -> dict[str, float]:
    """Run prep; wall seconds and CPU seconds of all its processes."""
    words = ["--src", str(src), "--out", str(out), "--workers", "2", "--max-bad", "1", *more]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-m", "resolute", "shards", *words], check=True, stdout=subprocess.DEVNULL)
    elapsed_s = time.perf_counter() - began
    with suppress(ChildProcessError):
        while True:  # why: prep does not wait for its last processes to end
            os.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"elapsed_s": elapsed_s, "cpu_s": cpu_s}


def hashes(out: Path) -> dict[str, str]:
    """{name: SHA-256} of the files of a set that an extension may not change."""
    ends = ("_info.json", "manifest.json", "report.html", "source.json")
    return {
        str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in out.rglob("*") if path.is_file() and not path.name.endswith(ends)
    }  # fmt: skip


def measure_commands(sources: Sequence[Path], folder: Path) -> dict[str, Any]:
    """One round: every command once."""
    photos = [(path, f"{path.parent.name}/{number}-{path.name}") for number, root in enumerate(sources)
              for path in sorted(root.rglob("*.*")) if path.is_file()]  # fmt: skip

    def link(chosen: Sequence[tuple[Path, str]], root: Path) -> None:
        for path, name in chosen:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).hardlink_to(path)

    link(photos[:: len(photos) // FEW], folder / "few")
    link([photo for i, photo in enumerate(photos) if i % EVERY], folder / "photos")
    result: dict[str, Any] = {"photos": len(photos), "added": len(photos[EVERY::EVERY])}
    result["start_up"] = run_prep(folder / "few", folder / "few-set")
    result["first"] = run_prep(folder / "photos", folder / "set")
    result["nothing_new"] = run_prep(folder / "photos", folder / "set", "--extend")
    link(photos[:1], folder / "photos")
    result["one_photo"] = run_prep(folder / "photos", folder / "set", "--extend")
    before = hashes(folder / "set")
    link(photos[EVERY::EVERY], folder / "photos")
    result["extension"] = run_prep(folder / "photos", folder / "set", "--extend")
    after = hashes(folder / "set")
    result["old_files"], result["old_files_changed"] = len(before), sum(after.get(n) != h for n, h in before.items())
    result["new_bytes"] = sum((folder / "set" / name).stat().st_size for name in after.keys() - before.keys())
    return result


class _MadeUpSource:
    """`entries` photos of `CLASSES` classes."""

    root: str = "made-up"
    numbered: bool = False
    label_names: Sequence[str] | None = None
    copies: bool = False
    target = SourceTarget()

    def __init__(self, entries: int) -> None:
        self._entries, self.ignored = entries, Counter[str]()

    def __iter__(self) -> Iterator[ImageRef]:
        for n in range(self._entries):
            yield ImageRef(f"{n:08d}/n{n % CLASSES:08d}_{n}.JPEG", f"n{n % CLASSES:08d}", 100_000 + n % 1000)


def _plan(generation: int, images: int, previous: str = "") -> dict[str, Any]:
    settings = {"margin": 8 / 7, "shard_samples": PER_SHARD, "quality": 90, "seed": 0}
    names = [f"n{n:08d}" for n in range(CLASSES)]
    return {"generation": generation, "previous": previous, "settings": settings, "classes": names, "codecs": {},
            "source": {}, "target": {"kind": "class"}, "images": {"train": images}}  # fmt: skip


def _records(store: LocalStore, plan: SetPlan, copy: Path) -> Records:
    """Made-up records of all shards to be made, with sparse files as tars."""
    records = Records(store, plan.hash_of, copy)
    for split, number in plan.layout:
        keys = np.arange(*(lambda own: (own.start, own.stop))(plan.layout.keys(split, number)), dtype=np.uint64)
        samples, sources, stored = (np.zeros(len(keys), dtype) for dtype in (SAMPLE, SOURCE, STORED))
        samples["key"], samples["label"] = keys, keys % CLASSES
        sources["digest"] = keys * np.uint64(0x9E37_79B9_7F4A_7C15)  # odd: no two are equal
        name, info = shard_name(split, number), FileInfo(nbytes=len(keys), sha256="0" * 64)
        for res in RESOLUTIONS:
            record = ShardRecord(
                plan=plan.hash_of(split, number), split=split, number=number, res=res, samples=samples,
                sources=sources, stored=stored, files={f"{res}/{name}.{kind}": info for kind in ("tar", "idx")},
                rejects=(),
            )  # fmt: skip
            records.add(record.to_bytes())
    return records


def measure_synthetic(folder: str, entries: int) -> dict[str, float]:
    """CPU seconds of the steps that depend on the size of the set."""
    store, scratch = LocalStore(Path(folder) / "set"), Path(folder) / "scratch"
    for path in (store.root, scratch):
        path.mkdir()
    seconds: dict[str, float] = {}
    began = time.process_time()

    def lap(name: str) -> None:
        nonlocal began
        seconds[name] = time.process_time() - began
        began = time.process_time()

    def made(plans: tuple[dict[str, Any], ...], first: int) -> SetPlan:
        return SetPlan(
            plans=plans, src="-", layout=layout_of(plans, first=first), max_bad=0.0, ignored=Counter(), warnings=(),
            short_sides={res: round(res * 8 / 7) for res in RESOLUTIONS}, damaged=frozenset(),
        )  # fmt: skip

    def catalog(count: int, name: str) -> Catalog:
        return write_catalog(_MadeUpSource(count), scratch / name)

    old = catalog(entries, "old")
    lap("list old source")
    zero = _plan(0, entries)
    whole = {"train": Split(catalog=old, positions=np.arange(entries, dtype=np.uint32))}
    write_inputs(store, 0, zero, whole, np.empty(0, SUPERSEDED))
    lap("write list of photos")
    records = _records(store, made((zero,), 0), scratch / "records")
    began = time.process_time()
    stored = [read_inputs(store, 0, None, scratch)]
    plan = made((zero,), 0)
    names = StoredNames(stored=stored, layout=plan.layout, seed=0)
    manifest = finalize_set(store, plan, records, names, lambda n: stored[n], None, scratch)
    records.close()
    lap("finalize first run")
    new = catalog(entries + entries // EVERY, "new")
    lap("list new source")
    stored = [read_inputs(store, 0, None, scratch)]
    comparison = compare(
        stored, {"train": new}, rejected_keys({}, ("train",)), layout=plan.layout, seed=0, drop=False
    )
    splits = extend_splits(new, comparison, generation=1, val_frac=0)
    lap("compare")
    extension = _plan(1, len(splits["train"]), plan_hash(zero))
    write_inputs(store, 1, extension, splits, comparison.superseded)
    plan = made((zero, extension), 1)
    records = _records(store, plan, scratch / "records")
    stored.append(read_inputs(store, 1, None, scratch))
    names = StoredNames(stored=stored, layout=plan.layout, seed=0)
    began = time.process_time()
    finalize_set(store, plan, records, names, lambda n: stored[n], manifest, scratch)
    lap("finalize extension")
    records.close()
    return {"entries": entries, "added": len(splits["train"]), **seconds}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = Parser(prog="python -m resolute.benchmarks.prep.extend", description=__doc__)
    parser.add_argument("--src", type=Path, nargs="+", required=True, help="folders of class folders")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--entries", type=int, default=1_281_167, help="photos of the synthetic set")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/extend.json"), help="JSON to write")
    return command(parser, _run, argv)


def _run(args: argparse.Namespace) -> None:
    check_writable(args.out)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    result: dict[str, Any] = {**header(rounds=args.rounds), "commands": []}
    for _ in range(args.rounds):
        # why: hard links need the photos' own disk
        with tempfile.TemporaryDirectory(dir=args.src[0].resolve().parent) as folder:
            result["commands"].append(measure_commands([path.resolve() for path in args.src], Path(folder)))
            print(json.dumps(result["commands"][-1]), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        result["synthetic"] = in_new_process(measure_synthetic, folder, args.entries)
        print(json.dumps(result["synthetic"]), flush=True)
    write(args.out, result)


if __name__ == "__main__":
    from resolute.console import run_main

    run_main(main)
