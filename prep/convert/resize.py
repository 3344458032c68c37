"""Resizes a decoded image to the stored sizes and encodes each as JPEG."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from .resize_kernel import MIN_WIDTH_PX, resample_weights, shrink

__all__ = ["EncodedJpeg", "fit", "resize", "resize_and_encode"]

EncodedJpeg = tuple[bytes, int, int]  # (JPEG, width in px, height in px)


def fit(width: int, height: int, short_side: int) -> tuple[int, int]:
    """(width, height) in px with `short_side` as the shorter side and the same aspect ratio; never enlarged."""
    smaller = min(width, height)
    if smaller <= short_side:
        return width, height
    return (
        max(1, round(width * short_side / smaller)),
        max(1, round(height * short_side / smaller)),
    )


@functools.lru_cache(maxsize=512)  # why: photos of a set share few sizes, and computing the weights takes 20 us
def _cached_weights(length: int, shorter: int) -> tuple[NDArray[np.int64], NDArray[np.int16]]:
    weights: Any = resample_weights(length, shorter)
    return weights


def resize(pixels: NDArray[np.uint8], width: int, height: int) -> NDArray[np.uint8]:
    """Downscale (H, W, 3) uint8 RGB, C-contiguous, to (height, width, 3) uint8, C-contiguous.

    An antialiased cubic between bicubic and Lanczos-3 (see `resize_kernel.py`), within 0.52 levels of exact arithmetic
    and bit-identical on every machine.
    """
    h, w, _ = pixels.shape
    if (w, h) == (width, height):
        return pixels
    if w < MIN_WIDTH_PX:  # why: the kernel reads whole vectors; the added columns have weight 0
        pixels = np.pad(pixels, ((0, 0), (0, MIN_WIDTH_PX - w), (0, 0)))
    small = np.empty((height, width, 3), np.uint8)
    shrink(pixels.reshape(h, -1), *_cached_weights(h, height), *_cached_weights(w, width), small.reshape(height, -1))
    return small


def resize_and_encode(pixels: NDArray[np.uint8], short_sides: Sequence[int], quality: int) -> list[EncodedJpeg]:
    """Encode one baseline RGB 4:2:0 JPEG per short side (px), each resized from the full image.

    `pixels` is (H, W, 3) uint8 RGB, C-contiguous; `quality` is libjpeg's, 1..100. The JPEGs hold no EXIF and no
    profile.
    """
    height, width = pixels.shape[:2]
    encoded: dict[tuple[int, int], bytes] = {}
    jpegs = []
    for short_side in short_sides:
        size = fit(width, height, short_side)
        if size not in encoded:
            small = resize(pixels, *size)
            encoded[size] = simplejpeg.encode_jpeg(small, quality, "RGB", "420", False)
        jpegs.append((encoded[size], *size))
    return jpegs
