"""Where does the memory of a batch go when it is freed? On a CPU it should stay, for the next batch."""

from __future__ import annotations

import ctypes

__all__ = ["fault_in", "keep_freed_memory"]

_PIECE_BYTES = 1 << 20


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


def fault_in(nbytes: int) -> None:
    """Let malloc have so many bytes in hand, touched, for what is allocated next.

    why: small things that stay come to lie between large ones that were freed, so that the next large ones need new
    memory, which is slow to touch for the first time. Source: malloc(3).
    """
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    # why in pieces: what is free lies in several blocks
    for place in [libc.malloc(ctypes.c_size_t(_PIECE_BYTES)) for _ in range(nbytes // _PIECE_BYTES)]:
        if place:
            ctypes.memset(place, 0, _PIECE_BYTES)
            libc.free(ctypes.c_void_p(place))
