"""`fetch`: reads and checksums many byte ranges of open files in one compiled call that releases the GIL."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from resolute.pipeline.jit import compiled

__all__ = ["TAG_BYTES", "EncodedImages", "crc32", "fetch"]

# The encoded images of a batch: (N, width) with padded rows, or a list of N arrays (nbytes + TAG_BYTES,). The last
# bytes of each are its tag, the number of the batch as int32; decoders ignore what follows an image.
EncodedImages = NDArray[np.uint8] | list[NDArray[np.uint8]]
TAG_BYTES = 4

_pread: Any = types.ExternalFunction("pread", types.intp(types.int32, types.uintp, types.uintp, types.int64))
_U32 = np.uint32


def _tables() -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Slicing-by-16 tables of CRC-32, (16, 256).

    Source: Kounavis and Berry, A systematic approach to building high performance CRC generators, ISCC 2005.
    """
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
    """Read `sizes[i]` bytes at `offsets[i]` of the descriptor `files[i]` into `out[starts[i]:]`, for each i < N.

    Returns (N,) bool: whether the range was read to its end and, if `check`, its CRC-32 is `expected[i]`.
    """
    good = np.zeros(len(files), np.bool_)
    for i in range(len(files)):
        piece = out[starts[i] : starts[i] + sizes[i]]
        done = 0
        while done < len(piece):  # why a loop: pread may return fewer bytes
            n = _pread(files[i], piece.ctypes.data + done, len(piece) - done, offsets[i] + done)
            if n <= 0:
                break
            done += n
        good[i] = done == len(piece) and (not check or crc32(piece) == expected[i])
    return good


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
