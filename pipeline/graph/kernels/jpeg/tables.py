"""Huffman tables for decoding, and where coefficients go.

An entry of PAIRS says what the next `LOOK_BITS` bits of AC coefficients hold: up to two codes with their values. From
bit 0 on: 4 bits, the length of all; 7 bits, the run of zeros before the first coefficient; 7 bits, the run before the
second; 8 bits, how many places that and the second take; 4 bits, the length of the first; 16 bits each from 32 on,
the second and the first coefficient. A missing second one has no run, no places and the value 0. The code of the end of
a block is a run of 127, that of 16 zeros a run of 15 and the value 0. 0: the code or its value is longer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from resolute.pipeline.jit import compiled

from .memory import (
    DELTA,
    LOOK,
    LOOK_BITS,
    MAX_CODE,
    ONE,
    PAIRS,
    RAW,
    VALUES,
    i32_at,
    put8,
    put16,
    put32,
    put64,
    u8_at,
)

__all__ = ["END_RUN", "PLACE", "build"]

END_RUN = 127  # of the end of a block, which adds 128 to the number of the coefficient


def _places() -> NDArray[np.uint8]:
    """Where coefficient k of a block lies in BLOCKS, in int16s from the block's first, for k of 0 to 63 + END_RUN.

    From 64 on, the last: there libjpeg puts the coefficients of a block that has too many.
    """
    order = sorted(range(64), key=lambda i: (i // 8 + i % 8, i // 8 if (i // 8 + i % 8) % 2 else i % 8))
    order += [63] * (192 - len(order))
    return np.array([16 * (i // 8) + i % 8 for i in order], np.uint8)


PLACE = _places()


@compiled
def build(decoder: Any, table: int) -> Any:
    """Build the tables for decoding of the DHT in RAW; returns whether its codes are possible.

    Source: ITU-T T.81, annex C; which counts are refused: libjpeg, jdhuff.c.
    """
    raw, size, is_ac = decoder + RAW + 272 * table, 1 << LOOK_BITS, table > 1
    look, one, pairs = (
        decoder + LOOK + 2 * size * table,
        decoder + ONE + 4 * size * table,
        decoder + PAIRS + 8 * size * table,
    )
    for i in range(size):
        put16(look, i, 0)
        put32(one, i, 0)
    code, k = 0, 0
    for length in range(1, 17):
        put64(decoder + DELTA, 17 * table + length, k - code)
        count = u8_at(raw, length - 1)
        if count > 0 and code + count >= 1 << length:  # a code of ones only is reserved
            return False
        for _ in range(count):
            symbol = u8_at(raw, 16 + k)
            if not is_ac and symbol > 15:
                return False
            put8(decoder + VALUES, 256 * table + k, symbol)
            if length <= LOOK_BITS:
                bits, run = symbol & 15, symbol >> 4
                for rest in range(1 << (LOOK_BITS - length)):
                    at = code << (LOOK_BITS - length) | rest
                    put16(look, at, length << 8 | symbol)
                    if bits > 0 and length + bits <= LOOK_BITS:
                        value = at >> (LOOK_BITS - length - bits) & ((1 << bits) - 1)
                        if value < 1 << (bits - 1):
                            value -= (1 << bits) - 1
                        put32(one, at, value << 16 | run << 8 | (length + bits))
                    elif is_ac and symbol == 0:
                        put32(one, at, END_RUN << 8 | length)
                    elif (is_ac and symbol == 0xF0) or (not is_ac and symbol == 0):
                        put32(one, at, run << 8 | length)
            k += 1
            code += 1
        put32(decoder + MAX_CODE, 18 * table + length, code << (16 - length))
        code <<= 1
    put32(decoder + MAX_CODE, 18 * table + 17, 0xFFFFFFFF)
    for at in range(size if is_ac else 0):
        first = i32_at(one, at)
        length = first & 255
        entry = np.int64(0)
        if length > 0:
            run, value = first >> 8 & 127, first >> 16 & 0xFFFF
            total, second_run, places, second_value = length, 0, 0, 0
            if run != END_RUN:
                second = i32_at(one, at << length & (size - 1))
                if (second & 255) > 0 and (second & 255) <= LOOK_BITS - length:
                    total += second & 255
                    second_run, second_value = second >> 8 & 127, second >> 16 & 0xFFFF
                    places = second_run + 1
            entry = value << 48 | second_value << 32 | length << 26 | places << 18 | second_run << 11 | run << 4 | total
        put64(pairs, at, entry)
    return True
