"""How fast is prep, and how true are its pixels? Beside Pillow + webdataset.ShardWriter on the same images.

    python -m benchmarks.prep --src photos/train [--res 128,160,224] [--repeats 3] [--copies 3]

Each repeat runs both converters, one after the other, on the same list of files (`--copies` symlinks of each,
so that a run takes seconds); both start and end their two worker processes inside the clock, and both write
all sizes. Ours also hashes and syncs. Library imports are outside the clock for both. Images are in the page
cache after an untimed first run of each.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import webdataset
from numpy.typing import NDArray
from PIL import Image

from prep.build import build
from prep.decode import Reject, decode
from prep.resize import fit, resize
from prep.settings import Settings, parse_resolutions
from prep.sources import find_sources

WORKERS = 2
QUALITY = 90


def copy_sources(settings: Settings, copies: int, root: Path) -> list[tuple[Path, int]]:
    """Symlinks of all images of `settings.src` below `root`, in class folders; (path, label) of each."""
    sources = find_sources(settings)
    links = []
    for split in sources.splits.values():
        for photo in split.photos:
            source = (split.root / photo.path).resolve()
            for copy in range(copies):
                link = root / sources.classes[photo.label] / f"{copy}-{source.name}"
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(source)
                links.append((link, photo.label))
    return sorted(links)


def run_ours(src: Path, out: Path, resolutions: tuple[int, ...]) -> float:
    """Seconds for our whole prep of `src` into `out`."""
    settings = Settings(
        src=src, out=out, resolutions=resolutions, quality=QUALITY, workers=WORKERS, max_bad=1.0
    )
    began = time.perf_counter()
    build(settings)
    return time.perf_counter() - began


def run_pillow(files: Sequence[tuple[Path, int]], out: Path, short_sides: Sequence[int]) -> float:
    """Seconds for the straightforward converter: every process its own part and its own ShardWriters."""
    out.mkdir()
    context = multiprocessing.get_context("fork")
    began = time.perf_counter()
    processes = [
        context.Process(target=_pillow_part, args=(files[part::WORKERS], out, part, short_sides))
        for part in range(WORKERS)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        if process.exitcode:
            raise RuntimeError(f"the Pillow converter failed with exit status {process.exitcode}")
    return time.perf_counter() - began


def _pillow_part(files: Sequence[tuple[Path, int]], out: Path, part: int, short_sides: Sequence[int]) -> None:
    with ExitStack() as stack:
        writers = [
            stack.enter_context(webdataset.ShardWriter(f"{out}/{side}-{part}-%06d.tar", maxcount=4096, verbose=0))
            for side in short_sides
        ]
        for number, (path, label) in enumerate(files):
            image = Image.open(path).convert("RGB")
            for side, writer in zip(short_sides, writers, strict=True):
                buffer = io.BytesIO()
                small = image.resize(fit(*image.size, side), Image.Resampling.LANCZOS)
                small.save(buffer, "JPEG", quality=QUALITY)
                writer.write({"__key__": f"{part}-{number:08d}", "jpg": buffer.getvalue(), "cls": str(label)})


def quality(files: Sequence[tuple[Path, int]], short_sides: Sequence[int]) -> dict[int, list[float]]:
    """PSNR in dB, per short side, of every image that shrinks: our uint8 pixels to a float Lanczos's."""
    found: dict[int, list[float]] = {side: [] for side in short_sides}
    for path, _ in files:
        try:
            pixels = decode(path.read_bytes())
        except Reject:
            continue
        height, width = pixels.shape[:2]
        for side in short_sides:
            size = fit(width, height, side)
            if size != (width, height):
                error = np.mean((resize(pixels, *size) - _float_lanczos(pixels, size)) ** 2)
                found[side].append(float(10 * np.log10(255**2 / error)))
    return found


def _float_lanczos(pixels: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.float64]:
    planes = [Image.fromarray(pixels[..., c].astype(np.float32)) for c in range(3)]
    small = [np.asarray(plane.resize(size, Image.Resampling.LANCZOS), np.float64) for plane in planes]
    return np.clip(np.stack(small, axis=-1), 0, 255)


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
    names = ("torch", "pillow", "simplejpeg", "webdataset", "numpy")
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in names},
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prep", description="Measure prep.")
    parser.add_argument("--src", type=Path, required=True, help="folder of class folders")
    parser.add_argument("--res", default="128,160,224", help="resolutions in px (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--copies", type=int, default=3, help="symlinks of every image (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/prep.json"), help="JSON to write")
    args = parser.parse_args(argv)
    resolutions = parse_resolutions(args.res)
    rates: dict[str, list[float]] = {"prep": [], "pillow + ShardWriter": []}
    with tempfile.TemporaryDirectory(prefix="resolute-prep-") as temporary:
        root = Path(temporary)
        plan = Settings(src=args.src, out=root / "out", resolutions=resolutions)
        files = copy_sources(plan, args.copies, root / "photos")
        for repeat in range(args.repeats + 1):  # the first is a warm-up
            ours_s = run_ours(root / "photos", root / f"ours-{repeat}", resolutions)
            theirs_s = run_pillow(files, root / f"pillow-{repeat}", plan.short_sides)
            if repeat:
                for name, elapsed_s in zip(rates, (ours_s, theirs_s), strict=True):
                    rates[name].append(len(files) / elapsed_s)
        psnr_db = quality(files[:: args.copies], plan.short_sides)
    print(f"{len(files)} images ({args.copies} of each), {args.res} px, {WORKERS} processes; medians of "
          f"{args.repeats} interleaved runs")  # fmt: skip
    for name, values in rates.items():
        print(f"  {name:<22} {statistics.median(values):6.0f} images/s  ({min(values):.0f}..{max(values):.0f})")
    for res, (side, values) in zip(resolutions, psnr_db.items(), strict=True):
        told = f"{np.mean(values):.1f} dB mean, {min(values):.1f} dB min" if values else "nothing to shrink"
        print(f"  {res:>4} px (short side {side}): PSNR to float Lanczos before JPEG: {told}")
    result = {
        "images": len(files), "copies": args.copies, "resolutions": resolutions, "workers": WORKERS,
        "images_per_s": rates, "psnr_db": psnr_db, "machine": machine(),
    }  # fmt: skip
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
