"""Reads what precedes the entropy-coded bytes of a JPEG: the frame, the tables and the scan.

Source: ITU-T T.81, annex B. Whatever is not plain (see `region.py`) or not as the standard has it is declined; libjpeg
decides then.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from resolute.pipeline.jit import compiled

from .memory import HEADER, PAIR_QUANT, QUANT, RAW, i16_at, i64_at, put8, put16, put64, u8_at
from .tables import PLACE, build

__all__ = [
    "AC_TABLE",
    "COMPONENTS",
    "DC_TABLE",
    "GREY",
    "HEIGHT",
    "SAMPLING",
    "SCAN",
    "WIDTH",
    "YUV420",
    "YUV444",
    "read_header",
]

# Places in HEADER. WIDTH and HEIGHT in px, SCAN the byte where the entropy-coded ones begin; from DC_TABLE and AC_TABLE
# on the tables of each component, from QUANT_TABLE on its quantisation table, from ID on its identifier.
WIDTH, HEIGHT, SCAN, SAMPLING, COMPONENTS, DC_TABLE, AC_TABLE, QUANT_TABLE, ID = 0, 1, 2, 3, 4, 8, 12, 16, 20
YUV420, YUV444, GREY = 0, 1, 2  # values of SAMPLING

_DHT, _DQT, _DRI, _SOF, _SOS, _COM, _APP0, _APP1, _APP14, _APP15 = (
    0xC4,
    0xDB,
    0xDD,
    0xC0,
    0xDA,
    0xFE,
    0xE0,
    0xE1,
    0xEE,
    0xEF,
)
_LARGEST_SIDE, _TOO_MANY = 65500, 1 << 29  # what libjpeg refuses, in px, and DALI, in samples
_TABLE_BYTES = 272  # of a Huffman table at most: 16 counts and 256 symbols
_EXIF = 0x45786966  # "Exif"
_ADOBE = 0x41646F62  # "Adob"


@compiled
def _two(jpeg: Any, at: int) -> Any:
    return u8_at(jpeg, at) << 8 | u8_at(jpeg, at + 1)


@compiled
def _four(jpeg: Any, at: int) -> Any:
    return _two(jpeg, at) << 16 | _two(jpeg, at + 2)


@compiled
def _quantisation(jpeg: Any, at: int, end: int, decoder: Any) -> Any:
    """Read a DQT segment; returns a bit for each table that it defines, -1 if it is declined."""
    defined = 0
    while at < end:
        number = u8_at(jpeg, at)
        if number > 3 or at + 65 > end:  # more: of 16 bits
            return -1
        for i in range(64):
            put16(decoder + QUANT, 64 * number + i, u8_at(jpeg, at + 1 + i))
        defined |= 1 << number
        at += 65
    return defined


@compiled
def _huffman(jpeg: Any, at: int, end: int, decoder: Any) -> Any:
    """Read a DHT segment; returns a bit for each table that it defines, -1 if it is declined."""
    defined = 0
    while at < end:
        which = u8_at(jpeg, at)
        if which & 0xEE or at + 17 > end:
            return -1
        table, count = which >> 4 << 1 | (which & 1), 16
        at += 1
        for i in range(16):
            count += u8_at(jpeg, at + i)
        if count > _TABLE_BYTES or at + count > end:
            return -1
        raw, is_same = decoder + RAW + _TABLE_BYTES * table, True
        for i in range(count):
            is_same &= u8_at(raw, i) == u8_at(jpeg, at + i)
        if not is_same:
            for i in range(count):
                put8(raw, i, u8_at(jpeg, at + i))
            if not build(decoder, table):
                put8(raw, 0, 255)  # no valid table begins so: the next one is built
                return -1
        defined |= 1 << table
        at += count
    return defined


@compiled
def _frame(jpeg: Any, at: int, end: int, decoder: Any) -> Any:
    """Read a SOF0 segment; returns whether it is not declined."""
    header, length = decoder + HEADER, end - at
    components = u8_at(jpeg, at + 5) if length > 5 else 0
    if length != 6 + 3 * components or (components != 1 and components != 3) or u8_at(jpeg, at) != 8:
        return False
    height, width = _two(jpeg, at + 1), _two(jpeg, at + 3)
    if width == 0 or height == 0 or max(width, height) > _LARGEST_SIDE or components * width * height >= _TOO_MANY:
        return False
    first = u8_at(jpeg, at + 7)
    sampling = GREY if components == 1 else YUV420 if first == 0x22 else YUV444
    if first != (0x22 if sampling == YUV420 else 0x11):
        return False
    for i in range(components):
        number, factors = u8_at(jpeg, at + 6 + 3 * i), u8_at(jpeg, at + 7 + 3 * i)
        # why the numbers: with others, libjpeg may take the components for red, green and blue
        if (i > 0 and factors != 0x11) or (components == 3 and number != i + 1) or u8_at(jpeg, at + 8 + 3 * i) > 3:
            return False
        put64(header, ID + i, number)
        put64(header, QUANT_TABLE + i, u8_at(jpeg, at + 8 + 3 * i))
    put64(header, WIDTH, width)
    put64(header, HEIGHT, height)
    put64(header, SAMPLING, sampling)
    put64(header, COMPONENTS, components)
    return True


@compiled
def _scan(jpeg: Any, at: int, end: int, decoder: Any, defined: int) -> Any:
    """Read a SOS segment after SOF0; returns whether it is not declined."""
    header = decoder + HEADER
    components = i64_at(header, COMPONENTS)
    if end - at != 4 + 2 * components or u8_at(jpeg, at) != components:
        return False
    for i in range(components):
        tables = u8_at(jpeg, at + 2 + 2 * i)
        if u8_at(jpeg, at + 1 + 2 * i) != i64_at(header, ID + i) or tables & 0xEE:
            return False
        dc, ac = tables >> 4, 2 + (tables & 1)
        if not (defined >> dc) & (defined >> ac) & (defined >> 4 + i64_at(header, QUANT_TABLE + i)) & 1:
            return False
        put64(header, DC_TABLE + i, dc)
        put64(header, AC_TABLE + i, ac)
    at += 1 + 2 * components
    put64(header, SCAN, end)
    return u8_at(jpeg, at) == 0 and u8_at(jpeg, at + 1) == 63 and u8_at(jpeg, at + 2) == 0


@compiled
def _pair_quantisation(decoder: Any) -> None:
    """Fill PAIR_QUANT: the quantisation tables of the pairs of blocks that are transformed together."""
    header = decoder + HEADER
    is_420 = i64_at(header, SAMPLING) == YUV420
    for pair in range(2 if is_420 else i64_at(header, COMPONENTS)):
        for half in range(2):
            component = pair + half if is_420 and pair == 1 else pair
            table = decoder + QUANT + 128 * i64_at(header, QUANT_TABLE + component)
            for i in range(64):
                put16(decoder + PAIR_QUANT, 128 * pair + 8 * half + np.int64(PLACE[i]), i16_at(table, i))


@compiled
def read_header(jpeg: Any, nbytes: int, decoder: Any) -> Any:
    """Read the header of the `nbytes` at the address `jpeg` into the memory of a decoder.

    Returns whether the file is not declined; it then ends with the marker of an end.
    """
    if nbytes < 4 or _two(jpeg, 0) != 0xFFD8 or _two(jpeg, nbytes - 2) != 0xFFD9:
        return False
    at, defined, has_frame = 2, 0, False
    while at + 4 <= nbytes:
        if u8_at(jpeg, at) != 0xFF:
            return False
        marker, length = u8_at(jpeg, at + 1), _two(jpeg, at + 2)
        start, end = at + 4, at + 2 + length
        if length < 2 or end > nbytes:
            return False
        if marker == _DQT:
            tables = _quantisation(jpeg, start, end, decoder)
            if tables < 0:
                return False
            defined |= tables << 4
        elif marker == _DHT:
            tables = _huffman(jpeg, start, end, decoder)
            if tables < 0:
                return False
            defined |= tables
        elif marker == _SOF:
            if has_frame or not _frame(jpeg, start, end, decoder):
                return False
            has_frame = True
        elif marker == _SOS:
            if not has_frame or not _scan(jpeg, start, end, decoder, defined):
                return False
            _pair_quantisation(decoder)
            return True
        elif marker == _DRI:
            if length != 4 or _two(jpeg, start) != 0:
                return False
        elif marker == _APP1 and length >= 6 and _four(jpeg, start) == _EXIF:
            return False  # why: it may say that the image is to be turned
        elif marker == _APP14 and length >= 14 and _four(jpeg, start) == _ADOBE:
            if u8_at(jpeg, start + 11) != 1 and not (has_frame and i64_at(decoder + HEADER, COMPONENTS) == 1):
                return False  # not YCbCr
        elif marker != _COM and not _APP0 <= marker <= _APP15:
            return False
        at = end
    return False
