"""Decodes the entropy-coded bytes of a scan: bits, Huffman codes and coefficients.

`at, bits, count` are the state of a reader of bits: the address of the next byte, the bits that were read from the most
significant on, and how many of them are valid; what follows these is what will be read next, or zeros.

Source: ITU-T T.81, annex F; the reader's refill: Giesen, Reading bits in far too many ways, part 2, variant 4.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types

from resolute.pipeline.jit import compiled, intrinsic

from .memory import (
    DELTA,
    LOOK,
    LOOK_BITS,
    MAX_CODE,
    ONE,
    PAIRS,
    VALUES,
    be64_at,
    i32_at,
    i64_at,
    put8,
    put16,
    u8_at,
    u16_at,
    u32_at,
    u64_at,
)

__all__ = ["BAD", "dc_difference", "read_block", "skip_block", "unstuff"]

BAD = 1 << 20  # in place of the number of coefficients: a code that does not exist
_I64 = ir.IntType(64)
_U64 = np.uint64
_SIZE = 1 << LOOK_BITS
_inlined = njit(nogil=True, error_model="numpy", inline="always")


@intrinsic
def _copy32(_: Any, to: Any, source: Any) -> Any:
    """Copy 32 bytes between addresses; returns a bit for each that is 0xFF, the first the lowest."""

    def code(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
        kind = ir.VectorType(ir.IntType(8), 32)
        value = b.load(b.inttoptr(args[1], kind.as_pointer()), align=1)
        b.store(value, b.inttoptr(args[0], kind.as_pointer()), align=1)
        is_marker = b.icmp_unsigned("==", value, ir.Constant(kind, [255] * 32))
        return b.zext(b.bitcast(is_marker, ir.IntType(32)), _I64)

    return types.int64(types.int64, types.int64), code


@intrinsic
def _trailing_zeros(_: Any, value: Any) -> Any:
    def code(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
        return b.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.int64), code


@compiled
def unstuff(source: Any, end: Any, to: Any) -> Any:
    """Copy the bytes from `source` until `end` or a marker, without the zeros after 0xFF; returns their number.

    32 zeros follow. All are addresses; up to 64 bytes more than what is read are written.
    """
    start = to
    while source + 33 <= end:
        ones = _copy32(to, source)
        count = np.int64(32) if ones == 0 else _trailing_zeros(ones) + 1
        source += count
        to += count
        if ones != 0:
            if u8_at(source, 0) != 0:  # a marker
                to -= 1
                break
            source += 1
    else:
        while source < end:
            value = u8_at(source, 0)
            if value == 0xFF and (source + 1 >= end or u8_at(source, 1) != 0):
                break
            put8(to, 0, value)
            source += 2 if value == 0xFF else 1
            to += 1
    for i in range(32):
        put8(to, i, 0)
    return to - start


@_inlined
def _refill(at: Any, bits: Any, count: Any) -> Any:
    """Read until at least 56 bits are valid."""
    return at + ((63 - count) >> 3), bits | (be64_at(at, 0) >> _U64(count)), count | 56


@compiled
def _long_code(bits: Any, count: Any, decoder: Any, table: Any) -> Any:
    """Read a code of more than `LOOK_BITS` bits: (bits, count, symbol); the symbol is -1 if there is none such."""
    code, length = np.int64(bits >> _U64(48)), LOOK_BITS + 1
    while length < 17 and code >= u32_at(decoder + MAX_CODE, 18 * table + length):
        length += 1
    if length > 16:
        return bits, count, np.int64(-1)
    place = (code >> (16 - length)) + i64_at(decoder + DELTA, 17 * table + length)
    return bits << _U64(length), count - length, u8_at(decoder + VALUES, 256 * table + (place & 255))


@_inlined
def _symbol(bits: Any, count: Any, decoder: Any, table: Any) -> Any:
    entry = u16_at(decoder + LOOK, _SIZE * table + np.int64(bits >> _U64(64 - LOOK_BITS)))
    if entry != 0:
        bits, count, symbol = bits << _U64(entry >> 8), count - (entry >> 8), entry & 255
    else:
        bits, count, symbol = _long_code(bits, count, decoder, table)
    return bits, count, symbol


@_inlined
def _value(bits: Any, count: Any, size: Any) -> Any:
    """Read a value of `size` bits, at least 1."""
    value = np.int64(bits >> _U64(64 - size))
    if np.int64(bits) >= 0:
        value -= (1 << size) - 1
    return bits << _U64(size), count - size, value


@_inlined
def dc_difference(at: Any, bits: Any, count: Any, decoder: Any, table: Any) -> Any:
    """Read a DC difference: (at, bits, count, difference); the difference is BAD if its code does not exist."""
    at, bits, count = _refill(at, bits, count)
    entry = i32_at(decoder + ONE, _SIZE * table + np.int64(bits >> _U64(64 - LOOK_BITS)))
    if entry != 0:
        bits, count, difference = bits << _U64(entry & 255), count - (entry & 255), entry >> 16
    else:
        bits, count, symbol = _symbol(bits, count, decoder, table)
        difference = np.int64(0)
        if symbol < 0:
            difference = np.int64(BAD)
        elif symbol > 0:
            bits, count, difference = _value(bits, count, symbol)
    return at, bits, count, difference


def _block(keep: bool) -> Any:
    """block(at, bits, count, decoder, table, places, to): read the AC coefficients of a block; `keep`: and store them.

    `places` is the address of PLACE, `to` that of the block's first coefficient. Returns (at, bits, count, k): k is 64
    to 80 if the block ended with its last coefficient, 128 more than the number of those before the end of the block
    if it had one, at least BAD if a code does not exist.
    """

    @_inlined
    def pair(bits: Any, count: Any, k: Any, entry: Any, places: Any, to: Any) -> Any:
        """Take what an entry of PAIRS holds."""
        k += np.int64((entry >> _U64(4)) & _U64(127))
        if keep:
            put16(to, u8_at(places, k), np.int64(entry >> _U64(48)))
        k += 1
        if k > 63:
            used = (entry >> _U64(26)) & _U64(15)
        else:
            if keep:
                put16(to, u8_at(places, k + np.int64((entry >> _U64(11)) & _U64(127))), np.int64(entry >> _U64(32)))
            k += np.int64((entry >> _U64(18)) & _U64(255))
            used = entry & _U64(15)
        return bits << used, count - np.int64(used), k

    @_inlined
    def block(at: Any, bits: Any, count: Any, decoder: Any, table: Any, places: Any, to: Any) -> Any:
        k, pairs = np.int64(1), decoder + PAIRS + 8 * _SIZE * table
        while k < 64:
            at, bits, count = _refill(at, bits, count)
            entry = u64_at(pairs, np.int64(bits >> _U64(64 - LOOK_BITS)))
            if entry != 0:
                bits, count, k = pair(bits, count, k, entry, places, to)
                if k > 63:
                    break
                entry = u64_at(pairs, np.int64(bits >> _U64(64 - LOOK_BITS)))
                if entry != 0:
                    bits, count, k = pair(bits, count, k, entry, places, to)
                    if k > 63:
                        break
                    entry = u64_at(pairs, np.int64(bits >> _U64(64 - LOOK_BITS)))
                    if entry != 0:
                        bits, count, k = pair(bits, count, k, entry, places, to)
                        continue
                at, bits, count = _refill(at, bits, count)
            bits, count, symbol = _symbol(bits, count, decoder, table)
            size = symbol & 15
            if symbol < 0:
                k = np.int64(BAD)
            elif size > 0:
                k += symbol >> 4
                bits, count, value = _value(bits, count, size)
                if keep:
                    put16(to, u8_at(places, k), value)
                k += 1
            elif symbol == 0xF0:
                k += 16
            else:
                k += 128
        return at, bits, count, k

    return block


read_block, skip_block = _block(keep=True), _block(keep=False)
