"""CPU kernel that resizes, flips and optionally normalises an image in one cache-friendly pass.

An antialiased bilinear resize (a triangle filter as wide as the scale, as in Pillow and torchvision), rounded once at
the end. Each source row is resized horizontally, two RGB pixels at a time, into a ring buffer of as many rows as an
output row needs; these are then summed vertically, 32 values at a time, rounded and normalised in registers. Horizontal
sums are exact integers, with weights of 14 bits; vertical ones are float32. On photos, values differ by at most 0.51
levels from exact arithmetic (Pillow's by up to 1, as it also rounds between its passes). Both sums are written as LLVM
vector code without CPU-specific instructions; numba's own loops take several times as long. Products are never fused
with sums, so the output is bit-identical on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from resolute.pipeline.jit import compiled, intrinsic

__all__ = ["normalise_rows", "resample_weights", "resize"]

_I8, _I16, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_LANES = 32
_SLACK = 32  # values that a row may be read or written beyond its end
_ONE = 2**14  # the weights' unit in horizontal sums, which are exact in float32
# Adding and subtracting 1.5 * 2^23 rounds a float32 below 2^22 to the nearest integer, halves to even.
_ROUND = 12582912.0


def _vector(lanes: int) -> ir.VectorType:
    return ir.VectorType(_F32, lanes)


def _splat(b: ir.IRBuilder, value: Any, lanes: int) -> Any:
    first = b.insert_element(ir.Constant(_vector(lanes), ir.Undefined), value, ir.Constant(_I32, 0))
    return b.shuffle_vector(first, first, ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes))


def _indices(numbers: Iterable[int]) -> Any:
    """The constant with which a shuffle picks these elements."""
    chosen = [*numbers]
    return ir.Constant(ir.VectorType(_I32, len(chosen)), chosen)


def _sum(b: ir.IRBuilder, terms: int | Any, kind: ir.VectorType, term: Callable[[Any], Any]) -> Any:
    """term(0) + ... of vectors of `kind`: unrolled for an int `terms`, else a loop over a runtime value, at least 1."""
    floats = kind.element == _F32
    add = b.fadd if floats else b.add
    if isinstance(terms, int):
        total = term(ir.Constant(_I64, 0))
        for k in range(1, terms):
            total = add(total, term(ir.Constant(_I64, k)))
        return total
    before, each, after = b.block, b.append_basic_block("term"), b.append_basic_block("after")
    b.branch(each)
    b.position_at_end(each)
    k, total = b.phi(_I64), b.phi(kind)
    more, following = add(total, term(k)), b.add(k, ir.Constant(_I64, 1))
    k.add_incoming(ir.Constant(_I64, 0), before)
    total.add_incoming(ir.Constant(kind, [0.0 if floats else 0] * kind.count), before)
    k.add_incoming(following, each)
    total.add_incoming(more, each)
    b.cbranch(b.icmp_signed("<", following, terms), each, after)
    b.position_at_end(after)
    return more


# From 32 bytes, four RGB taps of each of two pixels with four bytes more, two taps of each: for a pixel, as 16-bit
# words, the two values of red, of green, of blue, and two zeros. Index 32: a zero.
_PAIRED = [
    _indices(
        byte
        for pixel in (0, 16)
        for channel in range(4)
        for tap in (2 * pair, 2 * pair + 1)
        for byte in ((pixel + 3 * tap + channel, 32) if channel < 3 else (32, 32))
    )
    for pair in (0, 1)
]


def _across(fixed: int | None) -> Any:
    """across(dst, d, src, s, starts, x, weights, w, groups): compute two adjacent output pixels, `dst[d:d + 6]`.

    Each is the sum over k < 4 groups of `src[s + start + 3 k:][:3]` times its weight, with the start `starts[x]` or
    `starts[x + 1]`; `weights[w:]` is as in `_paired`. Also overwrites `dst[d + 6]`, and reads 16 bytes per group.
    `fixed`: number of taps, 2 or 4. No bounds checks.
    """
    bytes16, words16 = ir.VectorType(_I8, 16), ir.VectorType(_I16, 16)
    sums16, sums8 = ir.VectorType(_I32, 16), ir.VectorType(_I32, 8)

    @intrinsic
    def across(
        _: Any, dst: Any, d: Any, src: Any, s: Any, starts: Any, x: Any, weights: Any, w: Any, groups: Any
    ) -> Any:
        def code(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
            out, source, firsts, factors = (
                context.make_array(sig.args[n])(context, b, args[n]).data for n in (0, 2, 4, 6)
            )
            begins = [b.add(args[3], b.load(b.gep(firsts, [b.add(args[5], ir.Constant(_I64, n))]))) for n in (0, 1)]

            def taps(pixel: int, group: Any) -> Any:
                place = b.gep(source, [b.add(begins[pixel], b.mul(group, ir.Constant(_I64, 12)))])
                return b.load(b.bitcast(place, bytes16.as_pointer()), align=1)

            def term(group: Any) -> Any:
                both = b.shuffle_vector(taps(0, group), taps(1, group), _indices(range(32)))
                first = b.add(args[7], b.mul(group, ir.Constant(_I64, 32)))
                sums = []
                for pair in range((fixed or 4) // 2):
                    values = b.bitcast(b.shuffle_vector(both, ir.Constant(both.type, [0] * 32), _PAIRED[pair]), words16)
                    place = b.gep(factors, [b.add(first, ir.Constant(_I64, 16 * pair))])
                    factor = b.load(b.bitcast(place, words16.as_pointer()), align=2)
                    product = b.mul(b.sext(values, sums16), b.sext(factor, sums16))
                    # why like this: LLVM makes one instruction of it, x86's pmaddwd
                    even, odd = (b.shuffle_vector(product, product, _indices(range(n, 16, 2))) for n in (0, 1))
                    sums.append(b.add(even, odd))
                return sums[0] if len(sums) == 1 else b.add(*sums)

            total = b.sitofp(_sum(b, 1 if fixed else args[8], sums8, term), _vector(8))
            for n in (0, 1):
                place = b.gep(out, [b.add(args[1], ir.Constant(_I64, 3 * n))])
                four = _indices(range(4 * n, 4 * n + 4))
                b.store(b.shuffle_vector(total, total, four), b.bitcast(place, _vector(4).as_pointer()), align=4)
            return context.get_dummy_value()

        size = types.intp
        return types.void(dst, size, src, size, starts, size, weights, size, size), code

    return across


def _down(fixed: int | None) -> Any:
    """down(dst, d, ring, starts, i, weights, w, taps, scale, shift, past): compute `dst[d + i:][:32]`.

    From the ring's rows: the rounded sum over k < taps of `ring[starts[k] + i:]` times `weights[w + k]`; for a float32
    `dst`, times `scale[i:]` plus `shift[i:]`, which is written past the caches if `past`; then its address is a
    multiple of 64. `fixed`: number of taps to unroll. No bounds checks.
    """
    wide = _vector(_LANES)

    @intrinsic
    def down(
        _: Any,
        dst: Any,
        d: Any,
        ring: Any,
        starts: Any,
        i: Any,
        weights: Any,
        w: Any,
        taps: Any,
        scale: Any,
        shift: Any,
        past: Any,
    ) -> Any:
        def code(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
            arrays = {n: context.make_array(sig.args[n])(context, b, args[n]).data for n in (0, 2, 3, 5, 8, 9)}

            def load(n: int, at: Any) -> Any:
                return b.load(b.bitcast(b.gep(arrays[n], [at]), wide.as_pointer()), align=4)

            def term(k: Any) -> Any:
                row = load(2, b.add(b.load(b.gep(arrays[3], [k])), args[4]))
                return b.fmul(row, _splat(b, b.load(b.gep(arrays[5], [b.add(args[6], k)])), _LANES))

            magic = ir.Constant(wide, [_ROUND] * _LANES)
            total = b.fsub(b.fadd(_sum(b, fixed or args[7], wide, term), magic), magic)
            place = b.gep(arrays[0], [b.add(args[1], args[4])])
            if dst.dtype == types.uint8:
                out = b.fptoui(total, ir.VectorType(_I8, _LANES))
                b.store(out, b.bitcast(place, out.type.as_pointer()), align=1)
            else:
                out = b.fadd(b.fmul(total, load(8, args[4])), load(9, args[4]))
                place = b.bitcast(place, wide.as_pointer())
                with b.if_else(args[10]) as (beyond, usual):
                    with beyond:
                        stored = b.store(out, place, align=64)
                        stored.set_metadata("nontemporal", b.module.add_metadata([ir.Constant(_I32, 1)]))
                    with usual:
                        b.store(out, place, align=4)
            return context.get_dummy_value()

        size = types.intp
        return types.void(dst, size, ring, starts, size, weights, size, size, scale, shift, types.boolean), code

    return down


# 2 taps: enlarging; 3 and 4: shrinking by up to 1.5, as for crops of prep's shards
_across_2, _across_4, _across_n = _across(2), _across(4), _across(None)
_down_2, _down_3, _down_4, _down_n = _down(2), _down(3), _down(4), _down(None)


@intrinsic
def _wait_for_stores(_: Any) -> Any:
    """Until other threads see what was written past the caches."""

    def code(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
        b.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), code


@compiled
def resample_weights(length: int, out: int) -> Any:
    """First input (out,) int64 of each of `out` outputs of `length` inputs, and weights (out, taps) float32 with sum 1.

    Source: Pillow, Resample.c, bilinear filter.
    """
    scale = length / out
    reach = max(scale, 1.0)
    slope = 1.0 / reach
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
            exact[k] = max(0.0, 1.0 - abs(starts[i] + k + 0.5 - centre) * slope) if inside else 0.0
            total += exact[k]
        unit = 1.0 / total
        for k in range(taps):
            weights[i, k] = exact[k] * unit
    return starts, weights


@compiled
def _paired(starts: Any, weights: Any, flip: bool) -> Any:
    """Weights of `_across`: for each pair of `starts`, each group of four taps and two taps of it, (..., 2, 4, 2).

    Of each pixel, the weights of both taps, four times, as int16. Their sums up to each tap are rounded, so that those
    of a pixel add up to `_ONE`.
    """
    wide, taps = weights.shape
    out = np.zeros((len(starts) // 2, (taps + 3) // 4, 2, 2, 4, 2), np.int16)
    for x in range(len(starts)):
        column = min(x, wide - 1)
        column = wide - 1 - column if flip else column
        total, before = np.float32(0.5), np.int64(0)
        for k in range(taps):
            total += weights[column, k] * np.float32(_ONE)
            for channel in range(4):  # why loops, here and below: slices take seconds longer to compile
                out[x // 2, k // 4, k // 2 % 2, x % 2, channel, k % 2] = np.int64(total) - before
            before = np.int64(total)
    return out


@compiled
def _row(row: Any, to: int, source: Any, at: int, starts: Any, weights: Any, taps: int) -> None:
    """Resize one row horizontally: `row[to:]` from `source[at:]`; `starts` has an even length."""
    groups = (taps + 3) // 4
    for x in range(0, len(starts), 2):
        d, w = to + 3 * x, 16 * groups * x
        if taps == 2:
            _across_2(row, d, source, at, starts, x, weights, w, groups)
        elif groups == 1:
            _across_4(row, d, source, at, starts, x, weights, w, groups)
        else:
            _across_n(row, d, source, at, starts, x, weights, w, groups)


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
def resize(
    source: Any, pitch: int, height: int, width: int, hflip: bool, vflip: bool, out: Any, scale: Any, shift: Any
) -> None:
    """Resize an image into `out` (h, w, 3); `hflip` flips horizontally, `vflip` vertically.

    Row k of the image, (width, 3) uint8, begins at `source[pitch * k]`. A uint8 `out` receives the rounded values; a
    float32 one these times `scale` plus `shift`, (3,) float32 each.
    """
    high, wide = out.shape[0], out.shape[1]
    tops, row_weights = resample_weights(height, high)
    lefts, pixel_weights = resample_weights(width, wide)
    down_taps, taps = row_weights.shape[1], pixel_weights.shape[1]
    starts = np.empty(wide + wide % 2, np.int64)
    for x in range(len(starts)):
        column = min(x, wide - 1)
        starts[x] = 3 * lefts[wide - 1 - column if hflip else column]
    line, ring_pitch = 3 * wide, 3 * wide + _SLACK
    ring = np.zeros(down_taps * ring_pitch, np.float32)
    rows = np.empty(down_taps, np.int64)
    to = out.reshape(-1)
    guarded = np.zeros(3 * (width + taps) + 16, np.uint8)
    across = _paired(starts, pixel_weights, hflip).reshape(-1)
    down = row_weights.reshape(-1) / np.float32(_ONE)
    scale, shift = _repeated(scale, wide), _repeated(shift, wide)
    # why: an image of the batch is read again much later, from memory, so it need not displace others in the caches
    past = to.itemsize == 4 and to.ctypes.data % 64 == 0 and line % _LANES == 0
    ready = 0
    for y in range(high):
        while ready < min(tops[y] + down_taps, height):
            at, slot = pitch * ready, ready % down_taps * ring_pitch
            if at + len(guarded) > len(source):  # why: loads of the last pixels would read beyond the image
                for i in range(3 * width):
                    guarded[i] = source[at + i]
                _row(ring, slot, guarded, 0, starts, across, taps)
            else:
                _row(ring, slot, source, at, starts, across, taps)
            ready += 1
        for k in range(down_taps):
            rows[k] = (tops[y] + k) % down_taps * ring_pitch
        d, w = (high - 1 - y if vflip else y) * line, y * down_taps
        for i in range(0, line - line % _LANES, _LANES):
            if down_taps == 2:
                _down_2(to, d, ring, rows, i, down, w, down_taps, scale, shift, past)
            elif down_taps == 3:
                _down_3(to, d, ring, rows, i, down, w, down_taps, scale, shift, past)
            elif down_taps == 4:
                _down_4(to, d, ring, rows, i, down, w, down_taps, scale, shift, past)
            else:
                _down_n(to, d, ring, rows, i, down, w, down_taps, scale, shift, past)
        for i in range(line - line % _LANES, line):
            total = np.float32(0)
            for k in range(down_taps):
                total += ring[rows[k] + i] * down[w + k]
            total = np.rint(total)
            to[d + i] = total if to.itemsize == 1 else total * scale[i] + shift[i]
    if past:
        _wait_for_stores()
