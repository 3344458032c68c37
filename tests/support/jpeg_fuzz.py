"""Gives our JPEG decoder changed files, in memory between pages that may not be touched.

    python -m tests.support.jpeg_fuzz [--files N] [--seed S] [PHOTO …]

Ends with status 0 if every file gave pixels or was declined, and whole ones in between kept their pixels; a read or
write outside ends the process by a signal. Prints how many files were accepted.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numba import carray, njit
from numpy.typing import NDArray

from resolute.cli import program
from resolute.pipeline.graph.kernels.jpeg.memory import BYTES, bytes_at
from resolute.pipeline.graph.kernels.jpeg.region import decode_region
from resolute.settings import setting, settings
from tests.support.jpeg import encode, photo

__all__ = ["Guarded", "bases", "changed", "main", "size"]

_ROOM = 1 << 18  # bytes of the largest file
_WHOLE_EVERY = 64  # one of so many files is whole


class Guarded:
    """Memory of whole pages between two that may be neither read nor written."""

    def __init__(self, nbytes: int) -> None:
        page = mmap.PAGESIZE
        assert nbytes % page == 0
        self._map = mmap.mmap(-1, nbytes + 2 * page)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map)) + page
        self.end = self.address + nbytes
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        for guard in (self.address - page, self.end):
            if protect(ctypes.c_void_p(guard), ctypes.c_size_t(page), 0) != 0:
                raise OSError(ctypes.get_errno(), "mprotect")


def bases() -> list[bytes]:
    """Whole files: each sampling, several sizes and qualities, tables of their own, markers that are skipped."""
    files = []
    for n, (width, height) in enumerate([(48, 40), (17, 33), (100, 9), (64, 64), (5, 70), (33, 31)]):
        image = photo(width, height, n)
        files += [
            encode(image, quality=90, subsampling=2),
            encode(image, quality=60, subsampling=2, optimize=True, comment=b"a comment"),
            encode(image, quality=95, subsampling=0),
            encode(image[:, :, 0].copy(), quality=80),
        ]
    return files


@njit(nogil=True)
def changed(source: Any, to: Any, rng: Any) -> Any:
    """Write a changed copy of a file to `to`; returns its length."""
    n = len(source)
    kind = rng.integers(0, 8)
    header = min(n, 620)
    if kind == 0:  # cut, with the marker of an end
        n = rng.integers(4, n)
    to[:n] = source[:n]
    if kind == 0:
        to[n - 2], to[n - 1] = 0xFF, 0xD9
    for _ in range(rng.integers(1, 9)):
        place = rng.integers(0, header if kind in (1, 2) else n)
        if kind in (3, 4):  # behind the header, if there is a place
            place = min(n - 3, header + rng.integers(0, max(1, n - header)))
        if kind == 5:  # a marker, or bytes that look like one
            to[place] = 255
            to[min(place + 1, n - 1)] = rng.integers(0, 256)
        elif kind == 6:  # a piece from elsewhere
            size = rng.integers(1, 40)
            other = rng.integers(0, n)
            size = min(size, n - max(place, other))
            to[place : place + size] = source[other : other + size]
        elif kind in (2, 4):
            to[place] ^= 1 << rng.integers(0, 8)
        else:
            to[place] = rng.integers(0, 256)
    if kind == 7:  # an extreme size in the frame
        for i in range(n - 9):
            if to[i] == 0xFF and to[i + 1] == 0xC0:
                to[i + 5 + rng.integers(0, 4)] = rng.integers(0, 256)
                break
    if rng.integers(0, 4) > 0:
        to[n - 2], to[n - 1] = 0xFF, 0xD9
    return n


@njit(nogil=True)
def _sum(first: Any, pitch: Any, w: Any, h: Any) -> Any:
    """A checksum of pixels, all of which are read."""
    total, pixels = np.int64(0), carray(bytes_at(first), pitch * h, np.uint8)
    for row in range(h):
        for i in range(3 * w):
            total = total * 31 + pixels[pitch * row + i]
    return total


@njit(nogil=True)
def _fuzz(files: Any, starts: Any, sizes: Any, address: int, end: int, decoder: int, count: int, rng: Any) -> Any:
    """(accepted, whole files that got other pixels)."""
    scratch = np.zeros(_ROOM, np.uint8)
    sums = np.zeros(len(starts), np.int64)
    accepted, wrong = 0, 0
    for k in range(-len(starts), count):
        number = k + len(starts) if k < 0 else rng.integers(0, len(starts))
        source = files[starts[number] : starts[number + 1]] if number + 1 < len(starts) else files[starts[number] :]
        is_whole = k < 0 or k % _WHOLE_EVERY == 0
        scratch[: len(source)] = source
        n = len(source) if is_whole else changed(source, scratch, rng)
        at = end - n if k % 2 == 0 else address
        memory = carray(bytes_at(at), n, np.uint8)
        memory[:] = scratch[:n]
        width, height = sizes[number]
        x, y, w, h = 0, 0, width, height
        if not is_whole:
            x, y = rng.integers(0, width), rng.integers(0, height)
            w, h = rng.integers(1, width - x + 1), rng.integers(1, height - y + 1)
            if rng.integers(0, 16) == 0:
                x, y, w, h = x - 3, y, w * 1000, h * 1000
        first, pitch = decode_region(at, n, x, y, w, h, decoder)
        total = np.int64(0)
        if first != 0:
            accepted += 1
            total = _sum(first, pitch, w, h)
        if k < 0:
            sums[number] = total
            wrong += first == 0
        elif is_whole:
            wrong += total != sums[number]
    return accepted, wrong


def size(jpeg: bytes) -> tuple[int, int]:
    frame = jpeg.index(b"\xff\xc0")
    return int.from_bytes(jpeg[frame + 7 : frame + 9]), int.from_bytes(jpeg[frame + 5 : frame + 7])


@settings("")
class FuzzOptions:
    photos: tuple[Path, ...] = setting((), "JPEGs to change (default: made ones of each form)")
    files: int = setting(10_000, "changed files", ge=1)
    seed: int = setting(0, "seed of the changes", ge=0)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    about = "Give our JPEG decoder changed files, in memory between pages that may not be touched."
    return program("python -m tests.support.jpeg_fuzz", FuzzOptions, _run, words, help=about, positional="photos")


def _run(options: FuzzOptions) -> int:
    jpegs = [path.read_bytes() for path in options.photos] or bases()
    starts = np.cumsum([0, *map(len, jpegs[:-1])])
    sizes: NDArray[np.int64] = np.array([size(jpeg) for jpeg in jpegs], np.int64)
    memory, decoder = Guarded(_ROOM), Guarded(BYTES)
    joined = np.frombuffer(b"".join(jpegs), np.uint8)
    rng = np.random.default_rng(options.seed)
    accepted, wrong = _fuzz(joined, starts, sizes, memory.address, memory.end, decoder.address, options.files, rng)
    print(f"{options.files} files, {accepted} of {options.files + len(jpegs)} accepted, {wrong} whole ones wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
