"""Completeness check of run-length encoded BMP files: Pillow silently fills in pixels that the runs leave out."""

from __future__ import annotations

import struct

from .reject import Reject

__all__ = ["check_bmp"]

_RLE8, _RLE4 = 1, 2


def check_bmp(data: bytes) -> None:
    """Raise `Reject` if the runs of a BMP file reach outside its picture or end too early.

    Source: Microsoft, Bitmap Compression (Windows GDI): a run is (count, value); count 0 escapes to end of line (0),
    end of bitmap (1), delta (2), or that many literal pixels, padded to 16 bits.
    """
    if len(data) < 34:
        return
    start, _, width, height, _, bits, compression = struct.unpack_from("<IIiiHHI", data, 10)
    if (compression, bits) not in ((_RLE8, 8), (_RLE4, 4)):
        return
    x = y = 0
    pos = start
    while pos + 1 < len(data):
        count, value = data[pos], data[pos + 1]
        pos += 2
        if count:
            x += count
        elif value == 0:
            x, y = 0, y + 1
        elif value == 1:
            return
        elif value == 2:
            if pos + 1 >= len(data):
                break
            x, y, pos = x + data[pos], y + data[pos + 1], pos + 2
        else:
            x += value
            pos += (value * bits + 15) // 16 * 2
        if x > width or y > abs(height):
            raise Reject(f"damaged: a run reaches {x},{y} in a picture of {width}x{abs(height)}")
    raise Reject("truncated: its runs have no end")
