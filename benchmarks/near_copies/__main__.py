"""Measures how many copies of photos prep recognises, how many others it takes for copies, and what the search costs.

    python -m resolute.benchmarks.near_copies --src photos/one [--src photos/two] [--photos 300] [--seed 0]
                              [--search 1000000] [--rounds 3]

Copies of `--photos` photos of each source, of each kind of `copies.py`, are planted among all photos of all sources,
and pairs are found and verified with the functions of prep on what it would store for 128 px. The recall of a kind is
the fraction of its copies that are paired with their originals, the precision the fraction of right pairs among those
that its copies form with photos other than copies of the same original. Pairs of photos that were not planted, the
natural ones, are listed with their scores, to be judged by eye; their copies count neither as right nor as wrong.

The search is timed in a process of its own with descriptors made up for `--search` photos, of which 5 % ask. The cost
of prep is the time of `resolute shards` on each source, with NEAR_COPIES=find and none in turn, after an untimed round.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from resolute.console import guard_process

    guard_process()

import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from resolute.benchmarks.cli import default_file, show_progress, text_table
from resolute.benchmarks.proc import adopt_orphans, timed_with_children
from resolute.benchmarks.record import check_writable, header, write
from resolute.cli import program
from resolute.errors import ResoluteError
from resolute.machine import available_cpus
from resolute.prep.convert.decode import Photo
from resolute.prep.convert.resize import describe_and_encode
from resolute.prep.near_copies.index import Index
from resolute.prep.near_copies.verification import score, thumbnail
from resolute.prep.settings import MARGIN
from resolute.prep.shard_set.near_copies import COUNTED, GROUPED, WARNED
from resolute.settings import described, setting, settings

from .copies import KINDS, ONLY_REPORTED
from .search import measure_search

_RES, _QUALITY, _WORKERS = 128, 90, 2
_SUFFIXES = (".jpg", ".jpeg", ".png")
THRESHOLDS = (0.80, 0.85, 0.90, 0.925, 0.95, 0.96, 0.97, 0.98, 0.99)


@dataclass
class Photos:
    """Photos and planted copies, a row each: what prep stores of them, and what they were made of.

    `originals` holds the row of the original of a copy, or the own row; `kinds` the kind of a copy, "" for a photo.
    """

    names: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    originals: list[int] = field(default_factory=list)
    hashes: list[NDArray[np.uint64]] = field(default_factory=list)
    thumbnails: list[NDArray[np.int16]] = field(default_factory=list)
    sizes: list[tuple[int, int]] = field(default_factory=list)

    def add(self, image: Image.Image, name: str, kind: str = "", original: int | None = None) -> int:
        """Add a row; returns its number."""
        side = round(_RES * MARGIN)
        photo = Photo.full(np.ascontiguousarray(image))
        [(jpeg, width, height)], hashes = describe_and_encode([photo], [side], _QUALITY, side)
        assert hashes is not None
        row = len(self.names)
        self.names.append(name)
        self.kinds.append(kind)
        self.originals.append(row if original is None else original)
        self.hashes.append(hashes)
        self.thumbnails.append(thumbnail(jpeg))
        self.sizes.append((width, height))
        return row

    def pairs(self) -> dict[tuple[int, int], float]:
        """{(row, row): score} of the candidates of the index, the smaller row first."""
        found, _ = Index(np.stack(self.hashes)).candidates(np.arange(len(self.names)), threads=available_cpus())

        def scored(candidate: tuple[int, ...]) -> tuple[tuple[int, int], float]:
            asked, other, _, part, mirrored, same_part = candidate
            width, height = self.sizes[asked]
            value = score(
                self.thumbnails[asked],
                self.thumbnails[other],
                part=part,
                same_part=bool(same_part),
                mirrored=bool(mirrored),
                width=width,
                height=height,
            )
            return (min(asked, other), max(asked, other)), value

        with ThreadPoolExecutor(available_cpus()) as pool:
            return dict(pool.map(scored, found.tolist(), chunksize=64))


def collect(sources: Mapping[Path, Sequence[Path]], planted: int, seed: int) -> Photos:
    """All photos of the sources, and copies of all kinds of `planted` photos of each.

    sources: {folder: its files}.
    """
    photos, random = Photos(), np.random.default_rng(seed)
    for source, files in sources.items():
        chosen = set(random.permutation(len(files))[:planted].tolist())
        for number, path in enumerate(files):
            show_progress(f"{source.name}: {number} of {len(files)} photos")
            with Image.open(path) as opened:
                image = opened.convert("RGB")
            name = f"{source.name}/{path.relative_to(source)}"
            row = photos.add(image, name)
            for kind, copy in KINDS.items() if number in chosen else ():
                photos.add(copy(image, random), name, kind, row)
    show_progress("")
    return photos


def _files(source: Path) -> list[Path]:
    files = sorted(path for path in source.rglob("*") if path.suffix.lower() in _SUFFIXES)
    if not files:
        raise ResoluteError(f"--src: got {source} without {', '.join(_SUFFIXES)} files, expected photos; correct it")
    return files


def judge(photos: Photos, pairs: dict[tuple[int, int], float]) -> dict[str, Any]:
    """Recall and precision by kind and threshold, and the natural pairs."""
    kinds, originals = photos.kinds, photos.originals
    natural = {pair: value for pair, value in pairs.items() if not kinds[pair[0]] and not kinds[pair[1]]}
    natural_at = {pair for pair, value in natural.items() if value >= COUNTED}
    best = np.full(len(kinds), -1.0)  # of a copy with its original; -1: no candidate
    false: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for (one, other), value in pairs.items():
        families = tuple(sorted((originals[one], originals[other])))
        for copy, photo in ((one, other), (other, one)):
            if originals[copy] == photo != copy:
                best[copy] = value
            elif kinds[copy] and families[0] != families[1] and families not in natural_at:
                false[kinds[copy]].append(value)
    by_kind = {}
    for kind in KINDS:
        own = best[[row for row, each in enumerate(kinds) if each == kind]]
        wrong = np.array(false[kind])
        right = [int((own >= threshold).sum()) for threshold in THRESHOLDS]
        wrong_at = [int((wrong >= threshold).sum()) for threshold in THRESHOLDS]
        by_kind[kind] = {
            "copies": len(own),
            "candidates": int((own >= 0).sum()),
            "recognised": right,
            "wrong": wrong_at,
        }
    listed = sorted(((value, *pair) for pair, value in natural.items() if value >= COUNTED), reverse=True)
    return {
        "thresholds": list(THRESHOLDS),
        "only_reported": list(ONLY_REPORTED),
        "kinds": by_kind,
        "natural_candidates": len(natural),
        "natural_pairs": [[round(value, 4), photos.names[one], photos.names[other]] for value, one, other in listed],
    }


def measure_prep(source: Path, rounds: int) -> dict[str, dict[str, list[float]]]:
    """{NEAR_COPIES: {"seconds" and "cpu_seconds": a value per round}}."""
    adopt_orphans()
    results: dict[str, dict[str, list[float]]] = {how: {"seconds": [], "cpu_seconds": []} for how in ("find", "none")}
    with tempfile.TemporaryDirectory(prefix="resolute-near-") as temporary:
        out = Path(temporary) / "out"
        for number in range(rounds + 1):
            for how in results if number % 2 else reversed(results):
                words = [f"--src={source}", f"--out={out}", f"--near-copies={how}", f"--workers={_WORKERS}"]
                prep = [sys.executable, "-m", "resolute", "shards", *words]
                seconds, cpu_seconds = timed_with_children(
                    partial(subprocess.run, prep, check=True, capture_output=True)
                )
                shutil.rmtree(out)
                if number:  # the first is a warm-up
                    results[how]["seconds"].append(seconds)
                    results[how]["cpu_seconds"].append(cpu_seconds)
    return results


@settings("")
class NearCopiesOptions:
    src: Annotated[
        tuple[str, ...],
        described("folder of photos; may be repeated", min_length=1, json_schema_extra={"metavar": "DIR"}),
    ]
    photos: int = setting(300, "photos of each folder that are copied", ge=1)
    seed: int = setting(0, "seed of the photos that are copied, and of their copies", ge=0)
    search: int = setting(1_000_000, "photos with made-up descriptors that are searched", ge=100)
    rounds: int = setting(3, "timed rounds of prep; 0: none", ge=0)
    out: Path | None = setting(None, "JSON file to write (default: bench/near_copies.json)")


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    name = "python -m resolute.benchmarks.near_copies"
    return program(name, NearCopiesOptions, _measure_all, words, help="Measure how near copies are found.")


def _measure_all(options: NearCopiesOptions) -> None:
    out = options.out or default_file("near_copies")
    check_writable(out)
    sources = {source: _files(source) for source in map(Path, options.src)}
    result = header(rounds=max(1, options.rounds), packages=("simplejpeg", "numba"))
    photos = collect(sources, options.photos, options.seed)
    result |= {
        "sources": {source.name: len(files) for source, files in sources.items()},
        "planted_photos": photos.kinds.count(next(iter(KINDS))),
        "short_side": round(_RES * MARGIN),
        **judge(photos, photos.pairs()),
        "search": measure_search(options.search),
        "workers": _WORKERS,
    }
    if options.rounds:
        result["prep"] = {source.name: measure_prep(source, options.rounds) for source in sources}
    report(result)
    write(out, result)


def report(result: dict[str, Any]) -> None:
    at = [result["thresholds"].index(threshold) for threshold in (WARNED, GROUPED)]
    rows = []
    for kind, found in result["kinds"].items():
        recall = [f"{found['recognised'][i] / found['copies']:.3f}" for i in at]
        wrong = [f"{found['wrong'][i]}" for i in at]
        mark = " *" if kind in ONLY_REPORTED else ""
        rows.append((f"{kind}{mark}", f"{found['candidates'] / found['copies']:.3f}", *recall, *wrong))
    head = ("kind", "candidates", "recall .90", "recall .95", "wrong .90", "wrong .95")
    print(text_table(f"{result['planted_photos']} photos, copied (* not a target)", head, rows))
    values = [value for value, *_ in result["natural_pairs"]]
    counts = ", ".join(f"{sum(value >= least for value in values)} at {least}" for least in (GROUPED, WARNED, COUNTED))
    print(f"natural pairs among {sum(result['sources'].values())} photos: {counts}")
    search = result["search"]
    print(
        f"search: {search['asking']} against {search['photos']} photos in {search['seconds']:.1f} s, "
        f"{search['peak_mib']:.0f} MiB"
    )
    for source, prep in result.get("prep", {}).items():
        for what in ("seconds", "cpu_seconds"):
            find, none = (statistics.median(prep[setting][what]) for setting in ("find", "none"))
            more = f"{100 * (find / none - 1):+.1f} %"
            print(f"prep of {source}, {what}: {find:.2f} with, {none:.2f} without: {more}")


if __name__ == "__main__":
    from resolute.console import run_main

    run_main(main)
