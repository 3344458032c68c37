"""Fast downscaling with bit-identical results on every machine: a separable cubic filter in exact integers.

Rows are filtered first, eight at a time, then the columns of those eight. Both passes are the same sum over taps,
`sum_k src[j + k * stride] * weights[k]` for neighbouring j. Processors have an instruction that multiplies pairs of
16-bit numbers and adds both products, so values and weights are stored as pairs:

- `pair_rows` puts each two rows of an image together, two bytes in one uint16, even pixels apart from odd pixels;
- the sums over rows, for an even and for the next odd pixel, are put together as a pair again, in one int32;
- eight such rows are interleaved (pair 0 of all eight, then pair 1, ...), so that columns are summed like rows.

These loops are written as LLVM IR, without instructions of any particular processor, so that the sums stay in
registers. Loops compiled by numba alone are no faster than torch's uint8 bicubic; these take less than half of its time
(benchmarks/results/LOG.md).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from resolute.pipeline.jit import compiled_at_import

__all__ = ["MIN_TILE", "pair_rows", "pair_taps", "pairs_per_row", "resample_weights", "shrink"]

# Keys' cubic, slightly sharper than with the usual -0.5. PSNR on photos at 146/183/256 px: at least 56.5 dB against
# -0.5 and 46.4 dB against Lanczos-3 (-0.5 itself: 45.1 dB), while Lanczos takes half as much time again.
# Source: Keys, Cubic convolution interpolation for digital image processing, IEEE TASSP 29 (1981), equation (15).
_A = -0.57
_ONE_BITS = 14  # fraction bits of a weight, of which the largest, 1.0, has to fit 16 bits
_FRACTION_BITS = 6  # of values between the passes: 255 plus 50 % overshoot fits 16 bits
_ROWS = 8
_PAIR = 3 * _ROWS  # values per pair of columns of eight interleaved rows
_LANES = 32  # pairs that are summed at once over rows
_BLOCK = 16  # pairs in the order of `_ORDER`, so that eight rows are interleaved with the fewest instructions
_ORDER = tuple(4 * (q % 4) + q // 4 for q in range(_BLOCK))  # place -> pair; its own inverse
_CHUNK_PX, _CHUNK = 32, 48  # pixels, and pairs of one parity, per step of `pair_rows`: the least common multiple
MIN_TILE = 2 * _CHUNK  # values of the scratch array of `shrink` per two rows that it needs at a time, at least
_READ_BYTES = 64  # per row and block: 34 are needed
_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))


def _lanes_at(context: Any, b: ir.IRBuilder, array_type: Any, array: Any, at: Any, lanes: int, item: Any = None) -> Any:
    """Pointer to `lanes` values, of the type `item` if they are not the array's own; they may start at any element."""
    place = b.gep(context.make_array(array_type)(context, b, array).data, [at])
    return b.bitcast(place, ir.VectorType(item or place.type.pointee, lanes).as_pointer())


def _indices(lanes: Any) -> ir.Constant:
    lanes = list(lanes)
    return ir.Constant(ir.VectorType(_I32, len(lanes)), lanes)


def _dot(lanes: tuple[int, ...], shift: int, *, joined: bool) -> Any:
    """Make dot(dst, d, src, s, next_s, stride, weights, w, taps): the rounded sums >> `shift` over k < taps.

    Each sum is of the products of both numbers of the pairs `src[s + k * stride]` and `weights[w + k]`, in 32 bits, for
    `lanes[0]` neighbouring s, and for the `lanes[1]` from `next_s`. `joined`: `dst[d:]` gets the former and the latter
    as pairs of int16; otherwise all of them as uint8, saturated. All arrays are 1-D and contiguous; a pair is an int32
    of two int16, in `src` also a uint16 of two uint8. Bounds are not checked.
    """

    def const(count: int, value: int) -> ir.Constant:
        return ir.Constant(ir.VectorType(_I32, count), [value] * count)

    @intrinsic
    def dot(
        _: Any, dst: Any, d: Any, src: Any, s: Any, next_s: Any, stride: Any, weights: Any, w: Any, taps: Any
    ) -> Any:
        def code(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
            before, tap, after = b.block, b.append_basic_block("tap"), b.append_basic_block("after")
            apart = b.sub(args[4], args[3])
            b.branch(tap)
            b.position_at_end(tap)
            k, at, totals = b.phi(_I64), b.phi(_I64), [b.phi(ir.VectorType(_I32, count)) for count in lanes]
            weight = b.load(b.gep(context.make_array(weights)(context, b, args[6]).data, [b.add(args[7], k)]))
            sums = []
            for count, total, place in zip(lanes, totals, (at, b.add(at, apart)), strict=True):
                products, item = ir.VectorType(_I32, 2 * count), ir.IntType(src.dtype.bitwidth // 2)
                pairs = b.load(_lanes_at(context, b, src, args[2], place, 2 * count, item), align=1)
                pairs = pairs if src.dtype.signed else b.zext(pairs, ir.VectorType(_I16, 2 * count))
                lane = b.insert_element(ir.Constant(total.type, ir.Undefined), weight, ir.Constant(_I32, 0))
                splat = b.bitcast(b.shuffle_vector(lane, lane, const(count, 0)), ir.VectorType(_I16, 2 * count))
                both = b.mul(b.sext(pairs, products), b.sext(splat, products))
                even, odd = (b.shuffle_vector(both, both, _indices(range(n, 2 * count, 2))) for n in (0, 1))
                sums.append(b.add(total, b.add(even, odd)))
            next_k, next_at = b.add(k, ir.Constant(_I64, 1)), b.add(at, args[5])
            starts = [ir.Constant(_I64, 0), args[3], *(const(count, 1 << (shift - 1)) for count in lanes)]
            for phi, first, later in zip((k, at, *totals), starts, (next_k, next_at, *sums), strict=True):
                phi.add_incoming(first, before)
                phi.add_incoming(later, tap)
            b.cbranch(b.icmp_signed("<", next_k, args[8]), tap, after)
            b.position_at_end(after)
            shifted = [b.ashr(total, const(count, shift)) for count, total in zip(lanes, sums, strict=True)]
            if joined:
                low = b.and_(shifted[0], const(lanes[0], 0xFFFF))
                shifted = [b.or_(low, b.shl(shifted[1], const(lanes[1], 16)))]
            place = args[1]
            for count, out in zip(lanes, shifted, strict=False):
                if not joined:
                    out = b.select(b.icmp_signed("<", out, const(count, 0)), const(count, 0), out)
                    out = b.select(b.icmp_signed(">", out, const(count, 255)), const(count, 255), out)
                    out = b.trunc(out, ir.VectorType(_I8, count))
                b.store(out, _lanes_at(context, b, dst, args[0], place, count), align=1)
                place = b.add(place, ir.Constant(_I64, count))
            return context.get_dummy_value()

        size = types.intp
        return types.void(dst, size, src, size, size, size, weights, size, size), code

    return dot


def _pair_chunk_ir(_: Any, dst: Any, even: Any, odd: Any, src: Any, upper: Any, lower: Any) -> Any:
    """Write `_CHUNK_PX` pixels of two rows, which start at `src[upper]` and `src[lower]`, as pairs to `dst[even:]` and
    `dst[odd:]`.

    Reads at most `_READ_BYTES` more than these pixels of each row.
    """

    def code(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
        for first in range(0, _CHUNK, _BLOCK):
            pixel_bytes = [6 * (q // 3) + q % 3 for q in range(first, first + _BLOCK)]
            start = pixel_bytes[0]
            rows = []
            for row in args[4], args[5]:
                place = b.add(row, ir.Constant(_I64, start))
                rows.append(b.load(_lanes_at(context, b, src, args[3], place, _READ_BYTES), align=1))
            picked = [pixel_bytes[_ORDER[place]] - start + parity for parity in (0, 3) for place in range(_BLOCK)]
            both = b.shuffle_vector(*rows, _indices(n + row for n in picked for row in (0, _READ_BYTES)))
            for half, to in enumerate((args[1], args[2])):
                pairs = b.shuffle_vector(both, both, _indices(range(2 * _BLOCK * half, 2 * _BLOCK * (half + 1))))
                place = b.add(to, ir.Constant(_I64, first))
                b.store(pairs, _lanes_at(context, b, dst, args[0], place, 2 * _BLOCK, _I8), align=1)
        return context.get_dummy_value()

    size = types.intp
    return types.void(dst, size, size, src, size, size), code


def _interleave_ir(_: Any, dst: Any, d: Any, src: Any, s: Any, stride: Any) -> Any:
    """dst[d + 8 q + r] = pair q of `src[s + r * stride:][:_BLOCK]`, which is in the order of `_ORDER`, for r < 8."""

    def code(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
        def merge(left: Any, right: Any, width: int, half: int) -> Any:
            """The first or second half of each four values of both vectors, `width` values of either by turns."""
            lanes = []
            for first in range(2 * half, _BLOCK, 4):
                for i in range(first, first + 2, width):
                    lanes += [*range(i, i + width), *range(_BLOCK + i, _BLOCK + i + width)]
            return b.shuffle_vector(left, right, _indices(lanes))

        rows, at = [], args[3]
        for _ in range(_ROWS):
            rows.append(b.load(_lanes_at(context, b, src, args[2], at, _BLOCK), align=4))
            at = b.add(at, args[4])
        twos = [[merge(rows[r], rows[r + 1], 1, half) for half in (0, 1)] for r in range(0, _ROWS, 2)]
        fours = [[merge(twos[r][n // 2], twos[r + 1][n // 2], 2, n % 2) for n in range(4)] for r in (0, 2)]
        place = args[1]
        for upper, lower in zip(*fours, strict=True):
            for first in (0, 8):
                lanes = [n + i for n in (first, first + _BLOCK, first + 4, first + 4 + _BLOCK) for i in range(4)]
                both = b.shuffle_vector(upper, lower, _indices(lanes))
                b.store(both, _lanes_at(context, b, dst, args[0], place, _BLOCK), align=4)
                place = b.add(place, ir.Constant(_I64, _BLOCK))
        return context.get_dummy_value()

    size = types.intp
    return types.void(dst, size, src, size, size), code


_pair_chunk: Any = intrinsic(_pair_chunk_ir)
_interleave: Any = intrinsic(_interleave_ir)
_dot_rows = _dot((_LANES, _LANES), _ONE_BITS - _FRACTION_BITS, joined=True)
# why not 24 lanes: if their number is no power of two, LLVM's loop is half as fast
_dot_columns = _dot((16, 8), _ONE_BITS + _FRACTION_BITS, joined=False)


@njit(inline="always")
def _cubic(x: float) -> float:
    x = abs(x)
    if x < 1.0:
        return ((_A + 2) * x - (_A + 3)) * x * x + 1
    return (((x - 5) * x + 8) * x - 4) * _A if x < 2.0 else 0.0


@compiled_at_import("Tuple((int64[::1], int16[:, ::1]))(int64, int64, float64, float64, int64)")
def resample_weights(length: int, shorter: int, start: float, extent: float, averaged: int) -> Any:
    """First input index (shorter,) int64 and weights (shorter, taps) int16 of each output pixel; weights sum to 2**14.

    The output covers the input from `start` to `start + extent`, which may be fractions and lie less than 1 px outside
    of 0 to `length`. Each input pixel is the mean of `averaged` pixels of an image of which the output is the resize.
    The filter is widened by the scale (antialiasing). Source: the filter support is Pillow's, Resample.c.
    """
    scale = extent / shorter
    width = 2.0 * max(scale, 1.0)
    # Means lack some detail: by Taylor's series they differ from the signal by `sharpen` times its second difference,
    # which the filter, being linear, can subtract from itself.
    sharpen = (1.0 - 1.0 / averaged**2) / 24.0
    reach = width + 1.0 if averaged > 1 else width
    taps = min(length, int(2.0 * reach) + 2)
    starts = np.empty(shorter, np.int64)
    weights = np.empty((shorter, taps), np.int16)
    exact = np.empty(taps)
    max_taps = 1
    for i in range(shorter):
        centre = start + (i + 0.5) * scale
        first, end = max(0, int(centre - reach + 0.5)), min(length, int(centre + reach + 0.5))
        max_taps = max(max_taps, end - first)
    for i in range(shorter):
        centre = start + (i + 0.5) * scale
        first, end = max(0, int(centre - reach + 0.5)), min(length, int(centre + reach + 0.5))
        starts[i] = min(first, length - max_taps)
        total = 0.0
        for k in range(max_taps):
            x = abs(starts[i] + k + 0.5 - centre) * 2.0 / width
            exact[k] = 0.0
            if first <= starts[i] + k < end:
                exact[k] = _cubic(x)
                if averaged > 1:
                    step = 2.0 / width
                    exact[k] -= sharpen * (_cubic(x - step) - 2.0 * exact[k] + _cubic(x + step))
            total += exact[k]
        running, assigned = 0.0, 0
        for k in range(max_taps):  # why: rounding the running sum makes the total exact
            running += exact[k] / total
            cumulative = int(np.floor(running * (1 << _ONE_BITS) + 0.5))
            weights[i, k] = cumulative - assigned
            assigned = cumulative
    return starts, np.ascontiguousarray(weights[:, :max_taps])


@compiled_at_import("Tuple((int64[::1], int32[:, ::1]))(int64[::1], int16[:, ::1], int64)")
def pair_taps(starts: Any, weights: Any, length: int) -> Any:
    """The filter `starts`, `weights` of `resample_weights` on pairs of inputs (0 and 1, 2 and 3, ...).

    Returns the first pair (n,) int64 and pairs of weights (n, taps) int32; `length` is the number of inputs.
    """
    n, taps = weights.shape
    pairs = (length + 1) // 2
    paired_taps = min(taps // 2 + 1, pairs)
    firsts = np.empty(n, np.int64)
    paired = np.zeros((n, 2 * paired_taps), np.int16)
    for i in range(n):
        firsts[i] = min(starts[i] // 2, pairs - paired_taps)
        skipped = starts[i] - 2 * firsts[i]
        for k in range(taps):
            paired[i, skipped + k] = weights[i, k]
    return firsts, paired.view(np.int32)


@compiled_at_import("int64(int64)")
def pairs_per_row(width: int) -> int:
    """Values (uint16) that `pair_rows` needs for two rows of `width` px."""
    return 2 * _CHUNK * ((width + _CHUNK_PX - 1) // _CHUNK_PX)


@compiled_at_import("void(Array(uint8, 2, 'C', readonly=True), int64, int64, int64, int64, uint16[::1])")
def pair_rows(pixels: Any, first: int, count: int, left: int, right: int, out: Any) -> None:
    """Fill `out` with columns `left` to `right` px of rows 2 `first` to 2 (`first` + `count`) of `pixels`.

    `pixels` is (H, 3 W) uint8, `left` a multiple of `_CHUNK_PX`. Two rows take `pairs_per_row(right - left)` values,
    first those of even pixels, then those of odd ones. A row below the image, and pixels that fill up the last chunk,
    have arbitrary values.
    """
    height, wide = pixels.shape
    flat = pixels.reshape(-1)
    half = pairs_per_row(right - left) // 2
    edge = np.zeros(2 * (3 * _CHUNK_PX + _READ_BYTES), np.uint8)
    for m in range(count):
        upper = 2 * (first + m) * wide
        lower = min(2 * (first + m) + 1, height - 1) * wide
        x, to = 3 * left, 2 * half * m
        while x < 3 * right:
            if lower + x + 3 * _CHUNK_PX + _READ_BYTES <= len(flat):
                _pair_chunk(out, to, to + half, flat, upper + x, lower + x)
            else:  # why: a chunk reads beyond the row
                for i in range(min(wide - x, 3 * _CHUNK_PX)):
                    edge[i] = flat[upper + x + i]
                    edge[3 * _CHUNK_PX + _READ_BYTES + i] = flat[lower + x + i]
                _pair_chunk(out, to, to + half, edge, 0, 3 * _CHUNK_PX + _READ_BYTES)
            x, to = x + 3 * _CHUNK_PX, to + _CHUNK


@compiled_at_import(
    "void(Array(uint8, 2, 'C', readonly=True), int64[::1], int32[:, ::1], int64[::1], int32[:, ::1], uint8[:, ::1], "
    "uint16[::1], boolean)"
)
def shrink(
    pixels: Any, tops: Any, row_weights: Any, lefts: Any, column_weights: Any, out: Any, scratch: Any, paired: bool
) -> None:
    """Fill `out` (h, 3 w) uint8 from `pixels` (H, 3 W) uint8.

    `tops`, `row_weights`, `lefts` and `column_weights` are `pair_taps` of the rows and columns. `paired`: `scratch`
    holds `pair_rows` of all rows and columns; otherwise it is overwritten with those of a few rows at a time, for which
    `MIN_TILE` times (H + 1) // 2 values are always enough.
    """
    width, narrow, half = pixels.shape[1] // 3, out.shape[1], pairs_per_row(pixels.shape[1] // 3) // 2
    down, across = row_weights.reshape(-1), column_weights.reshape(-1)
    taps_down, taps_across = row_weights.shape[1], column_weights.shape[1]
    rows = np.empty((_ROWS, half), np.int32)
    flat = rows.reshape(-1)
    interleaved = np.empty(half * _ROWS, np.int32)
    shrunk = np.empty(narrow * _ROWS, np.uint8)
    for top in range(0, len(out), _ROWS):
        count = min(_ROWS, len(out) - top)
        first = 0 if paired else tops[top]
        need = 0 if paired else tops[top + count - 1] + taps_down - first
        tile = width if paired else max(1, len(scratch) // (need * MIN_TILE)) * _CHUNK_PX
        for left in range(0, width, tile):
            right = min(width, left + tile)
            stride = pairs_per_row(right - left)
            if not paired:
                pair_rows(pixels, first, need, left, right, scratch)
            start = 3 * left // 2
            for r in range(count):
                y = top + r
                for q in range(0, stride // 2, _LANES):
                    q = min(q, stride // 2 - _LANES)  # why min: the last step overlaps the previous one
                    at = (tops[y] - first) * stride + q
                    to = r * half + start + q
                    _dot_rows(flat, to, scratch, at, at + stride // 2, stride, down, y * taps_down, taps_down)
        for q in range(0, half, _BLOCK):
            _interleave(interleaved, q * _ROWS, flat, q, half)
        for x in range(len(lefts)):
            to, at = x * _PAIR, lefts[x] * _PAIR
            _dot_columns(shrunk, to, interleaved, at, at + 16, _PAIR, across, x * taps_across, taps_across)
        for r in range(count):
            for x in range(narrow):
                out[top + r, x] = shrunk[x * _ROWS + r]
