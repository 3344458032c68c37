"""The descriptor of a photo: 11 hashes of 64 bits, of the whole photo and of parts of it.

A hash holds the signs of the low frequencies (a discrete cosine transform, DCT) of the luma on a grid of 64 x 64 cells,
whatever the photo's shape. It hardly changes with size, compression, brightness and contrast, and the hash of the
mirrored photo is an exclusive or with `MIRROR`. A photo that was cropped has nearly the hash of one of the parts of the
original: the photo without a strip at one side, at two sides or at all sides, and its central square.

All sums are over integers, so that equal pixels give equal hashes on every machine.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from resolute.pipeline.jit import compiled_at_import

__all__ = ["GRID", "HASHES", "MIRROR", "PARTS", "area_means", "central_part", "describe", "has_hashes"]

GRID = 64  # cells per side
# What is cut off at the left, right, top and bottom, in cells: nothing, a strip at one side (rows 1 to 4), at two sides
# that meet, at all sides. The last part of a photo is its central square, see `central_part`.
PARTS = np.array(
    [
        (0, 0, 0, 0),
        *((6, 0, 0, 0), (0, 6, 0, 0), (0, 0, 6, 0), (0, 0, 0, 6)),
        *((5, 0, 5, 0), (0, 5, 5, 0), (5, 0, 0, 5), (0, 5, 0, 5)),
        (3, 3, 3, 3),
    ],
    np.int64,
)
HASHES = len(PARTS) + 1
_MAX_CUT = 16  # cells off each of two sides for the central square of a long photo
MIRROR = np.uint64(0x5555555555555555)  # the signs of odd columns of the DCT, which mirroring changes
_LOW = 9  # frequencies per direction: a hash holds 8 x 8, of which the ninth replaces the constant one
_LEVELS = 16  # steps per level of luma
_FLAT = 4 * _LEVELS  # a photo whose luma has a smaller standard deviation has no hashes


def _cosines(count: int) -> NDArray[np.float64]:
    """(GRID, _LOW) integers: 4096 times the cosine of each frequency at `count` cells; the rest is 0."""
    cells, frequencies = np.arange(count), np.arange(_LOW)
    table = np.zeros((GRID, _LOW))
    table[:count] = np.rint(4096 * np.cos(np.pi * np.outer(2 * cells + 1, frequencies) / (2 * count)))
    return table


_COSINES = np.stack([_cosines(count) if count >= GRID - 2 * _MAX_CUT else _cosines(1) for count in range(GRID + 1)])


@compiled_at_import("void(Array(uint8, 2, 'C', readonly=True), int32[:, ::1])")
def _mean_rows(lines: Any, out: Any) -> None:
    """Sums of rows: (n, columns) int32 of (rows, columns), each input row divided among the `n` by the area it covers.

    A row counts `n` times, so that all shares are integers.
    """
    rows, n = len(lines), len(out)
    out[:] = 0
    for y in range(rows):
        start, stop = y * n, (y + 1) * n
        cell = start // rows
        while start < stop:
            end = min(stop, (cell + 1) * rows)
            weight = np.int32(end - start)
            for x in range(lines.shape[1]):
                out[cell, x] += weight * np.int32(lines[y, x])
            start, cell = end, cell + 1


@compiled_at_import("void(float64[:, ::1], float64, float64[:, ::1], int64[:, ::1])")
def _mean_columns(lines: Any, divisor: float, sums: Any, out: Any) -> None:
    """out[y, x] = mean over the lines (columns, cells) that cell x covers, of line[y], divided by `divisor` / cells.

    Rounded, halves up. `sums` (cells, cells) is memory for the sums, which are integers below 2^53.
    """
    columns, n = lines.shape
    sums[:] = 0.0
    for x in range(columns):
        start, stop = x * n, (x + 1) * n
        cell = start // columns
        while start < stop:
            end = min(stop, (cell + 1) * columns)
            weight = np.float64(end - start)
            for y in range(n):
                sums[cell, y] += weight * lines[x, y]
            start, cell = end, cell + 1
    half, share = np.floor(divisor / 2), 1.0 / divisor
    for x in range(n):
        for y in range(n):
            total = sums[x, y] + half
            quotient = np.floor(total * share)  # why then corrected: a division takes several times as long
            rest = total - quotient * divisor
            quotient += np.float64(rest >= divisor) - np.float64(rest < 0.0)
            out[y, x] = np.int64(quotient)


@compiled_at_import("void(Array(uint8, 3, 'C', readonly=True), int64[:, ::1])")
def _area_means(pixels: Any, out: Any) -> None:
    height, width, channels = pixels.shape
    n = len(out)
    sums = np.empty((n, width * channels), np.int32)
    _mean_rows(pixels.reshape(height, width * channels), sums)
    lines = np.empty((width, n))
    for y in range(n):
        line = sums[y]
        for x in range(width):
            if channels == 3:  # Source: the weights of ITU-R BT.601 in 256ths
                red, green, blue = line[3 * x], line[3 * x + 1], line[3 * x + 2]
                lines[x, y] = 77.0 * red + 150.0 * green + 29.0 * blue
            else:
                lines[x, y] = 256.0 * line[x]
    _mean_columns(lines, np.float64(256 // _LEVELS * width * height), np.empty((n, n)), out)


def area_means(pixels: NDArray[np.uint8], cells: int) -> NDArray[np.int64]:
    """(cells, cells) mean luma of an image, in 16ths of a level: 0 to 4080, each cell the exact mean of its area.

    pixels   (H, W, 3) RGB or (H, W, 1) luma, C-contiguous
    """
    means = np.empty((cells, cells), np.int64)
    _area_means(pixels, means)
    return means


@compiled_at_import("void(float64[:, ::1], int64, int64, float64[:, ::1])")
def _project(lines: Any, first: int, count: int, out: Any) -> None:
    """The low frequencies along `count` lines from `first` on: out[u, k] of lines[i, k]."""
    out[:] = 0.0
    cosines, columns = _COSINES[count], lines.shape[1]
    both = np.empty((2, columns))
    for i in range((count + 1) // 2):
        one, other = lines[first + i], lines[first + count - 1 - i]
        is_middle = 2 * i == count - 1
        for k in range(columns):  # why: a cosine has the same size at both places, and the sign of an even frequency
            both[0, k] = one[k] if is_middle else one[k] + other[k]
            both[1, k] = one[k] - other[k]
        for u in range(_LOW):
            weight, line, to = cosines[i, u], both[u % 2], out[u]
            for k in range(columns):
                to[k] += weight * line[k]


@compiled_at_import("uint64(float64[:, ::1])")
def _signs(block: Any) -> Any:
    """The signs of a block (9, 9), [vertical, horizontal] frequency, as 64 bits; row 8 replaces the constant."""
    bits = np.uint64(0)
    for v in range(8):
        for u in range(8):
            value = block[8, 0] if u == 0 and v == 0 else block[v, u]
            bits = (bits << np.uint64(1)) | np.uint64(value > 0.0)
    return bits


@compiled_at_import("UniTuple(int64, 4)(int64, int64)")
def central_part(width: int, height: int) -> Any:
    """What is to be cut off, as in `PARTS`, for the central square; at most `_MAX_CUT` at each side."""
    longer, shorter = max(width, height), min(width, height)
    cut = min(_MAX_CUT, (GRID * (longer - shorter) + longer) // (2 * longer))
    if width > height:
        return cut, cut, 0, 0
    return 0, 0, cut, cut


@compiled_at_import("void(Array(uint8, 3, 'C', readonly=True), uint64[::1])")
def _describe(pixels: Any, out: Any) -> None:
    means = np.empty((GRID, GRID), np.int64)
    _area_means(pixels, means)
    total, squares = np.int64(0), np.int64(0)
    for value in means.flat:
        total += value
        squares += value * value
    cells = GRID * GRID
    if squares * cells - total * total < (_FLAT * cells) ** 2:
        out[:] = 0
        return
    grid, turned = np.empty((GRID, GRID)), np.empty((GRID, GRID))
    for y in range(GRID):
        for x in range(GRID):
            grid[y, x] = turned[x, y] = means[y, x]
    wide, block = np.empty((_LOW, GRID)), np.empty((_LOW, _LOW))
    vertical, horizontal, both_ways = np.empty((GRID, _LOW)), np.empty((GRID, _LOW)), np.empty((GRID, _LOW))
    _project(grid, 0, GRID, wide)
    vertical[:] = wide.T  # of each column
    _project(turned, 0, GRID, wide)
    horizontal[:] = wide.T  # of each row
    top_before, bottom_before = np.int64(-1), np.int64(-1)
    for k in range(HASHES):
        if k < HASHES - 1:
            left, right, top, bottom = PARTS[k, 0], PARTS[k, 1], PARTS[k, 2], PARTS[k, 3]
        else:
            left, right, top, bottom = central_part(pixels.shape[1], pixels.shape[0])
        if top + bottom == 0:
            _project(vertical, left, GRID - left - right, block)
            out[k] = _signs(block.T.copy())
        elif left + right == 0:
            _project(horizontal, top, GRID - top - bottom, block)
            out[k] = _signs(block)
        else:
            if top != top_before or bottom != bottom_before:
                _project(grid, top, GRID - top - bottom, wide)
                both_ways[:] = wide.T
                top_before, bottom_before = top, bottom
            _project(both_ways, left, GRID - left - right, block)
            out[k] = _signs(block.T.copy())


def describe(pixels: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """(HASHES,) uint64: the hashes of `PARTS` and of the central square; all 0 if the luma hardly varies.

    pixels   (H, W, 3) uint8 RGB, C-contiguous
    """
    hashes = np.empty(HASHES, np.uint64)
    _describe(pixels, hashes)
    return hashes


def has_hashes(hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """(n,) whether each row of (n, HASHES) is that of a photo whose luma varies."""
    return np.asarray(hashes.any(axis=1))
