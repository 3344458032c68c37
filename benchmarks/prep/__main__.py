"""Measures photos per second of prep and of other converters, and the PSNR of prep's pixels.

    python -m benchmarks.prep --src photos/train [--res 128,160,224] [--rounds 3] [--copies 10]
                              [--img2dataset /path/to/python]

All images of a folder of class folders, copied a few times, are converted to shards of all sizes with two processes by
`python -m prep`, by Pillow's Lanczos + `webdataset.ShardWriter`, and by img2dataset, run once per size (in a separate
environment, as it pins an old webdataset; it reads `file://` URLs). Each round times the complete commands one after
another; prep also hashes photos and shards and syncs them to disk. A tool's start-up time (imports, compilation) is
its time for 32 images; `steady` images/s exclude it for all tools. One untimed round fills the page cache.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from pipeline.cli import guard_process

    guard_process()

import argparse
import io
import json
import multiprocessing
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import webdataset
from PIL import Image

from benchmarks.cli import Parser, command
from benchmarks.record import check_writable, header, write
from prep.config import MARGIN, parse_resolutions
from prep.convert.resize import fit

from .parts import measure_parts, measure_psnr

WORKERS = 2
QUALITY = 90
FEW = 32
OURS = "prep"
IMG2DATASET = """
import sys
from img2dataset import download
urls, out, side, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
download(url_list=urls, input_format="csv", url_col="url", caption_col="label", output_folder=out,
         output_format="webdataset", processes_count=2, thread_count=4, image_size=side, resize_mode="keep_ratio",
         resize_only_if_bigger=True, encode_quality=90, number_sample_per_shard=max(1, count // 8))
"""


def copy_photos(src: Path, copies: int, root: Path) -> list[Path]:
    """Copy all files of the class folders of `src` to `root`, `copies` times under new names."""
    made = []
    for path in sorted(path for path in src.glob("*/*") if path.is_file()):
        for copy in range(copies):
            target = root / path.parent.name / f"{copy}-{path.name}"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
            made.append(target)
    return made


def _run(words: Sequence[object]) -> None:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{words[0]}: exit status {done.returncode}: {(done.stderr or done.stdout)[-800:]}")


def run_ours(src: Path, out: Path, resolutions: Sequence[int]) -> None:
    words = ["--src", src, "--out", out, "--res", ",".join(map(str, resolutions)), "--val-frac", "0.01"]
    _run([sys.executable, "-m", "prep", *words, "--quality", QUALITY, "--workers", WORKERS, "--max-bad", "1"])


def run_pillow(src: Path, out: Path, short_sides: Sequence[int]) -> None:
    """The straightforward converter: each process has its own images and its own ShardWriters."""
    out.mkdir()
    files = sorted(src.glob("*/*"))
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_convert_with_pillow, args=(files[part::WORKERS], out, part, short_sides))
        for part in range(WORKERS)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        if process.exitcode:
            raise RuntimeError(f"the Pillow converter failed with exit status {process.exitcode}")


def _convert_with_pillow(files: Sequence[Path], out: Path, part: int, short_sides: Sequence[int]) -> None:
    with ExitStack() as stack:
        writers = [
            stack.enter_context(webdataset.ShardWriter(f"{out}/{side}-{part}-%06d.tar", maxcount=4096, verbose=0))
            for side in short_sides
        ]
        for number, path in enumerate(files):
            image = Image.open(path).convert("RGB")
            for side, writer in zip(short_sides, writers, strict=True):
                buffer = io.BytesIO()
                small = image.resize(fit(*image.size, side), Image.Resampling.LANCZOS)
                small.save(buffer, "JPEG", quality=QUALITY)
                writer.write({"__key__": f"{part}-{number:08d}", "jpg": buffer.getvalue(), "cls": path.parent.name})


def run_img2dataset(python: Path, src: Path, out: Path, short_sides: Sequence[int]) -> None:
    """Run img2dataset once per size; writing its list of URLs takes only a few ms of the measured time."""
    out.mkdir()
    files = sorted(src.glob("*/*"))
    rows = [f'"{path.as_uri()}",{path.parent.name}' for path in files]
    (out / "urls.csv").write_text("\n".join(["url,label", *rows]) + "\n")
    for side in short_sides:
        _run([python, "-c", IMG2DATASET, out / "urls.csv", out / str(side), side, len(files)])
        stored = sum(json.loads(path.read_text())["successes"] for path in (out / str(side)).glob("*_stats.json"))
        if stored != len(files):
            raise RuntimeError(f"img2dataset: got {stored} images at {side} px, expected {len(files)}")


def measure(
    tools: dict[str, Callable[[Path, Path], None]], photos: Path, few: Path, root: Path, rounds: int
) -> dict[str, dict[str, list[float]]]:
    """{tool: {"seconds": one value per round, "few_seconds": the same for `FEW` images}}."""
    results: dict[str, dict[str, list[float]]] = {name: {"seconds": [], "few_seconds": []} for name in tools}
    for number in range(rounds + 1):
        for name, tool in tools.items():
            for what, src in (("few_seconds", few), ("seconds", photos)):
                out = root / "out"
                began = time.perf_counter()
                tool(src, out)
                elapsed_s = time.perf_counter() - began
                shutil.rmtree(out)
                if number:  # the first is a warm-up
                    results[name][what].append(elapsed_s)
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = Parser(prog="python -m benchmarks.prep", description="Measure prep.")
    parser.add_argument("--src", type=Path, required=True, help="folder of class folders of JPEGs")
    parser.add_argument("--res", default="128,160,224", help="resolutions in px (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds (default: %(default)s)")
    parser.add_argument("--copies", type=int, default=10, help="copies of every image (default: %(default)s)")
    parser.add_argument("--img2dataset", type=Path, metavar="PYTHON", help="Python interpreter with img2dataset")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/prep.json"), help="JSON to write")
    return command(parser, _measure_all, argv)


def _measure_all(args: argparse.Namespace) -> None:
    resolutions = parse_resolutions(args.res)
    check_writable(args.out)
    result = header(args, rounds=args.rounds, packages=("simplejpeg", "numba", "webdataset"))
    with tempfile.TemporaryDirectory(prefix="resolute-prep-") as temporary:
        root = Path(temporary)
        sides = [round(res * MARGIN) for res in resolutions]
        files = copy_photos(args.src, args.copies, root / "photos")
        for number, path in enumerate(files[:: max(1, len(files) // FEW)][:FEW]):
            target = root / "few" / path.parent.name / f"{number}.jpg"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        tools: dict[str, Callable[[Path, Path], None]] = {
            OURS: lambda src, out: run_ours(src, out, resolutions),
            "pillow + ShardWriter": lambda src, out: run_pillow(src, out, sides),
        }
        if args.img2dataset:
            tools[f"img2dataset, {len(sides)} runs"] = lambda src, out: run_img2dataset(
                args.img2dataset, src, out, sides
            )
        once = files[:: args.copies]
        result |= {
            "images": len(files), "copies": args.copies, "resolutions": resolutions, "short_sides": sides,
            "workers": WORKERS, "seconds": measure(tools, root / "photos", root / "few", root, args.rounds),
            "parts": measure_parts(once, sides, args.rounds), "psnr_db": measure_psnr(once, sides),
        }  # fmt: skip
    report(result)
    write(args.out, result)


def report(result: dict[str, Any]) -> None:
    images, seconds = result["images"], result["seconds"]
    print(f"{images} images, {result['resolutions']} px, {result['workers']} processes, medians of "
          f"{len(seconds[OURS]['seconds'])} interleaved rounds; steady: without start-up")  # fmt: skip
    steady = {}
    for name, values in seconds.items():
        total_s, few = statistics.median(values["seconds"]), statistics.median(values["few_seconds"])
        steady[name] = (images - FEW) / (total_s - few)
        print(
            f"  {name:<22} {images / total_s:5.0f} images/s, steady {steady[name]:5.0f}, start-up {few:4.1f} s; ours "
            f"{total_s / statistics.median(seconds[OURS]['seconds']):.2f}x, steady {steady[OURS] / steady[name]:.2f}x"
        )
    for part, ms in result["parts"]["ms"].items():
        print(f"  {part:<22} {ms['median']:6.3f} ms CPU per image")
    for side, nbytes in result["parts"]["bytes"].items():
        mean = {name: statistics.fmean(values[side]) for name, values in result["psnr_db"].items() if values[side]}
        psnr = ", ".join(f"{value:.2f} dB to {name}" for name, value in mean.items()) or "nothing to shrink"
        print(f"  short side {side:>4} px: {nbytes / 1e3:5.1f} kB per image; before JPEG {psnr}")


if __name__ == "__main__":
    from pipeline.cli import run_main

    run_main(main)
