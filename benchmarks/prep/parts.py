"""CPU time per image of each part of prep, the throughput limit of each part, and the accuracy of prep's pixels.

Used by `benchmarks.prep`. CPU time of a single thread in ms per image: decode, resize to all sizes, encode, and pack
(tar members, CRC-32, SHA-256 of the photo and of the shards). A part's limit is the rate in images/s of wall time at
which two processes do nothing but that part.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import statistics
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from prep.convert.decode import Reject, decode
from prep.convert.resize import fit, resize
from prep.shards.tar_format import member

__all__ = ["limits", "quality", "split"]

QUALITY = 90
FILTERS = {"bicubic": -0.5, "lanczos": None}


def _shrunk(pixels: NDArray[np.uint8], short_sides: Sequence[int]) -> list[NDArray[np.uint8]]:
    return [resize(pixels, *fit(pixels.shape[1], pixels.shape[0], side)) for side in short_sides]


def _encoded(images: Sequence[NDArray[np.uint8]]) -> list[bytes]:
    return [simplejpeg.encode_jpeg(image, QUALITY, "RGB", "420", False) for image in images]


def _wrapped(photo: bytes, jpegs: Sequence[bytes]) -> None:
    hashlib.sha256(photo).digest()
    for jpeg in jpegs:
        zlib.crc32(jpeg)
        hashlib.sha256(member("0000000001.jpg", jpeg) + member("0000000001.cls", b"0001")).digest()


def split(photos: Sequence[Path], short_sides: Sequence[int], repeats: int) -> dict[str, dict[Any, Any]]:
    """{"ms": {part: {"values": one per repeat}}, "bytes": {short side: mean stored size}}, on a single thread."""
    ms: dict[str, list[float]] = {part: [] for part in ("read", "decode", "resize", "encode", "wrap up")}
    sizes: dict[int, list[int]] = defaultdict(list)
    for repeat in range(repeats + 1):
        total: dict[str, float] = defaultdict(float)
        for path in photos:
            clock = [time.thread_time()]
            photo = path.read_bytes()
            clock.append(time.thread_time())
            try:
                pixels = decode(photo)
            except Reject:
                continue
            clock.append(time.thread_time())
            small = _shrunk(pixels, short_sides)
            clock.append(time.thread_time())
            jpegs = _encoded(small)
            clock.append(time.thread_time())
            _wrapped(photo, jpegs)
            clock.append(time.thread_time())
            for part, began, ended in zip(ms, clock, clock[1:], strict=False):
                total[part] += ended - began
            if not repeat:
                for side, jpeg in zip(short_sides, jpegs, strict=True):
                    sizes[side].append(len(jpeg))
        if repeat:  # the first is a warm-up
            for part in ms:
                ms[part].append(total[part] / len(photos) * 1e3)
    stored = {side: statistics.fmean(values) for side, values in sizes.items()}
    return {"ms": {part: {"values": values} for part, values in ms.items()}, "bytes": stored}


def _part(part: str, paths: Sequence[Path], short_sides: Sequence[int], gate: Any, out: Any) -> None:
    photos = [path.read_bytes() for path in paths]
    pixels = [decode(photo) for photo in photos]
    small = [_shrunk(image, short_sides) for image in pixels]
    work: dict[str, Callable[[], object]] = {
        "decode (libjpeg-turbo alone)": lambda: [simplejpeg.decode_jpeg(photo) for photo in photos],
        "decode": lambda: [decode(photo) for photo in photos],
        "resize": lambda: [_shrunk(image, short_sides) for image in pixels],
        "encode": lambda: [_encoded(images) for images in small],
    }
    work[part]()
    gate.wait()
    for _ in range(4):
        work[part]()
    gate.wait()
    out.put(4 * len(photos))


def limits(photos: Sequence[Path], short_sides: Sequence[int], workers: int) -> dict[str, float]:
    """Images/s of `workers` processes that each do a single part, in memory. All photos must be baseline JPEGs."""
    context = multiprocessing.get_context("forkserver")
    results = {}
    for part in ("decode (libjpeg-turbo alone)", "decode", "resize", "encode"):
        gate, out = context.Barrier(workers + 1), context.Queue()
        processes = [
            context.Process(target=_part, args=(part, photos[i::workers], short_sides, gate, out))
            for i in range(workers)
        ]
        for process in processes:
            process.start()
        gate.wait()
        began = time.perf_counter()
        gate.wait()
        elapsed_s = time.perf_counter() - began
        results[part] = sum(out.get() for _ in processes) / elapsed_s
        for process in processes:
            process.join()
    return results


def _axis(length: int, shorter: int, a: float | None) -> NDArray[np.float64]:
    """(shorter, length): an antialiased cubic of that `a`, or Lanczos-3 for None; Pillow's windows."""
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


def quality(photos: Sequence[Path], short_sides: Sequence[int]) -> dict[str, dict[int, list[float]]]:
    """PSNR in dB of our pixels, before JPEG, to float64 filters, of every photo that shrinks: {filter: {side: dB}}."""
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
    return results
