"""CPU kernel that resizes, flips and optionally normalises an image in one cache-friendly pass.

An antialiased bilinear resize (a triangle filter as wide as the scale, as in Pillow and torchvision) in float32,
rounded once at the end. Each source row is resized horizontally, two RGB pixels at a time, into a ring buffer of as
many rows as an output row needs; these are then summed vertically, 16 values at a time, rounded and normalised in
registers. The two sums are written as LLVM vector code without CPU-specific instructions; numba's own loops take three
times as long. Products are never fused with sums, so the output is bit-identical on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from resolute.pipeline.jit import compiled

__all__ = ["normalise_rows", "resample_weights", "resize"]

_I8, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
_LANES = 16
_SLACK = 16  # values that a row may be read or written beyond its end
# Adding and subtracting 1.5 * 2^23 rounds a float32 below 2^22 to the nearest integer, halves to even.
_ROUND = 12582912.0


def _vector(lanes: int) -> ir.VectorType:
    return ir.VectorType(_F32, lanes)


def _splat(b: ir.IRBuilder, value: Any, lanes: int) -> Any:
    first = b.insert_element(ir.Constant(_vector(lanes), ir.Undefined), value, ir.Constant(_I32, 0))
    return b.shuffle_vector(first, first, ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes))


def _sum(b: ir.IRBuilder, taps: int | Any, lanes: int, term: Callable[[Any], Any]) -> Any:
    """term(0) + ... + term(taps - 1): unrolled for an int `taps`, else a loop over a runtime value (at least 1)."""
    if isinstance(taps, int):
        total = term(ir.Constant(_I64, 0))
        for k in range(1, taps):
            total = b.fadd(total, term(ir.Constant(_I64, k)))
        return total
    before, tap, after = b.block, b.append_basic_block("tap"), b.append_basic_block("after")
    b.branch(tap)
    b.position_at_end(tap)
    k, total = b.phi(_I64), b.phi(_vector(lanes))
    more, following = b.fadd(total, term(k)), b.add(k, ir.Constant(_I64, 1))
    k.add_incoming(ir.Constant(_I64, 0), before)
    total.add_incoming(ir.Constant(_vector(lanes), [0.0] * lanes), before)
    k.add_incoming(following, tap)
    total.add_incoming(more, tap)
    b.cbranch(b.icmp_signed("<", following, taps), tap, after)
    b.position_at_end(after)
    return more


def _across(fixed: int | None) -> Any:
    """across(dst, d, src, s0, s1, weights, w, taps): compute two adjacent output pixels, `dst[d:d + 6]`.

    Each is the sum over k < taps of `src[s + 3 k:][:3]` times its weight; `weights[w:]` (taps, 2, 4) float32 contains
    each weight four times. Also overwrites `dst[d + 6]`. `fixed`: number of taps to unroll. No bounds checks.
    """
    eight = ir.VectorType(_I32, 8)

    @intrinsic
    def across(_: Any, dst: Any, d: Any, src: Any, s0: Any, s1: Any, weights: Any, w: Any, taps: Any) -> Any:
        def code(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
            out, source, factors = (context.make_array(sig.args[n])(context, b, args[n]).data for n in (0, 2, 5))

            def pixel(at: Any, k: Any) -> Any:
                place = b.gep(source, [b.add(at, b.mul(k, ir.Constant(_I64, 3)))])
                return b.load(b.bitcast(place, ir.VectorType(_I8, 4).as_pointer()), align=1)

            def term(k: Any) -> Any:
                both = b.shuffle_vector(pixel(args[3], k), pixel(args[4], k), ir.Constant(eight, list(range(8))))
                place = b.gep(factors, [b.add(args[6], b.mul(k, ir.Constant(_I64, 8)))])
                factor = b.load(b.bitcast(place, _vector(8).as_pointer()), align=4)
                return b.fmul(b.uitofp(b.zext(both, eight), _vector(8)), factor)

            total = _sum(b, fixed or args[7], 8, term)
            for n in (0, 1):
                four = ir.Constant(ir.VectorType(_I32, 4), list(range(4 * n, 4 * n + 4)))
                place = b.gep(out, [b.add(args[1], ir.Constant(_I64, 3 * n))])
                b.store(b.shuffle_vector(total, total, four), b.bitcast(place, _vector(4).as_pointer()), align=4)
            return context.get_dummy_value()

        size = types.intp
        return types.void(dst, size, src, size, size, weights, size, size), code

    return across


def _down(fixed: int | None) -> Any:
    """down(dst, d, ring, starts, i, weights, w, taps, scale, shift): compute `dst[d + i:][:16]` from the ring's rows.

    The rounded sum over k < taps of `ring[starts[k] + i:]` times `weights[w + k]`; for a float32 `dst`, times
    `scale[i:]` plus `shift[i:]`. `fixed`: number of taps to unroll. No bounds checks.
    """
    wide = _vector(_LANES)

    @intrinsic
    def down(
        _: Any, dst: Any, d: Any, ring: Any, starts: Any, i: Any, weights: Any, w: Any, taps: Any, scale: Any,
        shift: Any,
    ) -> Any:  # fmt: skip
        def code(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
            arrays = {n: context.make_array(sig.args[n])(context, b, args[n]).data for n in (0, 2, 3, 5, 8, 9)}

            def load(n: int, at: Any) -> Any:
                return b.load(b.bitcast(b.gep(arrays[n], [at]), wide.as_pointer()), align=4)

            def term(k: Any) -> Any:
                row = load(2, b.add(b.load(b.gep(arrays[3], [k])), args[4]))
                return b.fmul(row, _splat(b, b.load(b.gep(arrays[5], [b.add(args[6], k)])), _LANES))

            magic = ir.Constant(wide, [_ROUND] * _LANES)
            total = b.fsub(b.fadd(_sum(b, fixed or args[7], _LANES, term), magic), magic)
            place = b.gep(arrays[0], [b.add(args[1], args[4])])
            if dst.dtype == types.uint8:
                out = b.fptoui(total, ir.VectorType(_I8, _LANES))
                b.store(out, b.bitcast(place, out.type.as_pointer()), align=1)
            else:
                out = b.fadd(b.fmul(total, load(8, args[4])), load(9, args[4]))
                b.store(out, b.bitcast(place, wide.as_pointer()), align=4)
            return context.get_dummy_value()

        size = types.intp
        return types.void(dst, size, ring, starts, size, weights, size, size, scale, shift), code

    return down


# 2 taps: enlarging; 3 and 4: shrinking by up to 1.5, as for crops of prep's shards
_across_2, _across_3, _across_4, _across_n = _across(2), _across(3), _across(4), _across(None)
_down_2, _down_3, _down_4, _down_n = _down(2), _down(3), _down(4), _down(None)


@compiled
def resample_weights(length: int, out: int) -> Any:
    """First input (out,) int64 of each of `out` outputs of `length` inputs, and weights (out, taps) float32 with sum 1.

    Source: Pillow, Resample.c, bilinear filter.
    """
    scale = length / out
    reach = max(scale, 1.0)
    taps = 2
    for i in range(out):
        centre = (i + 0.5) * scale
        taps = max(taps, min(length, int(centre + reach + 0.5)) - max(0, int(centre - reach + 0.5)))
    starts = np.empty(out, np.int64)
    weights = np.empty((out, taps), np.float32)
    exact = np.empty(taps)
    for i in range(out):
        centre = (i + 0.5) * scale
        first, end = max(0, int(centre - reach + 0.5)), min(length, int(centre + reach + 0.5))
        starts[i] = max(0, min(first, length - taps))
        total = 0.0
        for k in range(taps):
            inside = first <= starts[i] + k < end
            exact[k] = max(0.0, 1.0 - abs(starts[i] + k + 0.5 - centre) / reach) if inside else 0.0
            total += exact[k]
        for k in range(taps):
            weights[i, k] = exact[k] / total
    return starts, weights


@compiled
def _row(row: Any, to: int, source: Any, at: int, starts: Any, weights: Any, taps: int) -> None:
    """Resize one row horizontally: `row[to:]` from `source[at:]`; `starts` has an even length."""
    for x in range(0, len(starts), 2):
        s0, s1, d, w = at + starts[x], at + starts[x + 1], to + 3 * x, 4 * taps * x
        if taps == 2:
            _across_2(row, d, source, s0, s1, weights, w, taps)
        elif taps == 3:
            _across_3(row, d, source, s0, s1, weights, w, taps)
        elif taps == 4:
            _across_4(row, d, source, s0, s1, weights, w, taps)
        else:
            _across_n(row, d, source, s0, s1, weights, w, taps)


@compiled
def _repeated(values: Any, width: int) -> Any:
    """(3,) -> (3 * width,) float32: each channel's value at its positions in a row."""
    out = np.empty(3 * width, np.float32)
    for x in range(width):
        out[3 * x], out[3 * x + 1], out[3 * x + 2] = values[0], values[1], values[2]
    return out


@compiled
def normalise_rows(image: Any, out: Any, scale: Any, shift: Any) -> None:
    """`out` (h, 3 w) float32 = `image` (h, 3 w) uint8 times `scale` plus `shift`, (3,) float32 each."""
    line = image.shape[1]
    scale, shift = _repeated(scale, line // 3), _repeated(shift, line // 3)
    for y in range(image.shape[0]):
        row, to = image[y], out[y]
        for i in range(line):
            to[i] = np.float32(row[i]) * scale[i] + shift[i]


@compiled
def resize(image: Any, hflip: bool, vflip: bool, out: Any, scale: Any, shift: Any) -> None:
    """Resize `image` (H, W, 3) uint8 into `out` (h, w, 3); `hflip` flips horizontally, `vflip` vertically.

    A uint8 `out` receives the rounded values; a float32 one these times `scale` plus `shift`, (3,) float32 each.
    """
    height, width = image.shape[0], image.shape[1]
    high, wide = out.shape[0], out.shape[1]
    tops, row_weights = resample_weights(height, high)
    lefts, pixel_weights = resample_weights(width, wide)
    down_taps, taps = row_weights.shape[1], pixel_weights.shape[1]
    starts = np.empty(wide + wide % 2, np.int64)
    spread = np.empty((len(starts) // 2, taps, 2, 4), np.float32)
    for x in range(len(starts)):
        column = min(x, wide - 1)
        column = wide - 1 - column if hflip else column
        starts[x] = 3 * lefts[column]
        for k in range(taps):
            spread[x // 2, k, x % 2, :] = pixel_weights[column, k]
    line, pitch = 3 * wide, 3 * wide + _SLACK
    ring = np.zeros(down_taps * pitch, np.float32)
    rows = np.empty(down_taps, np.int64)
    source, to = image.reshape(-1), out.reshape(-1)
    guarded = np.zeros(3 * width + 3 * taps + 4, np.uint8)
    across, down = spread.reshape(-1), row_weights.reshape(-1)
    scale, shift = _repeated(scale, wide), _repeated(shift, wide)
    ready = 0
    for y in range(high):
        while ready < min(tops[y] + down_taps, height):
            at, slot = 3 * width * ready, ready % down_taps * pitch
            if at + len(guarded) > len(source):  # why: 4-byte loads of the last pixels would read beyond the image
                guarded[: 3 * width] = source[at : at + 3 * width]
                _row(ring, slot, guarded, 0, starts, across, taps)
            else:
                _row(ring, slot, source, at, starts, across, taps)
            ready += 1
        for k in range(down_taps):
            rows[k] = (tops[y] + k) % down_taps * pitch
        d, w = (high - 1 - y if vflip else y) * line, y * down_taps
        for i in range(0, line - line % _LANES, _LANES):
            if down_taps == 2:
                _down_2(to, d, ring, rows, i, down, w, down_taps, scale, shift)
            elif down_taps == 3:
                _down_3(to, d, ring, rows, i, down, w, down_taps, scale, shift)
            elif down_taps == 4:
                _down_4(to, d, ring, rows, i, down, w, down_taps, scale, shift)
            else:
                _down_n(to, d, ring, rows, i, down, w, down_taps, scale, shift)
        for i in range(line - line % _LANES, line):
            total = np.float32(0)
            for k in range(down_taps):
                total += ring[rows[k] + i] * down[w + k]
            total = np.rint(total)
            to[d + i] = total if to.itemsize == 1 else total * scale[i] + shift[i]
