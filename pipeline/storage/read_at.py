"""`read_at`: pread(2) that never returns short before the end of the file.

A single `pread` may return fewer bytes than requested: network disks do so, and Linux always does above 2 GiB. A caller
that trusts it would take the short read for a damaged file.
"""

from __future__ import annotations

import os

__all__ = ["read_at"]


def read_at(descriptor: int, nbytes: int, offset: int) -> bytes:
    """Read `nbytes` bytes of an open file from `offset` on; fewer only at the end of the file. Raises `OSError`."""
    data = os.pread(descriptor, nbytes, offset)
    if len(data) == nbytes or not data:
        return data
    parts = [data]
    while data and (left := nbytes - sum(map(len, parts))):
        data = os.pread(descriptor, left, offset + nbytes - left)
        parts.append(data)
    return b"".join(parts)
