"""Measures photos per second of prep and of other converters, and the PSNR of prep's pixels.

    python -m resolute.benchmarks.prep --src photos/train [--res 128,160,224] [--rounds 3] [--copies 10]
                              [--shard-samples 4096] [--img2dataset /path/to/python]

All JPEGs of a folder of class folders, in a few copies, are converted to shards of all sizes with two processes by
`resolute shards`, by Pillow's Lanczos or bicubic + `webdataset.ShardWriter`, and by img2dataset, run once per size (in
a separate environment, as it pins an old webdataset; it reads `file://` URLs). Each copy is a file of its own with
other bytes and of another size, as different photos have: it has a comment, before the first segment of the JPEG. Each
round times the complete commands one after another; prep also hashes photos and shards and syncs them to disk. A tool's
start-up time (imports, compilation) is its time for 32 images; `steady` images/s exclude it for all tools. "With
nothing to do" is prep on the finished set. CPU seconds are those of the command and of all its processes. One untimed
round fills the page cache.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from resolute.console import guard_process

    guard_process()

import argparse
import io
import json
import math
import multiprocessing
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import webdataset
from PIL import Image

from resolute.benchmarks.cli import Parser, check_numbers, command, parse_resolutions
from resolute.benchmarks.proc import adopt_orphans, timed_with_children
from resolute.benchmarks.record import check_writable, header, write
from resolute.errors import ResoluteError
from resolute.prep.convert.resize import fit
from resolute.prep.settings import MARGIN

from .pixels import measure_psnr

WORKERS = 2
QUALITY = 90
FEW = 32
COMPARED = 200  # photos whose pixels are compared, at most, since a comparison takes longer than a conversion
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
    """Write all JPEGs of the class folders of `src` to `root`, `copies` times, each with a comment of its own."""
    made = []
    for path in sorted(path for path in src.glob("*/*") if path.is_file()):
        data = path.read_bytes()
        if not data.startswith(b"\xff\xd8"):
            raise ResoluteError(f"{path}: got another format, expected a JPEG; choose a --src of JPEGs")
        for copy in range(copies):
            target = root / path.parent.name / f"{copy}-{path.name}"
            target.parent.mkdir(parents=True, exist_ok=True)
            comment = b"copy" + b"." * copy  # why of other lengths: prep compares the bytes of photos of one size
            # Source: ITU-T T.81, B.2.4.5, comment segment: its length includes the two bytes of the length
            target.write_bytes(data[:2] + b"\xff\xfe" + (2 + len(comment)).to_bytes(2) + comment + data[2:])
            made.append(target)
    if not made:
        raise ResoluteError(f"{src}: got no files in class folders, expected JPEGs; point --src at the class folders")
    return made


def _run(words: Sequence[object]) -> str:
    """The output of a command."""
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{words[0]}: exit status {done.returncode}: {(done.stderr or done.stdout)[-800:]}")
    return done.stdout


def run_ours(src: Path, out: Path, resolutions: Sequence[int], shard_samples: int) -> None:
    words = [
        "--src",
        src,
        "--out",
        out,
        "--res",
        ",".join(map(str, resolutions)),
        "--val-frac",
        "0.01",
        "--shard-samples",
        shard_samples,
    ]
    more = ["--quality", QUALITY, "--workers", WORKERS, "--max-bad", "1"]
    _run([sys.executable, "-m", "resolute", "shards", *words, *more])


def run_pillow(src: Path, out: Path, short_sides: Sequence[int], filter: Image.Resampling) -> None:
    """The straightforward converter: each process has its own images and its own ShardWriters."""
    out.mkdir()
    files = sorted(src.glob("*/*"))
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_convert_with_pillow, args=(files[part::WORKERS], out, part, short_sides, filter))
        for part in range(WORKERS)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        if process.exitcode:
            raise RuntimeError(f"the Pillow converter failed with exit status {process.exitcode}")


def _convert_with_pillow(
    files: Sequence[Path], out: Path, part: int, short_sides: Sequence[int], filter: Image.Resampling
) -> None:
    with ExitStack() as stack:
        writers = [
            stack.enter_context(webdataset.ShardWriter(f"{out}/{side}-{part}-%06d.tar", maxcount=4096, verbose=0))
            for side in short_sides
        ]
        for number, path in enumerate(files):
            image = Image.open(path).convert("RGB")
            for side, writer in zip(short_sides, writers, strict=True):
                buffer = io.BytesIO()
                small = image.resize(fit(*image.size, side), filter)
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
    """{tool: {"seconds" and "cpu_seconds": a value per round, "few_seconds": the same for `FEW` images}}.

    For prep also "noop_seconds": on the finished set of `FEW` images.
    """
    adopt_orphans()
    results: dict[str, dict[str, list[float]]] = {
        name: {what: [] for what in ("seconds", "cpu_seconds", "few_seconds")} for name in tools
    }
    results[OURS]["noop_seconds"] = []
    out = root / "out"
    for number in range(rounds + 1):
        for name, tool in tools.items():
            times = {"few_seconds": timed_with_children(partial(tool, few, out))[0]}
            if "noop_seconds" in results[name]:
                times["noop_seconds"] = timed_with_children(partial(tool, few, out))[0]
            shutil.rmtree(out)
            times["seconds"], times["cpu_seconds"] = timed_with_children(partial(tool, photos, out))
            shutil.rmtree(out)
            for what, value in times.items() if number else ():  # the first is a warm-up
                results[name][what].append(value)
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = Parser(prog="python -m resolute.benchmarks.prep", description="Measure prep.")
    parser.add_argument("--src", type=Path, required=True, help="folder of class folders of JPEGs")
    parser.add_argument("--res", default="128,160,224", help="resolutions in px (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds (default: %(default)s)")
    parser.add_argument("--copies", type=int, default=10, help="copies of every image (default: %(default)s)")
    parser.add_argument("--shard-samples", type=int, default=4096, help="of prep (default: %(default)s)")
    parser.add_argument("--img2dataset", type=Path, metavar="PYTHON", help="Python interpreter with img2dataset")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/prep.json"), help="JSON to write")
    return command(parser, _measure_all, argv)


def _measure_all(args: argparse.Namespace) -> None:
    check_numbers(args, rounds=1, copies=1, shard_samples=1)
    resolutions = parse_resolutions(args.res, (), any_size=True)
    check_writable(args.out)
    result = header(rounds=args.rounds, packages=("simplejpeg", "numba", "webdataset"))
    with tempfile.TemporaryDirectory(prefix="resolute-prep-") as temporary:
        root = Path(temporary)
        sides = [round(res * MARGIN) for res in resolutions]
        files = copy_photos(args.src, args.copies, root / "photos")
        for number, path in enumerate(files[:: max(1, len(files) // FEW)][:FEW]):
            target = root / "few" / path.parent.name / f"{number}.jpg"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        tools: dict[str, Callable[[Path, Path], None]] = {
            OURS: lambda src, out: run_ours(src, out, resolutions, args.shard_samples),
            "pillow + ShardWriter": lambda src, out: run_pillow(src, out, sides, Image.Resampling.LANCZOS),
            "pillow, bicubic": lambda src, out: run_pillow(src, out, sides, Image.Resampling.BICUBIC),
        }
        if args.img2dataset:
            code = "from importlib.metadata import version; print(version('img2dataset'))"
            result["versions"]["img2dataset"] = _run([args.img2dataset, "-c", code]).strip()
            tools[f"img2dataset, {len(sides)} runs"] = lambda src, out: run_img2dataset(
                args.img2dataset, src, out, sides
            )
        once = files[:: args.copies]
        once = once[:: math.ceil(len(once) / COMPARED)]
        result |= {
            "images": len(files),
            "copies": args.copies,
            "resolutions": resolutions,
            "short_sides": sides,
            "shard_samples": args.shard_samples,
            "workers": WORKERS,
            "seconds": measure(tools, root / "photos", root / "few", root, args.rounds),
            "psnr_db": measure_psnr(once, sides),
        }
    report(result)
    write(args.out, result)


def report(result: dict[str, Any]) -> None:
    images, seconds = result["images"], result["seconds"]
    print(
        f"{images} images, {result['resolutions']} px, {result['workers']} processes, medians of "
        f"{len(seconds[OURS]['seconds'])} interleaved rounds; steady: without start-up"
    )
    steady = {}
    for name, values in seconds.items():
        total_s, few = statistics.median(values["seconds"]), statistics.median(values["few_seconds"])
        steady[name] = (images - FEW) / (total_s - few)
        cpu_ms = statistics.median(values["cpu_seconds"]) / images * 1e3
        print(
            f"  {name:<22} {images / total_s:5.0f} images/s, steady {steady[name]:5.0f}, start-up {few:4.2f} s, CPU "
            f"{cpu_ms:5.2f} ms per image; ours {total_s / statistics.median(seconds[OURS]['seconds']):.2f}x, steady "
            f"{steady[OURS] / steady[name]:.2f}x"
        )
    print(f"  {OURS} with nothing to do {statistics.median(seconds[OURS]['noop_seconds']):.2f} s")
    for side in result["short_sides"]:
        psnr = (
            ", ".join(f"{means[side]:.2f} dB to {name}" for name, means in result["psnr_db"].items() if side in means)
            or "nothing to shrink"
        )
        print(f"  short side {side:>4} px: before JPEG {psnr}")


if __name__ == "__main__":
    from resolute.console import run_main

    run_main(main)
