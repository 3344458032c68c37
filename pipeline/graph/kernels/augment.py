"""CPU kernels of the augmentation operations; `apply_ops` runs all operations of a sample.

Where Pillow is the reference, the 8-bit arithmetic equals Pillow's. `triton_slot.py` implements the same steps on a
GPU, so both must be changed together.

Images are (height, width, 3) uint8 in C order. Kinds and values are defined in `pipeline.plan.autoaugment`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from resolute.pipeline.jit import compiled
from resolute.pipeline.plan import autoaugment as p

__all__ = ["apply_ops", "blend"]


@compiled
def _clipped(value: Any) -> Any:
    """Clip to 0..255 and truncate, as Pillow's blend does."""
    return np.uint8(np.int32(min(np.float32(255), max(np.float32(0), value))))  # why via int32: lets LLVM vectorise


@compiled
def _grey(r: Any, g: Any, b: Any) -> Any:
    """Source: Pillow Convert.c, L from RGB (ITU-R 601-2), rounded."""
    return (r * 19595 + g * 38470 + b * 7471 + 0x8000) >> 16


@compiled
def _map(image: Any, table: Any) -> None:
    """Replace every value in place by the entry of its channel in `table` (3, 256)."""
    for y in range(image.shape[0]):
        for x in range(image.shape[1]):
            for c in range(3):
                image[y, x, c] = table[c, image[y, x, c]]


@compiled
def _stretched(image: Any, table: Any) -> None:
    """Fill `table` (3, 256) so that it stretches each channel to 0..255. Source: Pillow ImageOps.autocontrast."""
    for c in range(3):
        low, high = 255, 0
        for y in range(image.shape[0]):
            for x in range(image.shape[1]):
                low, high = min(low, image[y, x, c]), max(high, image[y, x, c])
        scale = 255.0 / (high - low) if high > low else 1.0
        offset = -low * scale if high > low else 0.0
        for i in range(256):
            table[c, i] = np.uint8(min(255.0, max(0.0, i * scale + offset)))


@compiled
def _equalized(image: Any, table: Any) -> None:
    """Fill `table` (3, 256) so that it flattens each channel's histogram. Source: Pillow ImageOps.equalize."""
    counts = np.zeros((3, 256), np.int64)
    for y in range(image.shape[0]):
        for x in range(image.shape[1]):
            for c in range(3):
                counts[c, image[y, x, c]] += 1
    for c in range(3):
        last = 255
        while last > 0 and counts[c, last] == 0:
            last -= 1
        step = (image.shape[0] * image.shape[1] - counts[c, last]) // 255
        n = step // 2
        for i in range(256):
            table[c, i] = min(255, n // step) if step else i
            n += counts[c, i]


@compiled
def _mean_grey(image: Any) -> Any:
    total = 0
    for y in range(image.shape[0]):
        for x in range(image.shape[1]):
            total += _grey(image[y, x, 0], image[y, x, 1], image[y, x, 2])
    return np.float32(int(total / (image.shape[0] * image.shape[1]) + 0.5))


@compiled
def _saturate(image: Any, factor: Any) -> None:
    for y in range(image.shape[0]):
        for x in range(image.shape[1]):
            grey = np.float32(_grey(image[y, x, 0], image[y, x, 1], image[y, x, 2]))
            for c in range(3):
                image[y, x, c] = _clipped(grey + factor * (np.float32(image[y, x, c]) - grey))


@compiled
def _sharpen(image: Any, before: Any, factor: Any) -> None:
    """Source: Pillow ImageEnhance.Sharpness, extrapolation from ImageFilter.SMOOTH; the border is unchanged."""
    line = 3 * image.shape[1]
    n = line - 6
    out, source = image.reshape(-1), before.reshape(-1)
    for y in range(1, image.shape[0] - 1):
        above, here, below = source[(y - 1) * line :], source[y * line :], source[(y + 1) * line :]
        # why slices: an index that may be negative keeps LLVM from vectorising
        a, b, c = above[:n], above[3 : 3 + n], above[6 : 6 + n]
        d, middle, e = here[:n], here[3 : 3 + n], here[6 : 6 + n]
        f, g, h = below[:n], below[3 : 3 + n], below[6 : 6 + n]
        to = out[y * line + 3 : y * line + 3 + n]
        for k in range(n):
            total = np.int32(a[k]) + np.int32(b[k]) + np.int32(c[k]) + np.int32(d[k]) + np.int32(e[k])
            total += np.int32(f[k]) + np.int32(g[k]) + np.int32(h[k]) + np.int32(5) * np.int32(middle[k])
            # (2 total + 13) // 26, i.e. total / 13 rounded, without a division; exact up to 13 * 255
            smooth = np.float32(((np.int32(2) * total + np.int32(13)) * np.int32(10083)) >> np.int32(18))
            to[k] = _clipped(smooth + factor * (np.float32(middle[k]) - smooth))


@compiled
def _warp(image: Any, before: Any, m: Any) -> None:
    """Bilinear affine warp, black outside. Source: Pillow Geometry.c, but rounded instead of truncated."""
    height, width = image.shape[:2]
    for y in range(height):
        for x in range(width):
            u = m[0] * (x + 0.5) + m[1] * (y + 0.5) + m[2]
            v = m[3] * (x + 0.5) + m[4] * (y + 0.5) + m[5]
            if u < 0 or u >= width or v < 0 or v >= height:
                image[y, x, 0] = image[y, x, 1] = image[y, x, 2] = 0
                continue
            # in 1/2048 px: u - 0.5 (relative to pixel centres) + 1 (so never negative)
            column, row = int(u * 2048 + 1024), int(v * 2048 + 1024)
            du, dv = np.int32(column & 2047), np.int32(row & 2047)
            x0, x1 = max((column >> 11) - 1, 0), min(column >> 11, width - 1)
            y0, y1 = max((row >> 11) - 1, 0), min(row >> 11, height - 1)
            for c in range(3):
                upper = np.int32(before[y0, x0, c]) * (2048 - du) + np.int32(before[y0, x1, c]) * du
                lower = np.int32(before[y1, x0, c]) * (2048 - du) + np.int32(before[y1, x1, c]) * du
                image[y, x, c] = np.uint8((upper * (2048 - dv) + lower * dv + (1 << 21)) >> 22)


@compiled
def _mirrored(i: Any, n: Any) -> Any:
    """Reflect any index `i` into [0, n) without repeating the border."""
    while n > 1 and (i < 0 or i >= n):
        i = -i if i < 0 else 2 * (n - 1) - i
    return i if n > 1 else 0


@compiled
def _blur(image: Any, sigma: Any) -> None:
    """Gaussian blur with 2 ceil(3 sigma) + 1 taps, reflected at the border, as DALI's gaussian_blur."""
    reach = math.ceil(3 * sigma)
    weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
    weights = (weights / weights.sum()).astype(np.float32)
    height, width = image.shape[:2]
    line = 3 * width
    pixels, rows = image.reshape(height, line), np.zeros((height, line), np.float32)
    for y in range(height):
        to = rows[y]
        for k in range(2 * reach + 1):
            source, weight = pixels[_mirrored(y + k - reach, height)], weights[k]
            for i in range(line):
                to[i] += weight * np.float32(source[i])
    wide, total = np.empty(line + 6 * reach, np.float32), np.empty(line, np.float32)
    for y in range(height):
        for x in range(-reach, width + reach):
            first = 3 * _mirrored(x, width)
            for c in range(3):
                wide[3 * (x + reach) + c] = rows[y, first + c]
        total[:] = 0.5
        for k in range(2 * reach + 1):
            weight, shifted = weights[k], wide[3 * k : 3 * k + line]
            for i in range(line):
                total[i] += weight * shifted[i]
        for i in range(line):
            pixels[y, i] = np.uint8(np.int32(min(np.float32(255), total[i])))


@compiled
def _turn_hue(image: Any, sixths: Any) -> None:
    """Rotate the hue by `sixths` of the colour circle at constant saturation and value.

    Source: Smith, "Color gamut transform pairs", SIGGRAPH 1978 (HSV), in the branch-free form: a channel is
    max - chroma * clip(min(k, 4 - k), 0, 1), k = (n + hue) mod 6, n = 5, 3, 1 for red, green, blue.
    """
    width, zero, one, four, six = image.shape[1], np.float32(0), np.float32(1), np.float32(4), np.float32(6)
    red, green, blue = np.empty(width, np.float32), np.empty(width, np.float32), np.empty(width, np.float32)
    tops, chromas, hues = np.empty(width, np.float32), np.empty(width, np.float32), np.empty(width, np.float32)
    for y in range(image.shape[0]):
        row = image[y].reshape(-1)
        for x in range(width):  # why separate branch-free loops: LLVM vectorises them
            red[x], green[x], blue[x] = row[3 * x], row[3 * x + 1], row[3 * x + 2]
        for x in range(width):
            r, g, b = red[x], green[x], blue[x]
            top, low = r if r > g else g, r if r < g else g
            top, low = top if top > b else b, low if low < b else b
            chroma = top - low
            from_r = one if top == r else zero
            from_g = one - from_r if top == g else zero
            from_b = one - from_r - from_g
            turn = from_r * (g - b) + from_g * (b - r) + from_b * (r - g)
            turn /= chroma if chroma > one else one
            hues[x] = turn + np.float32(2) * from_g + four * from_b + sixths
            tops[x], chromas[x] = top + np.float32(0.5), chroma
        for c in range(3):
            out = red if c == 0 else (green if c == 1 else blue)
            n = np.float32(5 - 2 * c)
            for x in range(width):
                k = hues[x] + n  # -3 to 13; the next three lines are k modulo 6
                k = k + six if k < zero else k
                k = k - six if k >= six else k
                k = k - six if k >= six else k
                part = four - k if four - k < k else k
                part = part if part < one else one
                out[x] = tops[x] - chromas[x] * (part if part > zero else zero)
        for x in range(width):
            row[3 * x], row[3 * x + 1] = np.uint8(np.int32(red[x])), np.uint8(np.int32(green[x]))
            row[3 * x + 2] = np.uint8(np.int32(blue[x]))


@compiled
def apply_ops(image: Any, kinds: Any, values: Any) -> None:
    """Apply operations `kinds` (slots,) int32 with `values` (slots, 6) float32 to `image`, in order and in place."""
    table = np.empty((3, 256), np.uint8)
    for slot in range(len(kinds)):
        kind, factor = kinds[slot], values[slot, 0]
        if kind == p.AFFINE:
            _warp(image, image.copy(), values[slot])
        elif kind == p.SHARPNESS:
            _sharpen(image, image.copy(), factor)
        elif kind == p.SATURATION:
            _saturate(image, factor)
        elif kind == p.HUE:
            _turn_hue(image, factor)
        elif kind == p.BLUR:
            _blur(image, factor)
        elif kind in (p.BRIGHTNESS, p.CONTRAST, p.POINT, p.AUTOCONTRAST, p.EQUALIZE):
            if kind == p.AUTOCONTRAST:
                _stretched(image, table)
            elif kind == p.EQUALIZE:
                _equalized(image, table)
            else:
                mask = int(values[slot, 1])
                mean = _mean_grey(image) if kind == p.CONTRAST else np.float32(0)
                for i in range(256):
                    value = np.float32(i)
                    if kind == p.POINT:
                        table[:, i] = (255 - i if value >= factor else i) & mask
                    else:
                        table[:, i] = _clipped(mean + factor * (value - mean))
            _map(image, table)


@compiled
def blend(image: Any, partner: Any, lam: Any, out: Any) -> None:
    """Mixup of (count,) uint8 arrays into `out`: lam * image + (1 - lam) * partner, rounded."""
    for i in range(len(image)):
        both = np.float32(image[i]) * lam + np.float32(partner[i]) * (np.float32(1) - lam)
        out[i] = np.uint8(np.int32(both + np.float32(0.5)))
