"""Where does the memory of a batch go when it is freed? On a CPU it should stay, for the next batch."""

from __future__ import annotations

import ctypes

__all__ = ["keep_freed_memory"]


def keep_freed_memory() -> bool:
    """On a CPU: let malloc keep what tensors free, instead of giving it back and faulting it in again each step.

    True if the C library took the settings (glibc does; others have no `mallopt`).
    Source: mallopt(3); M_TRIM_THRESHOLD = -1, M_TOP_PAD = -2, M_MMAP_MAX = -4.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return all([mallopt(-4, 0), mallopt(-1, 2**31 - 1), mallopt(-2, 64 << 20)])
