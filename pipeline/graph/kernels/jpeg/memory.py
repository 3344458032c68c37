"""Access to memory by address, and the memory of a decoder.

why addresses: numba counts the references of an array at each call of an inlined function, and tests whether each index
is negative, which took an eighth of the time of entropy decoding. So nothing checks bounds here: who computes an
address shows why it lies within the memory below, or within a file.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from resolute.pipeline.jit import compiled, intrinsic

__all__ = [
    "BITS_SLACK",
    "MAX_BYTES",
    "MAX_PIXELS",
    "Decoders",
    "acquire",
    "be64_at",
    "bytes_at",
    "floats_at",
    "i16_at",
    "i32_at",
    "i64_at",
    "put8",
    "put16",
    "put32",
    "put64",
    "release",
    "u8_at",
    "u16_at",
    "u32_at",
    "u64_at",
]

_I64 = ir.IntType(64)
MAX_BYTES = 1 << 20  # of an encoded image
MAX_PIXELS = 1 << 20  # of a region, with what its first and last blocks hold beyond it
BITS_SLACK = 4096  # bytes that may be read beyond the entropy-coded ones before that is noticed

# Where a decoder has what, in bytes from its address. Tables 0 and 1 are of DC, 2 and 3 of AC coefficients.
LOOK_BITS = 10  # bits that one look-up decodes
RAW = 0  # DHT of each table as in the file, 272 bytes each
LOOK = RAW + 4 * 272  # uint16 of each 10 bits: length << 8 | symbol, 0 for a longer code
ONE = LOOK + 2 * (4 << LOOK_BITS)  # int32: value << 16 | run << 8 | length of code and value, 0 for a longer one
PAIRS = ONE + 4 * (4 << LOOK_BITS)  # uint64: as in `tables.py`
MAX_CODE = PAIRS + 8 * (4 << LOOK_BITS)  # uint32: from which code on, of 16 bits, a length is too short
DELTA = MAX_CODE + 4 * 4 * 18 + 32  # int64: what to add to a code of a length for its place in VALUES
VALUES = DELTA + 8 * 4 * 17 + 32  # symbols in the order of their codes
QUANT = VALUES + 4 * 256  # int16 quantisation tables, in the order of the file's zigzag, 64 each
PAIR_QUANT = QUANT + 2 * 4 * 64  # int16 of pairs of blocks, as their coefficients lie in BLOCKS, 128 each
HEADER = PAIR_QUANT + 2 * 3 * 128  # int64, as in `header.py`
BLOCKS = HEADER + 8 * 64  # int16 coefficients of three pairs of blocks, rows of 16 of which each block has 8
SUMS = BLOCKS + 2 * 3 * 128 + 64  # int16 chroma of a row, before it is upsampled horizontally
_SUMS_BYTES = 2 * 2 * (MAX_PIXELS // 16 + 256)
BITS = SUMS + _SUMS_BYTES  # the entropy-coded bytes without stuffing
PLANES = BITS + MAX_BYTES + BITS_SLACK  # uint8 samples of the three components
_PLANES_BYTES = 3 * MAX_PIXELS
RGB = PLANES + _PLANES_BYTES  # uint8 pixels of the region
_RGB_BYTES = 3 * MAX_PIXELS + 4096
BYTES = (RGB + _RGB_BYTES + 4095) // 4096 * 4096


def _peek(bits: int, *, signed: bool = False, big_endian: bool = False) -> Any:
    """peek(address, i): element i of the numbers of `bits` at an address, int64 (uint64 of 64 bits).

    With `big_endian`, the one at byte i.
    """
    kind = ir.IntType(bits)

    @intrinsic
    def peek(_: Any, address: Any, i: Any) -> Any:
        def code(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
            at = args[1] if big_endian else b.mul(args[1], ir.Constant(_I64, bits // 8))
            value = b.load(b.inttoptr(b.add(args[0], at), kind.as_pointer()), align=1)
            if bits == 64:
                return b.bswap(value) if big_endian else value
            return (b.sext if signed else b.zext)(value, _I64)

        return (types.uint64 if bits == 64 and not signed else types.int64)(types.int64, types.int64), code

    return peek


u8_at, u16_at, u32_at, u64_at = _peek(8), _peek(16), _peek(32), _peek(64)
i16_at, i32_at, i64_at = (_peek(bits, signed=True) for bits in (16, 32, 64))
be64_at = _peek(64, big_endian=True)


def _put(bits: int) -> Any:
    """put(address, i, value): set element i of the numbers of `bits` at an address to the low bits of a value."""
    kind = ir.IntType(bits)

    @intrinsic
    def put(_: Any, address: Any, i: Any, value: Any) -> Any:
        def code(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
            place = b.add(args[0], b.mul(args[1], ir.Constant(_I64, bits // 8)))
            low = args[2] if bits == 64 else b.trunc(args[2], kind)
            b.store(low, b.inttoptr(place, kind.as_pointer()), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), code

    return put


put8, put16, put32, put64 = _put(8), _put(16), _put(32), _put(64)


def _pointer_to(kind: Any) -> Any:
    """An intrinsic that casts an int64 to a pointer. Source: the example in numba's documentation of `intrinsic`."""

    @intrinsic
    def pointer(_: Any, address: Any) -> Any:
        def code(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
            return b.inttoptr(args[0], context.get_value_type(sig.return_type))

        return types.CPointer(kind)(types.int64), code

    return pointer


floats_at, bytes_at = _pointer_to(types.float32), _pointer_to(types.uint8)


@intrinsic
def _exchange(_: Any, address: Any, value: Any) -> Any:
    """Write an int64 to an address and return what was there, as one step for all threads."""

    def code(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
        place = b.inttoptr(args[0], _I64.as_pointer())
        return b.atomic_rmw("xchg", place, args[1], "seq_cst")

    return types.int64(types.int64, types.int64), code


@compiled
def acquire(pool: Any) -> Any:
    """The address of a decoder that no other thread uses, of the pool at an address; give it back by `release`."""
    count, first = i64_at(pool, 0), i64_at(pool, 1)
    while True:  # why it ends: a pool has as many decoders as there are threads
        for i in range(count):
            if _exchange(pool + 64 * (1 + i), 1) == 0:
                return first + BYTES * i


@compiled
def release(pool: Any, decoder: Any) -> None:
    """Give a decoder back."""
    _exchange(pool + 64 * (1 + (decoder - i64_at(pool, 1)) // BYTES), 0)


class Decoders:
    """The decoders of `threads` threads: memory of which the system provides what is used. `address` is the pool's."""

    def __init__(self, threads: int) -> None:
        self._memory: NDArray[np.uint8] = np.zeros(threads * BYTES + 64, np.uint8)
        self._pool: NDArray[np.int64] = np.zeros(8 * (2 + threads), np.int64)
        aligned = -self._memory.ctypes.data % 64
        self.address = int(self._pool.ctypes.data)
        self._pool[:2] = threads, self._memory.ctypes.data + aligned
