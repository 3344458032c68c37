"""Measures what decoding large JPEGs at a fraction of their size saves, and how the stored images differ.

    python -m resolute.benchmarks.prep.large --src photos/train [--real folder] [--rounds 3]

CPU milliseconds for decoding, resizing to all sizes and encoding, on a single thread, as prep does it and with the full
decode, one after the other in each round; PSNR between their images before JPEG. Measured on the four largest photos of
`--src`, enlarged to 4, 12 and 48 megapixels (4:3) with white noise as of a camera; on patterns of 12 megapixels with
detail that folds into small images, and text; and on all JPEGs of `--real`.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from resolute.console import guard_process

    guard_process()

import argparse
import io
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from resolute.benchmarks.cli import Parser, check_numbers, command, parse_resolutions, repeated
from resolute.benchmarks.record import check_writable, header, write
from resolute.prep.convert.decode import Photo, Reject, decode
from resolute.prep.convert.reduced import decode_for_sizes
from resolute.prep.convert.resize import fit, resize_and_encode, resize_photo
from resolute.prep.settings import MARGIN

QUALITY = 90
PHOTOS = 4
NOISE = 3.0  # standard deviation in levels; with QUALITY_OF_PHOTOS, files are as large as those of cameras
QUALITY_OF_PHOTOS = 92
SIZES = {"4 MP": (2312, 1734), "12 MP": (4000, 3000), "48 MP": (8000, 6000)}
VARIANTS: dict[str, dict[str, Any]] = {
    "12 MP 4:4:4": {"subsampling": "4:4:4"}, "12 MP 4:2:2": {"subsampling": "4:2:2"},
    "12 MP progressive": {"progressive": True},
}  # fmt: skip


def jpeg(image: Image.Image, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", **{"quality": QUALITY_OF_PHOTOS, "subsampling": "4:2:0"} | options)
    return buffer.getvalue()


def enlarge(path: Path, size: tuple[int, int], seed: int) -> Image.Image:
    pixels = np.array(Image.open(path).convert("RGB").resize(size, Image.Resampling.LANCZOS))
    rng = np.random.default_rng(seed)
    for row in pixels:
        row[:] = np.clip(row + NOISE * rng.standard_normal(row.shape, np.float32) + 0.5, 0, 255)
    return Image.fromarray(pixels)


def patterns(width: int, height: int) -> dict[str, Image.Image]:
    y, x = np.mgrid[:height, :width].astype(np.float32)
    plate = 127.5 + 127.5 * np.cos((x * x + y * y) * (np.pi / (2 * np.hypot(width, height))))
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    text = Image.new("L", (width, height), 255)
    draw = ImageDraw.Draw(text)
    for number, top in enumerate(range(0, height, 40)):
        line = " ".join(f"{(number * 7919 + word * 104729) % 99991:x} sphinx" for word in range(width // 100))
        draw.text((10, top), line, fill=0, font_size=30)

    def squares(side: int) -> Image.Image:
        return Image.fromarray(((x // side + y // side) % 2 * 255).astype(np.uint8))

    return {"zone plate": Image.fromarray(plate.astype(np.uint8)), "white noise": Image.fromarray(noise),
            "text": text, "squares of 3 px": squares(3), "squares of 16 px": squares(16)}  # fmt: skip


def photos_to_measure(src: Path, real: Path | None) -> Iterator[tuple[str, bytes]]:
    """Yield (group, JPEG)."""
    paths = sorted(path for path in src.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    largest = sorted(paths, key=lambda path: -min(Image.open(path).size))[:PHOTOS]
    for name, size in SIZES.items():
        for seed, path in enumerate(largest):
            image = enlarge(path, size, seed)
            yield name, jpeg(image)
            if name == "12 MP":
                for variant, options in VARIANTS.items():
                    yield variant, jpeg(image, **options)
    for name, image in patterns(*SIZES["12 MP"]).items():
        yield name, jpeg(image)
    for path in sorted(real.rglob("*")) if real else ():
        if path.suffix.lower() in (".jpg", ".jpeg"):
            yield "real", path.read_bytes()


def convert_fully(data: bytes, sides: Sequence[int]) -> list[Photo]:
    """`decode_for_sizes` without reduced decoding: the baseline."""
    return [Photo.full(decode(data))] * len(sides)


def measure(data: bytes, sides: Sequence[int], rounds: int) -> dict[str, Any]:
    ms: dict[str, list[float]] = {"full": [], "prep": []}
    for number in range(rounds + 1):
        for name, decoder in (("full", convert_fully), ("prep", decode_for_sizes)):
            began = time.process_time()
            resize_and_encode(decoder(data, sides), sides, QUALITY)
            if number:  # the first is a warm-up
                ms[name].append((time.process_time() - began) * 1e3)
    full, photos = convert_fully(data, sides), decode_for_sizes(data, sides)
    size = full[0].width, full[0].height
    return {
        "width": size[0], "height": size[1], "bytes": len(data),
        "subsampling": simplejpeg.decode_jpeg_header(data)[3], "factor": max(photo.averaged for photo in photos),
        "ms": {name: repeated(values) for name, values in ms.items()},
        "psnr_db": {
            side: psnr_db(*(resize_photo(photo, *fit(*size, side)) for photo in both))
            for side, *both in zip(sides, full, photos, strict=True)
        },
    }  # fmt: skip


def psnr_db(a: NDArray[np.uint8], b: NDArray[np.uint8]) -> float | None:
    """None for equal images."""
    error = float(np.mean((a.astype(np.float64) - b) ** 2))
    return 10 * np.log10(255**2 / error) if error else None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = Parser(prog="python -m resolute.benchmarks.prep.large", description=__doc__)
    parser.add_argument("--src", type=Path, required=True, help="folder of JPEGs, of which the largest are enlarged")
    parser.add_argument("--real", type=Path, help="folder of large JPEGs")
    parser.add_argument("--res", default="128,160,224", help="resolutions in px (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/prep-large.json"), help="JSON to write")
    return command(parser, _run, argv)


def _run(args: argparse.Namespace) -> None:
    check_numbers(args, rounds=1)
    check_writable(args.out)
    sides = [round(res * MARGIN) for res in parse_resolutions(args.res, (), any_size=True)]
    result = header(rounds=args.rounds, packages=("simplejpeg", "numba"))
    result |= {"short_sides": sides, "photos": []}
    for group, data in photos_to_measure(args.src, args.real):
        try:
            result["photos"].append({"group": group, **measure(data, sides, args.rounds)})
        except Reject:
            continue
    report(result)
    write(args.out, result)


def report(result: dict[str, Any]) -> None:
    print(f"CPU ms for decode, resize to {result['short_sides']} px short side and encode, medians; PSNR to the full "
          "decode's images, the worst")  # fmt: skip
    groups: dict[str, list[dict[str, Any]]] = {}
    for photo in result["photos"]:
        group = photo["group"]
        if group == "real":
            group = f"real, decoded at 1/{photo['factor']}" if photo["factor"] > 1 else "real, decoded in full"
        groups.setdefault(group, []).append(photo)
    for group, photos in groups.items():
        full, prep = ([photo["ms"][name]["median"] for photo in photos] for name in ("full", "prep"))
        ratio = statistics.median(a / b for a, b in zip(full, prep, strict=True))
        factors = ",".join(f"1/{factor}" for factor in sorted({photo["factor"] for photo in photos}))
        psnr = [
            min((photo["psnr_db"][side] or 99.0 for photo in photos), default=99.0) for side in result["short_sides"]
        ]
        megabytes = statistics.median(photo["bytes"] for photo in photos) / 1e6
        print(
            f"  {group:<24} {len(photos):3} photos of {megabytes:5.1f}"
            f" MB, at {factors:<8} {statistics.median(full):6.1f} -> {statistics.median(prep):6.1f} ms, {ratio:.2f}x; "
            + "/".join("same" if db == 99.0 else f"{db:.1f}" for db in psnr) + " dB"
        )  # fmt: skip


if __name__ == "__main__":
    from resolute.console import run_main

    run_main(main)
