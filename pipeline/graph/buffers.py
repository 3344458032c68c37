"""`BufferPool`: recycles the memory of batches once no array or tensor uses it any more.

Fresh memory is faulted in page by page, which took a sixth of a batch's time. Every buffer has the size of the run's
largest batch, so it serves all stages and nothing is allocated at a stage change.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["BufferPool"]

_PAGE_BYTES = 4096


class BufferPool:
    """Lends arrays. At most `count` free buffers of `nbytes` each are kept; more are allocated if needed.

    For an array above `nbytes` the pool's size grows, and smaller buffers are no longer kept.
    """

    def __init__(self, *, nbytes: int, count: int) -> None:
        self._nbytes = nbytes
        self._free: deque[NDArray[np.uint8]] = deque(maxlen=count)
        for _ in range(count):
            self._free.append(np.empty(nbytes, np.uint8))
            self._free[-1][::_PAGE_BYTES] = 0  # why: fault the pages in now, not during a step

    def take(self, shape: tuple[int, ...], dtype: Any = np.float32) -> NDArray[Any]:
        """An uninitialised array of `shape`; its memory is reused once no array or tensor refers to it."""
        nbytes = np.dtype(dtype).itemsize * math.prod(shape)
        if nbytes > self._nbytes:
            self._nbytes = nbytes + nbytes // 8  # why more: sizes of encoded batches vary
            self._free.clear()
        try:
            memory = self._free.pop()  # why the last: most likely still in the CPU's cache
        except IndexError:
            memory = np.empty(self._nbytes, np.uint8)
        return np.asarray(_Loan(memory, self))[:nbytes].view(dtype).reshape(shape)

    def give_back(self, memory: NDArray[np.uint8]) -> None:
        """For `_Loan` only. Any thread may call it, at any time."""
        if len(memory) == self._nbytes:
            self._free.append(memory)


class _Loan:
    """Base object of all arrays on a buffer; when the last of them is gone, it returns the buffer to the pool."""

    def __init__(self, memory: NDArray[np.uint8], pool: BufferPool) -> None:
        self._memory, self._pool = memory, pool

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._memory.__array_interface__

    def __del__(self) -> None:
        self._pool.give_back(self._memory)
