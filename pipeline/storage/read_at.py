"""Reading at an offset: all bytes up to the end of the file, whatever parts the system delivers them in.

One `pread` may return less than was asked for: network disks do so, and Linux always does above 2 GiB. Taken for the
whole, such a part looks like damage.
"""

from __future__ import annotations

import os

__all__ = ["read_at"]


def read_at(descriptor: int, nbytes: int, offset: int) -> bytes:
    """`nbytes` bytes of an open file from `offset` on, fewer only where the file ends. Raises `OSError`."""
    data = os.pread(descriptor, nbytes, offset)
    if len(data) == nbytes or not data:
        return data
    parts = [data]
    while data and (left := nbytes - sum(map(len, parts))):
        data = os.pread(descriptor, left, offset + nbytes - left)
        parts.append(data)
    return b"".join(parts)
