"""Triton kernel of one slot: applies to each image of a batch the operation selected by that image's parameters.

A program may read the complete image (for histograms and neighbours) but writes only its own part, into another
buffer, so programs never wait for each other. The operations follow `kernels.augment.apply_ops` step by step;
coordinates and the tables of 256 levels are computed in float64 there and here.
"""

from __future__ import annotations

import triton
import triton.language as tl

from resolute.pipeline.plan import autoaugment as p
from resolute.pipeline.plan import rows as at

__all__ = ["BLOCK", "apply_slot"]

# Pixels that a program of 4 warps processes at a time: 4 per thread. why not 1024: they take 168 registers per thread,
# so that a multiprocessor runs 12 warps; with 512 it is 96 and 20 warps.
BLOCK = 512

_AFFINE = tl.constexpr(p.AFFINE)
_BRIGHTNESS = tl.constexpr(p.BRIGHTNESS)
_SATURATION = tl.constexpr(p.SATURATION)
_CONTRAST = tl.constexpr(p.CONTRAST)
_SHARPNESS = tl.constexpr(p.SHARPNESS)
_POINT = tl.constexpr(p.POINT)
_AUTOCONTRAST = tl.constexpr(p.AUTOCONTRAST)
_EQUALIZE = tl.constexpr(p.EQUALIZE)
_BLUR = tl.constexpr(p.BLUR)
_HUE = tl.constexpr(p.HUE)
_VALUES = tl.constexpr(p.VALUES)
_KINDS = tl.constexpr(at.KINDS)


@triton.jit
def _read(image, place, inside):
    """Red, green and blue (int32) of pixels; 0 where not `inside`."""
    at = image + 3 * place
    red = tl.load(at, mask=inside, other=0).to(tl.int32)
    green = tl.load(at + 1, mask=inside, other=0).to(tl.int32)
    blue = tl.load(at + 2, mask=inside, other=0).to(tl.int32)
    return red, green, blue


@triton.jit
def _write(image, place, red, green, blue, inside):
    at = image + 3 * place
    tl.store(at, red.to(tl.uint8), mask=inside)
    tl.store(at + 1, green.to(tl.uint8), mask=inside)
    tl.store(at + 2, blue.to(tl.uint8), mask=inside)


@triton.jit
def _clipped(value):
    """Clip to 0..255 and truncate, as Pillow's blend does."""
    return tl.minimum(tl.maximum(value, 0.0), 255.0).to(tl.int32)


@triton.jit
def _grey(red, green, blue):
    """Source: Pillow Convert.c, L from RGB (ITU-R 601-2), rounded."""
    return (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16


@triton.jit
def _mean_grey(image, pixels, BLOCK: tl.constexpr):
    """Rounded mean grey level of an image, float32."""
    total = tl.full((), 0, tl.int64)  # why: from 2903 px on, the sum exceeds an int32
    for start in range(0, pixels, BLOCK):
        place = start + tl.arange(0, BLOCK)
        red, green, blue = _read(image, place, place < pixels)
        total += tl.sum(tl.where(place < pixels, _grey(red, green, blue), 0), axis=0)
    return tl.floor(total.to(tl.float64) / pixels + 0.5).to(tl.float32)


@triton.jit
def _stretched(image, pixels, channel, BLOCK: tl.constexpr):
    """(256,) int32 table that stretches a channel to 0..255. Source: Pillow ImageOps.autocontrast."""
    low = tl.sum(tl.zeros((BLOCK,), tl.int32), axis=0) + 255
    high = low - 255
    for start in range(0, pixels, BLOCK):
        place = start + tl.arange(0, BLOCK)
        value = tl.load(image + 3 * place + channel, mask=place < pixels, other=0).to(tl.int32)
        low = tl.minimum(low, tl.min(tl.where(place < pixels, value, 255), axis=0))
        high = tl.maximum(high, tl.max(value, axis=0))
    span = tl.maximum(high - low, 1).to(tl.float64)
    scale = tl.full((256,), 255.0, tl.float64) / span
    level = tl.arange(0, 256)
    value = level.to(tl.float64) * scale + (-low).to(tl.float64) * scale
    value = tl.minimum(tl.maximum(value, 0.0), 255.0).to(tl.int32)
    return tl.where(high > low, value, level)


@triton.jit
def _equalized(image, pixels, channel, BLOCK: tl.constexpr):
    """(256,) int32 table that flattens a channel's histogram. Source: Pillow ImageOps.equalize."""
    counts = tl.zeros((256,), tl.int32)
    for start in range(0, pixels, BLOCK):
        place = start + tl.arange(0, BLOCK)
        value = tl.load(image + 3 * place + channel, mask=place < pixels, other=0).to(tl.int32)
        counts += tl.histogram(value, 256, mask=place < pixels)
    level = tl.arange(0, 256)
    last = tl.max(tl.where(counts > 0, level, 0), axis=0)
    step = (pixels - tl.sum(tl.where(level == last, counts, 0), axis=0)) // 255
    before = step // 2 + tl.cumsum(counts, axis=0) - counts
    return tl.where(step > 0, tl.minimum(255, before // tl.maximum(step, 1)), level)


@triton.jit
def _mirrored(index, size):
    """Reflect any index into [0, size) without repeating the border."""
    period = tl.maximum(2 * (size - 1), 1)
    index = (index % period + period) % period
    return tl.where(index < size, index, period - index)


@triton.jit
def _weight(distance, sigma):
    scaled = distance / sigma
    return tl.exp(-0.5 * scaled * scaled)


@triton.jit
def _bilinear(a, b, c, d, du, dv):
    """Bilinear interpolation of four levels, rounded; `du`, `dv` in 1/2048."""
    upper = a * (2048 - du) + b * du
    lower = c * (2048 - du) + d * du
    return (upper * (2048 - dv) + lower * dv + (1 << 21)) >> 22


@triton.jit
def _sharpened(image, line, place, inner, channel, factor):
    """Source: Pillow ImageEnhance.Sharpness, extrapolation from ImageFilter.SMOOTH."""
    at = image + 3 * place + channel
    middle = tl.load(at, mask=inner, other=0).to(tl.int32)
    total = 5 * middle
    for y in tl.static_range(-1, 2):
        for x in tl.static_range(-1, 2):
            if y != 0 or x != 0:
                total += tl.load(at + y * line + 3 * x, mask=inner, other=0).to(tl.int32)
    smooth = (((2 * total + 13) * 10083) >> 18).to(tl.float32)  # total / 13 rounded; exact up to 13 * 255
    return _clipped(smooth + factor * (middle.to(tl.float32) - smooth))


@triton.jit
def _turned(hue, top, chroma, n):
    k = hue + n  # -3 to 13; the next three lines are k modulo 6
    k = tl.where(k < 0.0, k + 6.0, k)
    k = tl.where(k >= 6.0, k - 6.0, k)
    k = tl.where(k >= 6.0, k - 6.0, k)
    part = tl.maximum(tl.minimum(tl.minimum(4.0 - k, k), 1.0), 0.0)
    return (top + 0.5 - chroma * part).to(tl.int32)


# why not specialised: a new size or alignment would trigger a compilation in the middle of a run. why `packed` and not
# `params`: Triton 3.8 generates code around the arguments' names, in which `params` and `options` are its own
@triton.jit(
    do_not_specialize=["slot", "slots", "words", "side", "part", "parts"],
    do_not_specialize_on_alignment=["source", "target", "packed"],
)
def apply_slot(
    source,
    target,
    packed,
    slot,
    slots,
    words,
    side,
    part,
    parts,
    BLOCK: tl.constexpr,
):
    """Apply operation `slot` to every image; program i * parts + k writes pixels k * part to (k + 1) * part of image i.

    The programs of an image are neighbours in a one-dimensional grid, so they run together and share the cached image;
    a second dimension is limited to 65 535 programs.

    source, target   (N, side, side, 3) uint8, different buffers
    packed           (N, words) int32, the rows of the batch (see `plan/rows.py`), with `slots` slots
    """
    number = (tl.program_id(0) // parts).to(tl.int64)
    pixels = side * side
    image, out = source + number * (3 * pixels), target + number * (3 * pixels)
    row = packed + number * words + _KINDS
    kind = tl.load(row + slot)
    values = row + slots + slot * _VALUES
    factor = tl.load(values).to(tl.float32, bitcast=True)
    first = tl.program_id(0) % parts * part
    last = tl.minimum(first + part, pixels)
    by_table = (kind == _BRIGHTNESS) | (kind == _CONTRAST) | (kind == _POINT)
    by_table = by_table | (kind == _AUTOCONTRAST) | (kind == _EQUALIZE)
    if by_table:
        level = tl.arange(0, 256)
        reds, greens, blues = level, level, level
        if kind == _EQUALIZE:
            reds = _equalized(image, pixels, 0, BLOCK)
            greens = _equalized(image, pixels, 1, BLOCK)
            blues = _equalized(image, pixels, 2, BLOCK)
        elif kind == _AUTOCONTRAST:
            reds = _stretched(image, pixels, 0, BLOCK)
            greens = _stretched(image, pixels, 1, BLOCK)
            blues = _stretched(image, pixels, 2, BLOCK)
        elif kind == _POINT:
            mask = tl.load(values + 1).to(tl.float32, bitcast=True).to(tl.int32)
            reds = tl.where(level.to(tl.float32) >= factor, 255 - level, level) & mask
            greens, blues = reds, reds
        else:
            mean = factor * 0.0
            if kind == _CONTRAST:
                mean = _mean_grey(image, pixels, BLOCK)
            reds = _clipped(mean + factor * (level.to(tl.float32) - mean))
            greens, blues = reds, reds
        for start in range(first, last, BLOCK):
            place = start + tl.arange(0, BLOCK)
            inside = place < last
            red, green, blue = _read(image, place, inside)
            red, green, blue = tl.gather(reds, red, 0), tl.gather(greens, green, 0), tl.gather(blues, blue, 0)
            _write(out, place, red, green, blue, inside)
    elif kind == _AFFINE:
        a, b = tl.load(values).to(tl.float32, bitcast=True), tl.load(values + 1).to(tl.float32, bitcast=True)
        c, d = tl.load(values + 2).to(tl.float32, bitcast=True), tl.load(values + 3).to(tl.float32, bitcast=True)
        e, f = tl.load(values + 4).to(tl.float32, bitcast=True), tl.load(values + 5).to(tl.float32, bitcast=True)
        for start in range(first, last, BLOCK):
            place = start + tl.arange(0, BLOCK)
            inside = place < last
            x, y = (place % side).to(tl.float64) + 0.5, (place // side).to(tl.float64) + 0.5
            u = a.to(tl.float64) * x + b.to(tl.float64) * y + c.to(tl.float64)
            v = d.to(tl.float64) * x + e.to(tl.float64) * y + f.to(tl.float64)
            seen = inside & (u >= 0) & (u < side) & (v >= 0) & (v < side)
            u, v = tl.where(seen, u, 0.0), tl.where(seen, v, 0.0)
            # in 1/2048 px: u - 0.5 (relative to pixel centres) + 1 (so never negative)
            column, line = (u * 2048.0 + 1024.0).to(tl.int32), (v * 2048.0 + 1024.0).to(tl.int32)
            du, dv = column & 2047, line & 2047
            x0, x1 = tl.maximum((column >> 11) - 1, 0), tl.minimum(column >> 11, side - 1)
            y0, y1 = tl.maximum((line >> 11) - 1, 0), tl.minimum(line >> 11, side - 1)
            red0, green0, blue0 = _read(image, y0 * side + x0, seen)
            red1, green1, blue1 = _read(image, y0 * side + x1, seen)
            red2, green2, blue2 = _read(image, y1 * side + x0, seen)
            red3, green3, blue3 = _read(image, y1 * side + x1, seen)
            red = _bilinear(red0, red1, red2, red3, du, dv)
            green = _bilinear(green0, green1, green2, green3, du, dv)
            blue = _bilinear(blue0, blue1, blue2, blue3, du, dv)
            _write(out, place, red, green, blue, inside)
    elif kind == _BLUR:
        reach = tl.ceil(factor.to(tl.float64) * 3.0).to(tl.int32)
        total = factor * 0.0
        for distance in range(-reach, reach + 1):
            total += _weight(distance, factor)
        for start in range(first, last, BLOCK):
            place = start + tl.arange(0, BLOCK)
            inside = place < last
            x, y = place % side, place // side
            red, green, blue = (
                tl.full((BLOCK,), 0.5, tl.float32),
                tl.full((BLOCK,), 0.5, tl.float32),
                tl.full((BLOCK,), 0.5, tl.float32),
            )
            for dx in range(-reach, reach + 1):
                weight = _weight(dx, factor) / total
                column = _mirrored(x + dx, side)
                reds, greens, blues = (
                    tl.zeros((BLOCK,), tl.float32),
                    tl.zeros((BLOCK,), tl.float32),
                    tl.zeros((BLOCK,), tl.float32),
                )
                for dy in range(-reach, reach + 1):
                    share = _weight(dy, factor) / total
                    r, g, b = _read(image, _mirrored(y + dy, side) * side + column, inside)
                    reds += share * r.to(tl.float32)
                    greens += share * g.to(tl.float32)
                    blues += share * b.to(tl.float32)
                red += weight * reds
                green += weight * greens
                blue += weight * blues
            _write(out, place, _clipped(red), _clipped(green), _clipped(blue), inside)
    else:
        for start in range(first, last, BLOCK):
            place = start + tl.arange(0, BLOCK)
            inside = place < last
            red, green, blue = _read(image, place, inside)
            if kind == _SATURATION:
                grey = _grey(red, green, blue).to(tl.float32)
                red = _clipped(grey + factor * (red.to(tl.float32) - grey))
                green = _clipped(grey + factor * (green.to(tl.float32) - grey))
                blue = _clipped(grey + factor * (blue.to(tl.float32) - grey))
            elif kind == _SHARPNESS:
                x, y = place % side, place // side
                inner = inside & (x > 0) & (x < side - 1) & (y > 0) & (y < side - 1)
                red = tl.where(inner, _sharpened(image, 3 * side, place, inner, 0, factor), red)
                green = tl.where(inner, _sharpened(image, 3 * side, place, inner, 1, factor), green)
                blue = tl.where(inner, _sharpened(image, 3 * side, place, inner, 2, factor), blue)
            elif kind == _HUE:
                r, g, b = red.to(tl.float32), green.to(tl.float32), blue.to(tl.float32)
                top = tl.maximum(tl.maximum(r, g), b)
                chroma = top - tl.minimum(tl.minimum(r, g), b)
                from_r = tl.where(top == r, 1.0, 0.0)
                from_g = tl.where(top == g, 1.0 - from_r, 0.0)
                from_b = 1.0 - from_r - from_g
                turn = from_r * (g - b) + from_g * (b - r) + from_b * (r - g)
                hue = tl.div_rn(turn, tl.maximum(chroma, 1.0)) + 2.0 * from_g + 4.0 * from_b + factor
                red = _turned(hue, top, chroma, 5.0)
                green = _turned(hue, top, chroma, 3.0)
                blue = _turned(hue, top, chroma, 1.0)
            _write(out, place, red, green, blue, inside)
