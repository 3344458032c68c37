"""Measures photos per second of prep and of other converters, and the PSNR of prep's pixels.

    python -m resolute.benchmarks.prep --src photos/train [--res 128,160,224] [--rounds 3] [--copies 10]
                              [--img2dataset /path/to/python]

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
from typing import Annotated, Any

import webdataset
from PIL import Image
from pydantic import Field

from resolute.benchmarks.cli import default_file, text_table
from resolute.benchmarks.proc import adopt_orphans, timed_with_children
from resolute.benchmarks.record import check_writable, header, write
from resolute.cli import program
from resolute.errors import ResoluteError
from resolute.prep.convert.resize import fit
from resolute.prep.settings import MARGIN
from resolute.settings import described, setting, settings

from .pixels import measure_psnr

WORKERS = 2
QUALITY = 90
SHARD_SAMPLES = 4096
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


def run_ours(src: Path, out: Path, resolutions: Sequence[int]) -> None:
    options = {
        "src": src,
        "out": out,
        "res": ",".join(map(str, resolutions)),
        "val-frac": 0.01,
        "shard-samples": SHARD_SAMPLES,
        "quality": QUALITY,
        "workers": WORKERS,
        "max-bad": 1,
    }
    _run([sys.executable, "-m", "resolute", "shards", *(f"--{name}={value}" for name, value in options.items())])


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
            stack.enter_context(
                webdataset.ShardWriter(f"{out}/{side}-{part}-%06d.tar", maxcount=SHARD_SAMPLES, verbose=0)
            )
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


@settings("")
class PrepOptions:
    src: Annotated[Path, described("folder of class folders of JPEGs")]
    res: tuple[Annotated[int, Field(ge=1)], ...] = setting((128, 160, 224), "resolutions, px")
    rounds: int = setting(3, "timed rounds", ge=1)
    copies: int = setting(10, "copies of every image", ge=1)
    img2dataset: Path | None = setting(None, "Python interpreter with img2dataset (default: it is left out)")
    out: Path | None = setting(None, "JSON file to write (default: bench/prep.json)")


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    name = "python -m resolute.benchmarks.prep"
    return program(name, PrepOptions, _measure_all, words, help="Measure prep beside other converters.")


def _measure_all(options: PrepOptions) -> None:
    out = options.out or default_file("prep")
    check_writable(out)
    result = header(rounds=options.rounds, packages=("simplejpeg", "numba", "webdataset"))
    resolutions = tuple(sorted({*options.res}))
    sides = [round(res * MARGIN) for res in resolutions]
    tools: dict[str, Callable[[Path, Path], None]] = {
        OURS: partial(run_ours, resolutions=resolutions),
        "pillow + ShardWriter": partial(run_pillow, short_sides=sides, filter=Image.Resampling.LANCZOS),
        "pillow, bicubic": partial(run_pillow, short_sides=sides, filter=Image.Resampling.BICUBIC),
    }
    if python := options.img2dataset:
        code = "from importlib.metadata import version; print(version('img2dataset'))"
        result["versions"]["img2dataset"] = _run([python, "-c", code]).strip()
        tools[f"img2dataset, {len(sides)} runs"] = partial(run_img2dataset, python, short_sides=sides)
    with tempfile.TemporaryDirectory(prefix="resolute-prep-") as temporary:
        root = Path(temporary)
        files = copy_photos(options.src, options.copies, root / "photos")
        for number, path in enumerate(files[:: max(1, len(files) // FEW)][:FEW]):
            target = root / "few" / path.parent.name / f"{number}.jpg"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        once = files[:: options.copies]
        result |= {
            "images": len(files),
            "copies": options.copies,
            "resolutions": resolutions,
            "short_sides": sides,
            "shard_samples": SHARD_SAMPLES,
            "workers": WORKERS,
            "seconds": measure(tools, root / "photos", root / "few", root, options.rounds),
            "psnr_db": measure_psnr(once[:: math.ceil(len(once) / COMPARED)], sides),
        }
    report(result)
    write(out, result)


def report(result: dict[str, Any]) -> None:
    images = result["images"]
    medians = {
        name: {what: statistics.median(values) for what, values in times.items()}
        for name, times in result["seconds"].items()
    }
    steady = {name: (images - FEW) / (times["seconds"] - times["few_seconds"]) for name, times in medians.items()}
    ours = medians[OURS]
    rows = [
        (
            name,
            f"{images / times['seconds']:.0f}",
            f"{steady[name]:.0f}",
            f"{times['few_seconds']:.2f}",
            f"{times['cpu_seconds'] / images * 1e3:.2f}",
            f"{times['seconds'] / ours['seconds']:.2f}",
            f"{steady[OURS] / steady[name]:.2f}",
        )
        for name, times in medians.items()
    ]
    title = (
        f"{images} images, {result['resolutions']} px, {result['workers']} processes, medians of {result['rounds']} "
        "interleaved rounds; steady: without start-up"
    )
    head = ("tool", "images/s", "steady", "start-up s", "CPU ms/image", "ours is times", "steady, times")
    print(text_table(title, head, rows))
    print(f"{OURS} with nothing to do: {ours['noop_seconds']:.2f} s")
    for side in result["short_sides"]:
        psnr = (
            ", ".join(f"{means[side]:.2f} dB to {name}" for name, means in result["psnr_db"].items() if side in means)
            or "nothing to shrink"
        )
        print(f"short side {side:>4} px: before JPEG {psnr}")


if __name__ == "__main__":
    from resolute.console import run_main

    run_main(main)
