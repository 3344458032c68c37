"""malloc settings for training on a CPU: memory that a batch frees stays with the process for the next batch."""

from __future__ import annotations

import ctypes

__all__ = ["fault_in", "keep_freed_memory"]

_BLOCK_BYTES = 1 << 20


def keep_freed_memory() -> bool:
    """Make malloc keep freed memory instead of returning it to the OS and faulting it in again each step.

    Returns whether the C library accepted the settings (only glibc has `mallopt`).
    Source: mallopt(3); M_TRIM_THRESHOLD = -1, M_TOP_PAD = -2, M_MMAP_MAX = -4.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return all([mallopt(-4, 0), mallopt(-1, 2**31 - 1), mallopt(-2, 64 << 20)])


def fault_in(nbytes: int) -> None:
    """Add `nbytes` of already faulted-in memory to malloc's free list, for later allocations.

    why: small long-lived allocations fragment the freed memory, so later large ones need fresh pages, which are slow
    to touch for the first time. Source: malloc(3).
    """
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    # why in blocks: free memory need not be contiguous
    for block in [libc.malloc(ctypes.c_size_t(_BLOCK_BYTES)) for _ in range(nbytes // _BLOCK_BYTES)]:
        if block:
            ctypes.memset(block, 0, _BLOCK_BYTES)
            libc.free(ctypes.c_void_p(block))
