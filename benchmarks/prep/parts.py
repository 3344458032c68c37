"""CPU time per image of each part of prep, and how exact its pixels are.

The parts: read, decode, resize to all sizes, encode, and pack (tar members, CRC-32, SHA-256 of the photo and of the
shards), each on a single thread.
"""

from __future__ import annotations

import hashlib
import itertools
import statistics
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from resolute.benchmarks.cli import repeated
from resolute.prep.convert.decode import Photo, Reject, decode
from resolute.prep.convert.resize import fit, resize, resize_photo
from resolute.prep.shard_set.tar_format import member

__all__ = ["measure_parts", "measure_psnr"]

QUALITY = 90
FILTERS = {"bicubic": -0.5, "lanczos": None}


def _resize(pixels: NDArray[np.uint8], short_sides: Sequence[int]) -> list[NDArray[np.uint8]]:
    photo = Photo.full(pixels)
    return [resize_photo(photo, *fit(photo.width, photo.height, side)) for side in short_sides]


def _encode(images: Sequence[NDArray[np.uint8]]) -> list[bytes]:
    return [simplejpeg.encode_jpeg(image, QUALITY, "RGB", "420", False) for image in images]


def _pack(photo: bytes, jpegs: Sequence[bytes]) -> None:
    hashlib.sha256(photo).digest()
    for jpeg in jpegs:
        zlib.crc32(jpeg)
        hashlib.sha256(member("0000000001.jpg", jpeg) + member("0000000001.cls", b"0001")).digest()


def measure_parts(photos: Sequence[Path], short_sides: Sequence[int], rounds: int) -> dict[str, dict[Any, Any]]:
    """{"ms": {part: `repeated`}, "bytes": {short side: mean stored size}}, on a single thread."""
    ms: dict[str, list[float]] = {part: [] for part in ("read", "decode", "resize", "encode", "pack")}
    sizes: dict[int, list[int]] = {side: [] for side in short_sides}
    for number in range(rounds + 1):
        total = dict.fromkeys(ms, 0.0)
        for path in photos:
            times = [time.thread_time()]

            def timed(value: Any, times: list[float] = times) -> Any:
                times.append(time.thread_time())
                return value

            photo = timed(path.read_bytes())
            try:
                pixels = timed(decode(photo))
            except Reject:
                continue
            jpegs = timed(_encode(timed(_resize(pixels, short_sides))))
            _pack(photo, jpegs)
            times.append(time.thread_time())
            for part, (began, ended) in zip(ms, itertools.pairwise(times), strict=True):
                total[part] += ended - began
            for side, jpeg in zip(short_sides, jpegs, strict=True):
                sizes[side].append(len(jpeg))
        if number:  # the first is a warm-up
            for part in ms:
                ms[part].append(total[part] / len(photos) * 1e3)
    return {"ms": {part: repeated(values) for part, values in ms.items()},
            "bytes": {side: statistics.fmean(values) for side, values in sizes.items()}}  # fmt: skip


def _axis(length: int, shorter: int, a: float | None) -> NDArray[np.float64]:
    """(shorter, length): an antialiased cubic of that `a`, or Lanczos-3 for None; Pillow's support."""
    scale = max(length / shorter, 1.0)
    reach = (3 if a is None else 2) * scale
    centres = ((np.arange(shorter) + 0.5) * length / shorter)[:, None]
    taps = np.arange(length)[None]
    inside = (taps >= np.floor(np.maximum(centres - reach + 0.5, 0))) & (taps < np.floor(centres + reach + 0.5))
    x = np.abs(taps + 0.5 - centres) / scale
    if a is None:
        weights = np.where(x < 3, np.sinc(x) * np.sinc(x / 3), 0)
    else:
        near, far = ((a + 2) * x - (a + 3)) * x * x + 1, (((x - 5) * x + 8) * x - 4) * a
        weights = np.where(x < 1, near, np.where(x < 2, far, 0))
    weights = np.where(inside, weights, 0)
    return weights / weights.sum(1, keepdims=True)


def measure_psnr(photos: Sequence[Path], short_sides: Sequence[int]) -> dict[str, dict[int, float]]:
    """PSNR of our pixels, before JPEG, to float64 filters: {filter: {side: mean in dB of all photos that shrink}}."""
    results: dict[str, dict[int, list[float]]] = {name: {side: [] for side in short_sides} for name in FILTERS}
    for path in photos:
        try:
            pixels = decode(path.read_bytes())
        except Reject:
            continue
        h, w, _ = pixels.shape
        for side in short_sides:
            width, height = fit(w, h, side)
            if (width, height) == (w, h):
                continue
            small = resize(pixels, width, height)
            for name, a in FILTERS.items():
                rows = (_axis(h, height, a) @ pixels.reshape(h, -1).astype(np.float64)).reshape(height, w, 3)
                exact = np.clip(np.matmul(_axis(w, width, a), rows), 0, 255)
                results[name][side].append(float(10 * np.log10(255**2 / np.mean((small - exact) ** 2))))
    return {name: {side: statistics.fmean(values) for side, values in sides.items() if values}
            for name, sides in results.items()}  # fmt: skip
