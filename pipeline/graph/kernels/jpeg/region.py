"""Decodes a region of a JPEG to RGB on a CPU, with the pixels that libjpeg-turbo gives.

For baseline JPEGs of 8 bits in one scan without restart markers, that are 4:2:0 or 4:4:4 YCbCr, or grey. Everything
else is declined, and so is whatever is not as the standard has it: then the image is left to libjpeg-turbo, which
accepts or refuses it. Entropy-coded bytes before the region are read and checked, without storing coefficients; those
behind its last row of blocks are not looked at.

Memory is safe by construction: sizes are checked before anything is written, a block has a place for any number that a
coefficient can have, and after each MCU (minimum coded unit) it is checked that no more bytes were used than there are,
behind which lie `BITS_SLACK` more.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from resolute.pipeline.jit import compiled

from .colour import column_sums, rgb_of_420, rgb_of_444, rgb_of_grey
from .entropy import BAD, dc_difference, read_block, skip_block, unstuff
from .header import AC_TABLE, DC_TABLE, GREY, HEIGHT, SAMPLING, SCAN, WIDTH, YUV420, YUV444, read_header
from .idct import LARGEST, few_side_by_side, few_split, side_by_side, split
from .memory import (
    BITS,
    BLOCKS,
    HEADER,
    MAX_BYTES,
    MAX_PIXELS,
    PAIR_QUANT,
    PLANES,
    RGB,
    SUMS,
    i16_at,
    i64_at,
    put8,
    put16,
    put64,
    u8_at,
)
from .tables import PLACE

__all__ = ["decode_region"]

_MAX_DC = 1 << 15  # of a sum of differences
_FEW = 10  # coefficients in zigzag order that the smaller transform takes
_EDGE = 32  # bytes before each row of samples
_SPARE = 64  # bytes after it
# Blocks of a unit, 16 samples wide, by SAMPLING: their components, and their places in BLOCKS in int16s. A unit is an
# MCU of 4:2:0, else two MCUs; so each component has a pair of blocks, or two.
_COMPONENT = np.array([(0, 0, 0, 0, 1, 2), (0, 1, 2, 0, 1, 2), (0, 0, 0, 0, 0, 0)], np.uint8)
_FIRST = np.array([(0, 8, 128, 136, 256, 264), (0, 128, 256, 8, 136, 264), (0, 8, 0, 0, 0, 0)], np.uint16)
_BLOCKS_OF_UNIT = np.array([6, 6, 2], np.uint8)
# Further int64s in HEADER
_DC, _LENGTHS = 24, 28  # sums of the DC differences by component; numbers of coefficients by pair
# The region: first and last unit that is decoded, across and down, and of luma
_LEFT, _TOP, _RIGHT, _BOTTOM, _LUMA_LEFT, _LUMA_TOP, _LUMA_RIGHT, _LUMA_BOTTOM = 32, 33, 34, 35, 36, 37, 38, 39
_PLANE, _STRIDE = 40, 44  # addresses of the components' samples, and bytes from row to row


@compiled
def _flat(dc: Any) -> Any:
    """The samples of a block of which only the DC coefficient, times its quantisation, is not 0."""
    return min(max((dc + 4) >> 3, -128), 127) + 128


@compiled
def _fill(to: Any, stride: int, value: int) -> None:
    """Set 8 rows of 8 samples."""
    for _ in range(8):
        put64(to, 0, value * 0x0101010101010101)
        to += stride


@compiled
def _transform(decoder: Any, pair: int, kind: int, to: Any, other: Any, stride: int, length: int) -> Any:
    """Transform a pair of blocks, of which `length` coefficients are given, side by side or split (`other` not 0).

    Returns 0 unless the image is declined.
    """
    blocks, quants = decoder + BLOCKS + 256 * pair, decoder + PAIR_QUANT + 256 * kind
    if length <= 1:
        first, second = i16_at(blocks, 0) * i16_at(quants, 0), i16_at(blocks, 8) * i16_at(quants, 8)
        _fill(to, stride, _flat(first))
        _fill(other if other != 0 else to + 8, stride, _flat(second))
        return np.int64(max(abs(first), abs(second)) > LARGEST)
    if other == 0 and length <= _FEW:
        return few_side_by_side(blocks, quants, to, to, stride)
    if other == 0:
        return side_by_side(blocks, quants, to, to, stride)
    if length <= _FEW:
        return few_split(blocks, quants, to, other, stride)
    return split(blocks, quants, to, other, stride)


@compiled
def _transform_unit(decoder: Any, row: int, column: int) -> Any:
    """Transform the blocks of a unit into the planes; returns 0 unless the image is declined."""
    header, beyond = decoder + HEADER, np.int64(0)
    sampling, down, right = i64_at(header, SAMPLING), row - i64_at(header, _TOP), column - i64_at(header, _LEFT)
    for pair in range(3 if sampling != GREY else 1):
        length, kind, component, lower = i64_at(header, _LENGTHS + pair), pair, pair, np.int64(0)
        if sampling == YUV420:
            kind, component, lower = pair >> 1, pair >> 1, np.int64(8 * (pair & 1))
            if pair < 2 and not (
                i64_at(header, _LUMA_LEFT) <= column <= i64_at(header, _LUMA_RIGHT)
                and i64_at(header, _LUMA_TOP) <= row <= i64_at(header, _LUMA_BOTTOM)
            ):
                continue
        stride = i64_at(header, _STRIDE + component)
        if sampling == YUV420 and pair == 2:
            place = 8 * (down * stride + right)
            to, other = i64_at(header, _PLANE + 1) + place, i64_at(header, _PLANE + 2) + place
        else:
            rows = 16 if sampling == YUV420 else 8
            to, other = i64_at(header, _PLANE + component) + (rows * down + lower) * stride + 16 * right, np.int64(0)
        beyond |= _transform(decoder, pair, kind, to, other, stride, length)
    return beyond


@compiled
def _decode_blocks(jpeg: Any, nbytes: int, decoder: Any) -> Any:
    """Decode the units of the region into the planes; returns whether the image is not declined."""
    header, blocks = decoder + HEADER, decoder + BLOCKS
    start, places = decoder + BITS, PLACE.ctypes.data
    sampling = i64_at(header, SAMPLING)
    total = unstuff(jpeg + i64_at(header, SCAN), jpeg + nbytes, start)
    at, bits, count = start, np.uint64(0), np.int64(0)
    left, top, right, bottom = (
        i64_at(header, _LEFT),
        i64_at(header, _TOP),
        i64_at(header, _RIGHT),
        i64_at(header, _BOTTOM),
    )
    in_unit, width = np.int64(_BLOCKS_OF_UNIT[sampling]), i64_at(header, WIDTH)
    columns = (width + 15) >> 4
    in_last = in_unit
    if sampling != YUV420 and ((width + 7) >> 3) % 2 == 1:  # the last unit has one MCU
        in_last = in_unit >> 1
    for i in range(3):
        put64(header, _DC + i, 0)
    for row in range(bottom + 1):
        for column in range(right + 1 if row == bottom else columns):
            wanted = row >= top and left <= column <= right
            if wanted:
                for i in range(96):
                    put64(blocks, i, 0)
                for i in range(3):
                    put64(header, _LENGTHS + i, 0)
            worst = np.int64(0)
            for i in range(in_last if column == columns - 1 else in_unit):
                component = np.int64(_COMPONENT[sampling, i])
                at, bits, count, difference = dc_difference(
                    at, bits, count, decoder, i64_at(header, DC_TABLE + component)
                )
                dc = i64_at(header, _DC + component) + difference
                put64(header, _DC + component, dc)
                table = i64_at(header, AC_TABLE + component)
                worst |= np.int64(dc >= _MAX_DC or dc < -_MAX_DC) | np.int64(difference == BAD)
                if not wanted:
                    at, bits, count, k = skip_block(at, bits, count, decoder, table, places, blocks)
                else:
                    first = np.int64(_FIRST[sampling, i])
                    put16(blocks, first, dc)
                    at, bits, count, k = read_block(at, bits, count, decoder, table, places, blocks + 2 * first)
                    pair = first >> 7
                    length = k - 128 if k >= 128 else np.int64(64)
                    put64(header, _LENGTHS + pair, max(length, i64_at(header, _LENGTHS + pair)))
                worst |= np.int64(k >= BAD)
            if worst != 0 or 8 * (at - start) - count > 8 * total:
                return False
            if wanted and _transform_unit(decoder, row, column) != 0:
                return False
    return True


@compiled
def _window(first: int, size: int, whole: int) -> Any:
    """First and last 16 px that hold a range of pixels, and those with the chroma samples beside it."""
    last = first + size - 1
    low = max((first >> 1) - (first & 1 == 0), 0)
    high = min((last >> 1) + (last & 1), (whole + 1) // 2 - 1)
    return first >> 4, last >> 4, low >> 3, high >> 3


@compiled
def _place(x: int, y: int, w: int, h: int, decoder: Any) -> Any:
    """Choose what is decoded for a region, and where it goes; returns whether there is memory for it."""
    header = decoder + HEADER
    width, height, sampling = i64_at(header, WIDTH), i64_at(header, HEIGHT), i64_at(header, SAMPLING)
    if sampling == YUV420:
        luma_left, luma_right, left, right = _window(x, w, width)
        luma_top, luma_bottom, top, bottom = _window(y, h, height)
    else:
        left, right, top, bottom = x >> 4, (x + w - 1) >> 4, y >> 3, (y + h - 1) >> 3
        luma_left, luma_right, luma_top, luma_bottom = left, right, top, bottom
    put64(header, _LEFT, left)
    put64(header, _TOP, top)
    put64(header, _RIGHT, right)
    put64(header, _BOTTOM, bottom)
    put64(header, _LUMA_LEFT, luma_left)
    put64(header, _LUMA_TOP, luma_top)
    put64(header, _LUMA_RIGHT, luma_right)
    put64(header, _LUMA_BOTTOM, luma_bottom)
    across, down = right - left + 1, bottom - top + 1
    of_420 = np.int64(sampling == YUV420)
    at = decoder + PLANES + _EDGE
    for component in range(3):
        half = of_420 & np.int64(component > 0)
        stride = (((16 >> half) * across + _EDGE + _SPARE + 63) >> 6) << 6
        rows = (8 << (of_420 - half)) * down
        put64(header, _PLANE + component, at)
        put64(header, _STRIDE + component, stride)
        at += stride * rows + _SPARE
    return at <= decoder + PLANES + 3 * MAX_PIXELS and across <= MAX_PIXELS >> 9


@compiled
def _repeat_ends(decoder: Any) -> None:
    """Repeat the first and last real chroma sample of each row of the image, as the filter of 4:2:0 has it."""
    header = decoder + HEADER
    left, right = i64_at(header, _LEFT), i64_at(header, _RIGHT)
    past = (i64_at(header, WIDTH) + 1) // 2 - 8 * left
    stride = i64_at(header, _STRIDE + 1)
    for component in range(1, 3):
        row = i64_at(header, _PLANE + component)
        for _ in range(8 * (i64_at(header, _BOTTOM) - i64_at(header, _TOP) + 1)):
            if left == 0:
                put8(row, -1, u8_at(row, 0))
            if past <= 8 * (right - left + 1):
                put8(row, past, u8_at(row, past - 1))
            row += stride


@compiled
def _row_of_420(decoder: Any, x: int, w: int, y: int, to: Any) -> None:
    """Write the pixels from the even one at or before x on; up to 96 bytes more."""
    header = decoder + HEADER
    near, tall = y >> 1, (i64_at(header, HEIGHT) + 1) // 2
    far = min(max(near - 1 + 2 * (y & 1), 0), tall - 1)
    first = (x >> 1) - 8 * i64_at(header, _LEFT)
    count = ((x + w + 1) >> 1) - (x >> 1)
    top, stride = 8 * i64_at(header, _TOP), i64_at(header, _STRIDE + 1)
    half = ((count + 2 + 31) >> 5 << 6) + 64  # bytes of the sums of a component
    sums = decoder + SUMS
    for component in range(2):
        plane = i64_at(header, _PLANE + 1 + component) + first - 1
        one, other = plane + (near - top) * stride, plane + (far - top) * stride
        for k in range(0, count + 2, 32):
            column_sums(sums + half * component + 2 * k, one + k, other + k)
    luma = i64_at(header, _PLANE) + (y - 2 * top) * i64_at(header, _STRIDE) + 2 * first
    for k in range(0, count, 16):
        rgb_of_420(to + 6 * k, luma + 2 * k, sums + 2 + 2 * k, sums + half + 2 + 2 * k)


@compiled
def _row(decoder: Any, x: int, w: int, y: int, to: Any) -> None:
    """Write the pixels from x on of an image that is not 4:2:0; up to 96 bytes more."""
    header = decoder + HEADER
    place = (y - 8 * i64_at(header, _TOP)) * i64_at(header, _STRIDE) + x - 16 * i64_at(header, _LEFT)
    luma, blue, red = (
        i64_at(header, _PLANE) + place,
        i64_at(header, _PLANE + 1) + place,
        i64_at(header, _PLANE + 2) + place,
    )
    if i64_at(header, SAMPLING) == YUV444:
        for k in range(0, w, 32):
            rgb_of_444(to + 3 * k, luma + k, blue + k, red + k)
    else:
        for k in range(0, w, 32):
            rgb_of_grey(to + 3 * k, luma + k)


@compiled
def decode_region(jpeg: Any, nbytes: int, x: int, y: int, w: int, h: int, decoder: Any) -> Any:
    """Decode the pixels of the corner x, y and size w, h (px) of the `nbytes` at the address `jpeg`.

    Returns (first, pitch): byte i of pixel row k is at the address first + pitch * k + i, in the memory of `decoder`.
    96 bytes behind the last row may be read too. `first` is 0 if the image is declined.
    """
    declined = np.int64(0), np.int64(0)
    if nbytes > MAX_BYTES or not read_header(jpeg, nbytes, decoder):
        return declined
    header = decoder + HEADER
    width, height = i64_at(header, WIDTH), i64_at(header, HEIGHT)
    if x < 0 or y < 0 or w < 1 or h < 1 or x + w > width or y + h > height:
        return declined
    # why: libjpeg repeats the chroma of what is that narrow, counted from the left side of an MCU; DALI has it decode a
    # pixel more on both sides
    begin, end = x - np.int64(x > 0), x + w + np.int64(x + w < width)
    if i64_at(header, SAMPLING) == YUV420 and end - (begin & ~15) <= 4:
        return declined
    pitch = 3 * (w + 1) + 96
    if pitch * h > 3 * MAX_PIXELS or not _place(x, y, w, h, decoder) or not _decode_blocks(jpeg, nbytes, decoder):
        return declined
    rgb = decoder + RGB
    if i64_at(header, SAMPLING) == YUV420:
        _repeat_ends(decoder)
        for row in range(h):
            _row_of_420(decoder, x, w, y + row, rgb + pitch * row)
        return rgb + 3 * (x & 1), np.int64(pitch)
    for row in range(h):
        _row(decoder, x, w, y + row, rgb + pitch * row)
    return rgb, np.int64(pitch)
