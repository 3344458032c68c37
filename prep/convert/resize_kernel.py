"""Fast downscaling with bit-identical results on every machine: a separable cubic filter in exact integers.

Rows are filtered first, eight at a time, then the columns of those eight. Both passes are the same sum, `dst[j] = sum_k
src[j + k * stride] * weights[k]` for neighbouring j, because the eight rows are interleaved in between (pixel 0 of all
eight rows, then pixel 1, ...). This hot loop is written as LLVM IR, without instructions of any particular processor,
so that its sums stay in registers. Loops compiled by numba alone are no faster than torch's uint8 bicubic; these take
two thirds of its time (benchmarks/results/LOG.md).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

__all__ = ["MIN_WIDTH_PX", "resample_weights", "shrink"]

# Keys' cubic, slightly sharper than with the usual -0.5. PSNR on photos at 146/183/256 px: at least 56.5 dB against
# -0.5 and 46.4 dB against Lanczos-3 (-0.5 itself: 45.1 dB), while Lanczos takes half as much time again.
# Source: Keys, Cubic convolution interpolation for digital image processing, IEEE TASSP 29 (1981), equation (15).
_A = -0.57
_ONE_BITS = 14  # fraction bits of a weight, of which the largest, 1.0, has to fit 16 bits
_FRACTION_BITS = 6  # of values between the passes: 255 plus 50 % overshoot fits 16 bits
_ROWS = 8
_PIXEL = 3 * _ROWS  # values per pixel column of eight interleaved rows
_ROW_LANES = 64
MIN_WIDTH_PX = -(-_ROW_LANES // 3)


def _dot(lanes: int, shift: int) -> Any:
    """Make dot(dst, d, src, s, stride, weights, w, taps): `dst[d:d + lanes]` = the rounded sums >> `shift`.

    Each sum is over k < taps of `src[s + k * stride:][:lanes] * weights[w + k]`, in 32 bits; a uint8 `dst` saturates.
    All arrays are 1-D and contiguous; `weights` is int16. Bounds are not checked.
    """
    i16, i32, i64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
    wide = ir.VectorType(i32, lanes)

    def const(value: int) -> ir.Constant:
        return ir.Constant(wide, [value] * lanes)

    @intrinsic
    def dot(_: Any, dst: Any, d: Any, src: Any, s: Any, stride: Any, weights: Any, w: Any, taps: Any) -> Any:
        def code(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
            def lanes_at(n: int, at: Any) -> Any:  # why: a vector in memory may start at any element
                data = context.make_array(sig.args[n])(context, b, args[n]).data
                place = b.gep(data, [at])
                return b.bitcast(place, ir.VectorType(place.type.pointee, lanes).as_pointer())

            before, tap, after = b.block, b.append_basic_block("tap"), b.append_basic_block("after")
            b.branch(tap)
            b.position_at_end(tap)
            k, at, total = b.phi(i64), b.phi(i64), b.phi(wide)
            pixels = b.load(lanes_at(2, at), align=1)
            widen = b.sext if src.dtype.signed else b.zext
            weight = b.load(b.gep(context.make_array(sig.args[5])(context, b, args[5]).data, [b.add(args[6], k)]))
            undefined = ir.Constant(ir.VectorType(i16, lanes), ir.Undefined)
            first_lane = b.insert_element(undefined, weight, ir.Constant(i32, 0))
            splat = b.shuffle_vector(first_lane, first_lane, ir.Constant(wide, [0] * lanes))
            more = b.add(total, b.mul(widen(pixels, wide), b.sext(splat, wide)))
            next_k, next_at = b.add(k, ir.Constant(i64, 1)), b.add(at, args[4])
            for phi, first, later in (
                (k, ir.Constant(i64, 0), next_k), (at, args[3], next_at), (total, const(1 << (shift - 1)), more)
            ):  # fmt: skip
                phi.add_incoming(first, before)
                phi.add_incoming(later, tap)
            b.cbranch(b.icmp_signed("<", next_k, args[7]), tap, after)
            b.position_at_end(after)
            out = b.ashr(more, const(shift))
            if not dst.dtype.signed:
                out = b.select(b.icmp_signed("<", out, const(0)), const(0), out)
                out = b.select(b.icmp_signed(">", out, const(255)), const(255), out)
            place = lanes_at(0, args[1])
            b.store(b.trunc(out, place.type.pointee), place, align=1)
            return context.get_dummy_value()

        size = types.intp
        return types.void(dst, size, src, size, size, weights, size, size), code

    return dot


def _compiled(signature: str) -> Any:
    """Compile at import (the fork server does it for all workers), or load the result of an earlier run."""

    def compile_(function: Any) -> Any:
        try:
            return njit(signature, error_model="numpy", cache=True)(function)
        except RuntimeError:  # why: no cache folder is writable; compiling takes 2 s per run
            return njit(signature, error_model="numpy")(function)

    return compile_


_dot_rows = _dot(_ROW_LANES, _ONE_BITS - _FRACTION_BITS)
# A pixel's 24 values as 16 + 8: with vectors of 24, no power of two, LLVM's loop is half as fast.
_dot_16, _dot_8 = _dot(16, _ONE_BITS + _FRACTION_BITS), _dot(8, _ONE_BITS + _FRACTION_BITS)


@_compiled("Tuple((int64[::1], int16[:, ::1]))(int64, int64)")
def resample_weights(length: int, shorter: int) -> Any:
    """First input index (shorter,) int64 and weights (shorter, taps) int16 of each output pixel; weights sum to 2**14.

    The filter is widened by the scale (antialiasing). Source: the filter support is Pillow's, Resample.c.
    """
    scale = length / shorter
    reach = 2.0 * max(scale, 1.0)
    taps = min(length, int(2.0 * reach) + 2)
    starts = np.empty(shorter, np.int64)
    weights = np.empty((shorter, taps), np.int16)
    exact = np.empty(taps)
    max_taps = 1
    for i in range(shorter):
        centre = (i + 0.5) * scale
        first, end = max(0, int(centre - reach + 0.5)), min(length, int(centre + reach + 0.5))
        max_taps = max(max_taps, end - first)
    for i in range(shorter):
        centre = (i + 0.5) * scale
        first, end = max(0, int(centre - reach + 0.5)), min(length, int(centre + reach + 0.5))
        starts[i] = min(first, length - max_taps)
        total = 0.0
        for k in range(max_taps):
            x = abs(starts[i] + k + 0.5 - centre) * 2.0 / reach
            exact[k] = 0.0
            if first <= starts[i] + k < end and x < 2.0:
                exact[k] = ((_A + 2) * x - (_A + 3)) * x * x + 1 if x < 1.0 else (((x - 5) * x + 8) * x - 4) * _A
            total += exact[k]
        running, assigned = 0.0, 0
        for k in range(max_taps):  # why: rounding the running sum makes the total exact
            running += exact[k] / total
            cumulative = int(np.floor(running * (1 << _ONE_BITS) + 0.5))
            weights[i, k] = cumulative - assigned
            assigned = cumulative
    return starts, np.ascontiguousarray(weights[:, :max_taps])


@_compiled(
    "void(Array(uint8, 2, 'C', readonly=True), int64[::1], int16[:, ::1], int64[::1], int16[:, ::1], uint8[:, ::1])"
)
def shrink(pixels: Any, tops: Any, row_weights: Any, lefts: Any, column_weights: Any, out: Any) -> None:
    """Fill `out` (h, 3 w) uint8 from `pixels` (H, 3 W) uint8; W is at least `MIN_WIDTH_PX`.

    `tops` and `row_weights` are `resample_weights(H, h)`, `lefts` and `column_weights` `resample_weights(W, w)`;
    columns of `pixels` that were only added as padding may be left out of the latter.
    """
    wide, narrow = pixels.shape[1], out.shape[1]
    source, down, across = pixels.reshape(-1), row_weights.reshape(-1), column_weights.reshape(-1)
    rows = np.zeros((_ROWS, wide), np.int16)
    flat = rows.reshape(-1)
    interleaved = np.empty(wide * _ROWS, np.int16)
    shrunk = np.empty(narrow * _ROWS, np.uint8)
    for top in range(0, len(out), _ROWS):
        count = min(_ROWS, len(out) - top)
        for r in range(count):
            y, taps = top + r, row_weights.shape[1]
            for x in range(0, wide, _ROW_LANES):
                x = min(x, wide - _ROW_LANES)  # why min: the last tile overlaps the previous one
                _dot_rows(flat, r * wide + x, source, tops[y] * wide + x, wide, down, y * taps, taps)
        for x in range(wide):  # why unrolled: LLVM turns these stores into a vector shuffle, but not a loop
            interleaved[8 * x] = rows[0, x]
            interleaved[8 * x + 1] = rows[1, x]
            interleaved[8 * x + 2] = rows[2, x]
            interleaved[8 * x + 3] = rows[3, x]
            interleaved[8 * x + 4] = rows[4, x]
            interleaved[8 * x + 5] = rows[5, x]
            interleaved[8 * x + 6] = rows[6, x]
            interleaved[8 * x + 7] = rows[7, x]
        for x in range(len(lefts)):
            to, at, taps = x * _PIXEL, lefts[x] * _PIXEL, column_weights.shape[1]
            _dot_16(shrunk, to, interleaved, at, _PIXEL, across, x * taps, taps)
            _dot_8(shrunk, to + 16, interleaved, at + 16, _PIXEL, across, x * taps, taps)
        for r in range(count):
            for x in range(narrow):
                out[top + r, x] = shrunk[x * _ROWS + r]
