"""Measures image loaders: images per second, CPU time per image, and PSNR of their pixels.

    python -m resolute.benchmarks.loader --shards shards [--only ours,pillow] [--batch-size 256]

Every loader applies random resized crop, flip and normalisation to the same stored images and delivers float32 batches
on the CPU, on the same N cores. Loaders count their workers or threads differently, so each is measured with N and with
N + 1, and takes part with the faster. Each runs in its own process, one at a time, in rounds (A B C, A B C, ...), after
a warm-up. benchmarks/loaders/ffcv.py explains how to install FFCV.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from resolute.console import guard_process

    guard_process()

import io
import itertools
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from resolute.cli import program

from .cli import default_file, repeated, show_progress, spread, summarize, text_table
from .loaders.registry import LOADERS
from .loaders.run import Runner, compare
from .loaders.tars import Tars
from .options import LoaderOptions

__all__ = [
    "SAME_DB",
    "main",
    "measure_quality",
    "measure_rates",
    "psnr_db",
    "quality_table",
    "rates_table",
    "reference",
]

SAME_DB = 99.0  # reported for identical images
_FASTEST = 100_000  # images/s; upper bound, so that no loader runs out of batches
_CENTRE_SQUARES = (1.0, 0.5)  # sides in short sides: one that is shrunk, one that is enlarged
_IMAGES = 64


def measure_rates(runner: Runner, *, counts: Sequence[int] = ()) -> dict[str, Any]:
    """{"warm_up_batches", "res": [{"res", "loaders": {name: values}}]}; numbers of all rounds are `repeated`.

    `counts`: numbers of workers to try (default: that of the job). A loader's values are those of `rate` with its
    fastest number, which is "workers"; "tried", of several: {number: images/s}; "ours_times": our rate / the loader's
    in the same round.
    """
    job, results = runner.job, []
    names = [name for name in runner.loaders if LOADERS[name].has_rate]
    counts = counts or (job.workers,)
    # why: two rounds of every worker's batches ahead are in the queues when the clock starts, not more
    warm_up = max(8, 8 * max(counts))
    batches = warm_up + math.ceil(job.seconds * _FASTEST / job.batch_size)
    raw: dict[tuple[int, str, int], list[dict[str, Any]]] = {
        key: [] for key in itertools.product(job.resolutions, names, counts)
    }
    for number in range(runner.rounds):
        for (res, name, workers), rounds in raw.items():
            show_progress(f"{res} px, round {number + 1} of {runner.rounds}: {name}, {workers} workers")
            rounds.append(
                runner.run(name, task="rate", resolutions=(res,), batches=batches, warm_up=warm_up, workers=workers)
            )
    for res in job.resolutions:
        best, loaders = {}, {}
        for name in names:
            tried = {workers: summarize(raw[res, name, workers]) for workers in counts}
            best[name] = max(tried, key=lambda workers: tried[workers]["images_per_s"]["median"])
            loaders[name] = tried[best[name]] | {"workers": best[name]}
            if len(counts) > 1:
                loaders[name]["tried"] = {str(workers): values["images_per_s"] for workers, values in tried.items()}
        for name in names if "ours" in names else ():
            pairs = zip(raw[res, "ours", best["ours"]], raw[res, name, best[name]], strict=True)
            loaders[name]["ours_times"] = repeated([a["images_per_s"] / b["images_per_s"] for a, b in pairs])
        results.append({"res": res, "loaders": loaders})
    return {"warm_up_batches": warm_up, "res": results}


def measure_quality(runner: Runner) -> list[dict[str, Any]]:
    """[{"res", "crop_frac", "images", "psnr_db": {name: mean}}] against Pillow's antialiased bilinear.

    Every loader resizes the same centre square (side: `crop_frac` x short side) of the first images of the validation
    split; each result is compared with Pillow's on exactly the crop that the loader used.
    """
    job = runner.job
    tars_of = {res: Tars(job.shards, res, "val") for res in job.resolutions}
    names = [name for name in runner.loaders if LOADERS[name].has_crops]
    if not names or not all(map(len, tars_of.values())):
        return []
    files = {}
    for name in names:
        show_progress(f"quality: {name}")
        files[name] = runner.run(name, task="crops", crop_fracs=_CENTRE_SQUARES, images=_IMAGES)
    results = []
    for res, tars in tars_of.items():
        jpegs = [tars.jpeg(i) for i in range(min(_IMAGES, len(tars)))]
        for frac in _CENTRE_SQUARES:
            values = {}
            for name, file_of in files.items():
                with np.load(Path(job.scratch, file_of[f"{res} {frac}"])) as made:
                    exact = reference(jpegs, made["crops"], res)
                    values[name] = statistics.fmean(map(psnr_db, made["images"], exact))
            results.append({"res": res, "crop_frac": frac, "images": len(jpegs), "psnr_db": values})
    return results


def reference(jpegs: Sequence[bytes], crops: NDArray[np.int64], res: int) -> list[NDArray[np.uint8]]:
    """Pillow's antialiased bilinear resize of each crop (N, 4) x, y, w, h in px to (res, res, 3) uint8."""
    images = [Image.open(io.BytesIO(jpeg)).convert("RGB") for jpeg in jpegs]
    return [
        np.asarray(image.crop((x, y, x + w, y + h)).resize((res, res), Image.Resampling.BILINEAR))
        for image, (x, y, w, h) in zip(images, crops.tolist(), strict=True)
    ]


def psnr_db(image: NDArray[np.float32], exact: NDArray[np.uint8]) -> float:
    """Peak signal to noise ratio of two images of levels 0..255, at most `SAME_DB`."""
    error = float(np.mean((image.astype(np.float64) - exact) ** 2))
    return min(SAME_DB, 10 * float(np.log10(255**2 / error))) if error else SAME_DB


def rates_table(result: dict[str, Any]) -> str:
    rows = []
    for entry in result["res"]:
        for name, values in entry["loaders"].items():
            used, busy = values["cpu_s_per_1000"], values["cores_busy"]
            rows.append(
                [
                    f"{entry['res']} px",
                    LOADERS[name].title,
                    spread(values["images_per_s"]),
                    spread(values["ours_times"], 2) if "ours_times" in values else "",
                    spread(used, 2) if used else "",
                    f"{busy['median']:.1f}" if busy else "",
                    f"{values['host_us_per_image']['median']:.1f}",
                    str(values["workers"]),
                    f"{values['processes']} / {values['threads']}",
                    values["layout"],
                    f"{values['first_batch_s']['median']:.1f}",
                ]
            )
    header = [
        "",
        "loader",
        "images/s",
        "ours is times",
        "CPU s / 1000",
        "cores",
        "host us/image",
        "workers",
        "processes / threads",
        "memory",
        "first batch s",
    ]
    return text_table("loader alone, float32 batches: median (min..max)", header, rows, left=2)


def quality_table(results: list[dict[str, Any]]) -> str:
    """dB to Pillow of the loaders that resize known crops."""
    if not results:
        return "quality: nothing to compare: no validation images in the set, or no loader that resizes known crops"
    names = list(results[0]["psnr_db"])
    header = ["centre square of", "", *names]
    rows = [
        [
            f"{entry['crop_frac']:g} short sides",
            f"-> {entry['res']} px",
            *(f"{entry['psnr_db'][name]:.1f}" for name in names),
        ]
        for entry in results
    ]
    title = f"PSNR in dB to Pillow's antialiased bilinear, mean of {results[0]['images']} images (99: identical)"
    return text_table(title, header, rows, left=2)


def _measure(runner: Runner) -> tuple[dict[str, Any], str]:
    cores = runner.job.workers
    rates, quality = measure_rates(runner, counts=(cores, cores + 1)), measure_quality(runner)
    return {"loader": rates, "quality": quality}, f"{rates_table(rates)}\n\n{quality_table(quality)}"


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""

    def work(options: LoaderOptions) -> None:
        compare(options, _measure, out=options.out or default_file("loader"), rates=True, seconds=options.seconds)

    return program(
        "python -m resolute.benchmarks.loader",
        LoaderOptions,
        work,
        words,
        help="Measure on your own shards what image loaders deliver: ours, torch's DataLoader with several decoders, "
        "timm's, webdataset's, stock DALI, FFCV. Takes about 2 x rounds x resolutions x loaders x (seconds + 8 s). "
        "Other work on the machine shows as a wide (min..max); CPU s / 1000 suffers least.",
        positional="shards",
    )


if __name__ == "__main__":
    from resolute.console import run_main

    run_main(main)
