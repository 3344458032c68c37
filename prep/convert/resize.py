"""Resizes a decoded photo to the stored sizes and encodes each as JPEG."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Sequence

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from resolute.prep.near_copies.descriptor import describe

from .decode import Photo
from .resize_kernel import MIN_TILE, pair_rows, pair_taps, pairs_per_row, resample_weights, shrink

__all__ = ["EncodedJpeg", "describe_and_encode", "fit", "halving_error", "resize", "resize_and_encode", "resize_photo"]

_SCRATCH = 1 << 19  # uint16 values, 1 MiB: the pairs of photos of up to 0.35 megapixels
_Filter = tuple[NDArray[np.int64], NDArray[np.int32]]  # of `pair_taps`
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


class _Buffer(threading.local):
    """The calling thread's scratch array, and the photo whose pairs it holds, if any."""

    def __init__(self) -> None:
        memory = np.empty(_SCRATCH + 32, np.uint16)
        first = -memory.ctypes.data % 64 // 2  # why: vectors that span two cache lines take twice as long to load
        self.scratch = memory[first : first + _SCRATCH]
        self.photo: weakref.ref[Photo] | None = None


_buffer = _Buffer()


@functools.lru_cache(maxsize=512)  # why: photos of a set share few sizes, and computing the weights takes 20 us
def _filter(length: int, shorter: int, start: float, extent: float, averaged: int, halved: int = 1) -> _Filter:
    """The filter for `length` inputs; with `halved` 2, for an input of which each two are averaged first."""
    starts, weights = resample_weights(length // halved, shorter, start / halved, extent / halved, averaged * halved)
    if halved == 2:
        starts, weights = 2 * starts, np.stack([weights >> 1, weights - (weights >> 1)], 2).reshape(len(weights), -1)
    paired: _Filter = pair_taps(starts, weights, length)
    return paired


def resize(pixels: NDArray[np.uint8], width: int, height: int) -> NDArray[np.uint8]:
    """Downscale (H, W, 3) uint8 RGB, C-contiguous, to (height, width, 3) uint8, C-contiguous.

    An antialiased cubic between bicubic and Lanczos-3 (see `resize_kernel.py`), within 0.52 levels of exact arithmetic
    and bit-identical on every machine.
    """
    return resize_photo(Photo.full(pixels), width, height)


def resize_photo(photo: Photo, width: int, height: int) -> NDArray[np.uint8]:
    """`resize` of the full image, or, if the photo was decoded at a fraction of its size, an approximation of it."""
    if (photo.width, photo.height) == (width, height):
        return photo.pixels
    h, w, _ = photo.pixels.shape
    left, top, across, down = photo.box
    rows = _filter(h, height, top, down, photo.averaged)
    return _shrink(photo, rows, _filter(w, width, left, across, photo.averaged))


def halving_error(photo: Photo, width: int, height: int) -> float:
    """Mean square of the difference that decoding `photo` at half its size would make to `resize_photo`, in levels.

    Of every fourth row.
    """
    h, w, _ = photo.pixels.shape
    left, top, across, down = photo.box
    results = []
    for halved in (1, 2):
        starts, weights = _filter(h, height, top, down, photo.averaged, halved)
        columns = _filter(w, width, left, across, photo.averaged, halved)
        every_fourth = (starts[::4].copy(), weights[::4].copy())
        results.append(_shrink(photo, every_fourth, columns).astype(np.int32))
    return int(np.square(results[0] - results[1]).sum(dtype=np.int64)) / results[0].size


def _shrink(photo: Photo, rows: _Filter, columns: _Filter) -> NDArray[np.uint8]:
    h, w, _ = photo.pixels.shape
    pixels, pairs, scratch = photo.pixels.reshape(h, -1), (h + 1) // 2, _buffer.scratch
    is_paired = pairs * pairs_per_row(w) <= len(scratch)
    if not is_paired:
        _buffer.photo = None
        if pairs * MIN_TILE > len(scratch):  # why: at most all rows are needed at a time
            scratch = np.empty(pairs * MIN_TILE, np.uint16)
    elif _buffer.photo is None or _buffer.photo() is not photo:
        pair_rows(pixels, 0, pairs, 0, w, scratch)
        _buffer.photo = weakref.ref(photo)
    small = np.empty((len(rows[0]), len(columns[0]), 3), np.uint8)
    shrink(pixels, *rows, *columns, small.reshape(len(small), -1), scratch, is_paired)
    return small


def resize_and_encode(photos: Sequence[Photo], short_sides: Sequence[int], quality: int) -> list[EncodedJpeg]:
    """Encode one baseline RGB 4:2:0 JPEG per short side (px), each resized from the photo at the same position.

    `photos` are the same image, decoded at any fraction of its size; `quality` is libjpeg's, 1..100. The JPEGs are
    sRGB, and hold no EXIF and no profile.
    """
    return describe_and_encode(photos, short_sides, quality, 0)[0]


def describe_and_encode(
    photos: Sequence[Photo], short_sides: Sequence[int], quality: int, described_side: int
) -> tuple[list[EncodedJpeg], NDArray[np.uint64] | None]:
    """As `resize_and_encode`, and the hashes of the pixels with the short side `described_side` (px), if it is one."""
    encoded: dict[tuple[int, int], bytes] = {}
    jpegs, hashes = [], None
    for photo, short_side in zip(photos, short_sides, strict=True):
        size = fit(photo.width, photo.height, short_side)
        if size not in encoded or short_side == described_side:
            small = photo.conversion.of_pixels(resize_photo(photo, *size))
            encoded[size] = simplejpeg.encode_jpeg(small, quality, "RGB", "420", False)
            if short_side == described_side:
                hashes = describe(np.ascontiguousarray(small))
        jpegs.append((encoded[size], *size))
    return jpegs, hashes
