"""Generates labelled demo photos, without a download: `make demo`."""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from resolute.console import guard_process

    guard_process()

import json
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import simplejpeg
from tqdm import tqdm

from resolute.cli import program
from resolute.errors import ResoluteError
from resolute.files import write_errors
from resolute.fork_server import fork_server
from resolute.machine import available_cpus
from resolute.settings import described, setting, settings

from .demo_scene import CLASSES, draw

__all__ = ["main"]

STAMP = ".demo.json"
_DRAWING = 1  # increase it when the drawn content changes: the stamp then differs


def make_demo(out: Path, *, images: int, seed: int, workers: int) -> bool:
    """Write `images` JPEGs in ten class folders to `out`; returns False if exactly these are there already.

    The same `images` and `seed` give the same files for any number of `workers`. The photos are drawn into a temporary
    folder that is renamed at the end, so `out` is complete or absent. Raises `ResoluteError` if `out` holds anything
    else.
    """
    stamp = json.dumps({"images": images, "seed": seed, "drawing": _DRAWING}) + "\n"
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        existing_stamp = _stamp(out)
        if existing_stamp == stamp:
            return False
        raise ResoluteError(
            f"{out}: in the way, got {'other demo photos' if existing_stamp else 'something else'}, expected an empty "
            "or new folder; delete it or choose another --out"
        )
    partial_folder = out.with_name(f"{out.name}.part")
    if partial_folder.exists():
        if not _stamp(partial_folder):
            raise ResoluteError(
                f"{partial_folder}: in the way, got something else, expected nothing; delete or move it"
            )
        shutil.rmtree(partial_folder)
    with write_errors(partial_folder):
        partial_folder.mkdir(parents=True)
        (partial_folder / STAMP).write_text(stamp)
        for name in CLASSES:
            (partial_folder / name).mkdir()
    context = fork_server()
    draw_one = partial(_draw_photo, partial_folder, seed)
    with ProcessPoolExecutor(workers, mp_context=context) as pool, write_errors(partial_folder):
        try:
            for _ in tqdm(pool.map(draw_one, range(images), chunksize=16), total=images, unit=" photos", disable=None):
                pass
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    with write_errors(out):
        partial_folder.replace(out)
    return True


def _stamp(folder: Path) -> str:
    path = folder / STAMP
    return path.read_text() if path.is_file() else ""


def _draw_photo(out: Path, seed: int, number: int) -> None:
    label = number % len(CLASSES)
    rng = np.random.default_rng([seed, number])
    pixels = draw(rng, label)
    jpeg = simplejpeg.encode_jpeg(pixels, int(rng.integers(90, 96)), "RGB", "420", False)
    (out / CLASSES[label] / f"{number:06d}.jpg").write_bytes(jpeg)


@settings("")
class DemoOptions:
    out: Annotated[Path, described("folder to write to")]
    images: int = setting(1500, "number of photos", ge=len(CLASSES))
    seed: int = setting(0, "seed of what is drawn", ge=0)
    workers: int | None = setting(None, "processes (default: one per CPU core)", ge=1)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    name = "python -m resolute.pipeline.examples.demo_photos"
    return program(name, DemoOptions, _run, words, help="Generate labelled demo photos.")


def _run(options: DemoOptions) -> None:
    began = time.perf_counter()
    workers = options.workers or available_cpus()
    created = make_demo(options.out, images=options.images, seed=options.seed, workers=workers)
    elapsed_s = time.perf_counter() - began
    outcome = f"{options.images} photos, {len(CLASSES)} classes, {elapsed_s:.1f} s" if created else "already there"
    print(f"{options.out}: {outcome}")


if __name__ == "__main__":
    from resolute.console import run_main

    run_main(main)
