"""How are many pieces of files read and checked with no Python in between? In one call that leaves the GIL free."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from pipeline.jit import compiled

__all__ = ["CHANGED", "FAILED", "SHORT", "WHOLE", "Pieces", "fetch"]

# The encoded images of a batch: rows of equal length, each image padded, or a list of arrays.
Pieces = NDArray[np.uint8] | list[NDArray[np.uint8]]

WHOLE, SHORT, FAILED, CHANGED = range(4)  # what became of a piece: changed is another CRC-32

_pread: Any = types.ExternalFunction("pread", types.intp(types.int32, types.uintp, types.uintp, types.int64))
_U32 = np.uint32


def _tables() -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Source: Kounavis and Berry, A systematic approach to building high performance CRC generators, ISCC 2005."""
    tables = np.zeros((16, 256), np.uint32)
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = value >> 1 ^ (0xEDB88320 if value & 1 else 0)
        tables[0, byte] = value
    for k in range(1, 16):
        tables[k] = tables[k - 1] >> 8 ^ tables[0][tables[k - 1] & 0xFF]
    return tables


_TABLES = _tables()


@compiled
def fetch(files: Any, offsets: Any, sizes: Any, expected: Any, check: Any, out: Any, starts: Any) -> Any:
    """Read piece i, `sizes[i]` bytes at `offsets[i]` of the open file `files[i]`, into `out[starts[i]:]`.

    Returns what became of each, (N,) uint8 (CHANGED only if `check`), and its bytes read or its CRC-32, (N,) int64.
    """
    became, got = np.zeros(len(files), np.uint8), np.zeros(len(files), np.int64)
    for i in range(len(files)):
        piece = out[starts[i] : starts[i] + sizes[i]]
        done = 0
        while done < len(piece):  # why: a network disk may answer in parts
            n = _pread(files[i], piece.ctypes.data + done, len(piece) - done, offsets[i] + done)
            if n < 0:
                became[i] = FAILED
            if n <= 0:
                break
            done += n
        got[i] = done
        if became[i] == WHOLE and done < len(piece):
            became[i] = SHORT
        if became[i] == WHOLE and check:
            got[i] = crc32(piece)
            if got[i] != expected[i]:
                became[i] = CHANGED
    return became, got


@compiled
def crc32(data: Any) -> Any:
    """zlib's CRC-32 of (N,) uint8, sixteen bytes at a time."""
    crc, i, low = _U32(0xFFFFFFFF), 0, _U32(0xFF)
    while i + 16 <= len(data):
        following = _U32(0)
        for word in range(4):
            k = i + 4 * word
            four = _U32(data[k]) | _U32(data[k + 1]) << _U32(8)
            four |= _U32(data[k + 2]) << _U32(16) | _U32(data[k + 3]) << _U32(24)
            if word == 0:
                four ^= crc
            table = 15 - 4 * word
            following ^= _U32(
                _TABLES[table, four & low]
                ^ _TABLES[table - 1, four >> _U32(8) & low]
                ^ _TABLES[table - 2, four >> _U32(16) & low]
                ^ _TABLES[table - 3, four >> _U32(24)]
            )
        crc = following
        i += 16
    while i < len(data):
        crc = _U32(crc >> _U32(8)) ^ _TABLES[0, (crc ^ _U32(data[i])) & low]
        i += 1
    return crc ^ _U32(0xFFFFFFFF)
