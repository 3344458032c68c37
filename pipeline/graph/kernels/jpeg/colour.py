"""Upsampling of chroma and conversion to RGB, a row at a time, as libjpeg does them, bit for bit.

Source: jdsample.c (h2v2 fancy upsampling: a triangle filter) and jdcolor.c of libjpeg.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from resolute.pipeline.jit import intrinsic

from .vectors import BYTES32, I8, I16, WORDS16, WORDS32, Vectors, chosen, filled, pointer

__all__ = ["column_sums", "rgb_of_420", "rgb_of_444", "rgb_of_grey"]

# where pixel i of the 16 of a lane lies, once the even and the odd pixels were packed
_PACKED = [i // 2 + 8 * (i % 2) for i in range(16)]


@intrinsic
def column_sums(_: Any, to: Any, near: Any, far: Any) -> Any:
    """Set 32 int16 to three times 32 samples of the nearer row plus those of the farther one. All are addresses."""

    def code(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
        wide = ir.VectorType(I16, 32)
        one, other = (b.zext(b.load(pointer(b, args[n], 0, BYTES32), align=1), wide) for n in (1, 2))
        b.store(b.add(b.mul(one, filled(wide, 3)), other), pointer(b, args[0], 0, wide), align=2)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), code


def _even_and_odd(b: ir.IRBuilder, address: Any) -> tuple[Any, Any]:
    """32 uint8 at an address: the even and the odd ones, as int16."""
    both = b.load(pointer(b, address, 0, WORDS16), align=1)
    return b.and_(both, filled(WORDS16, 255)), b.lshr(both, filled(WORDS16, 8))


def _upsampled(b: ir.IRBuilder, sums: Any) -> tuple[Any, Any]:
    """Chroma of the even and odd pixels of 32, from the column sums of 16 samples at an address and of those beside."""
    last, this, following = (b.load(pointer(b, sums, 2 * n, WORDS16), align=2) for n in (-1, 0, 1))
    this = b.mul(this, filled(WORDS16, 3))
    even = b.lshr(b.add(b.add(this, last), filled(WORDS16, 8)), filled(WORDS16, 4))
    odd = b.lshr(b.add(b.add(this, following), filled(WORDS16, 7)), filled(WORDS16, 4))
    return even, odd


def _store_pixels(b: ir.IRBuilder, to: Any, planes: list[Any]) -> None:
    """Store 32 pixels, 96 bytes, of three vectors of bytes in the order of `_PACKED`."""
    placed = []
    for channel, plane in enumerate(planes):
        order = [0] * 16
        for i in range(16):
            order[(3 * i + channel) % 16] = _PACKED[i]
        placed.append(b.shuffle_vector(plane, plane, chosen([*order, *(16 + place for place in order)])))
    for part in range(3):
        channels = [(16 * part + i) % 3 for i in range(16)] * 2
        mixed = b.shuffle_vector(placed[0], placed[1], chosen(i + 32 * (c == 1) for i, c in enumerate(channels)))
        mixed = b.shuffle_vector(mixed, placed[2], chosen(i + 32 * (c == 2) for i, c in enumerate(channels)))
        for lane in (0, 1):
            half = b.shuffle_vector(mixed, mixed, chosen(range(16 * lane, 16 * lane + 16)))
            b.store(half, pointer(b, to, 16 * part + 48 * lane, ir.VectorType(I8, 16)), align=1)


def _store_rgb(b: ir.IRBuilder, to: Any, luma: tuple[Any, Any], blue: tuple[Any, Any], red: tuple[Any, Any]) -> None:
    """Convert 32 pixels, of which the even and the odd ones are given as int16, and store them.

    Factors of 2^16: 1.402 = 1 + 26345 / 65536 and 1.772 = 2 - 14942 / 65536 for 16-bit products, and the two for green.
    """
    v = Vectors(b)

    def scaled(x: Any, factor: int) -> Any:
        """x times a factor / 2^16, rounded."""
        high = b.ashr(b.mul(b.sext(b.add(x, x), WORDS32), filled(WORDS32, factor)), filled(WORDS32, 16))
        return b.ashr(b.add(b.trunc(high, WORDS16), filled(WORDS16, 1)), filled(WORDS16, 1))

    halves = []
    for y, cb, cr in zip(luma, blue, red, strict=True):
        cb, cr = b.sub(cb, filled(WORDS16, 128)), b.sub(cr, filled(WORDS16, 128))
        green = v.shifted(v.products(v.pairs(cb, cr), -22554, 65536 - 46802), 16)
        halves.append(
            (
                b.add(b.add(y, cr), scaled(cr, 26345)),
                b.add(b.sub(y, cr), green),
                b.add(b.add(y, b.add(cb, cb)), scaled(cb, -14942)),
            )
        )
    _store_pixels(b, to, [v.bytes(even, odd) for even, odd in zip(*halves, strict=True)])


@intrinsic
def rgb_of_420(_: Any, to: Any, luma: Any, blue: Any, red: Any) -> Any:
    """Write 32 pixels, 96 bytes, from 32 luma samples and the column sums of 16 of each chroma. All are addresses."""

    def code(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
        _store_rgb(b, args[0], _even_and_odd(b, args[1]), _upsampled(b, args[2]), _upsampled(b, args[3]))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), code


@intrinsic
def rgb_of_444(_: Any, to: Any, luma: Any, blue: Any, red: Any) -> Any:
    """Write 32 pixels, 96 bytes, from 32 samples each. All are addresses."""

    def code(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
        _store_rgb(b, args[0], *(_even_and_odd(b, address) for address in args[1:]))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), code


@intrinsic
def rgb_of_grey(_: Any, to: Any, luma: Any) -> Any:
    """Write 32 pixels, 96 bytes, from 32 samples. Both are addresses."""

    def code(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
        even, odd = _even_and_odd(b, args[1])
        plane = Vectors(b).bytes(even, odd)
        _store_pixels(b, args[0], [plane] * 3)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 2), code
