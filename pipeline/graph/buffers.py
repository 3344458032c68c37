"""`BufferPool`: recycles the memory of batches once no array or tensor uses it any more.

Fresh memory is faulted in page by page, which took a sixth of a batch's time. Every buffer has the size of the run's
largest batch, so it serves all stages and nothing is allocated at a stage change.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["BufferPool"]

_PAGE_BYTES = 4096
_ALIGNED = 64  # arrays begin at a multiple of so many bytes, a line of the CPU's caches


class BufferPool:
    """Lends arrays. At most `count` free buffers of `nbytes` each are kept; more are allocated if needed.

    For an array above `nbytes` the pool's size grows, and smaller buffers are no longer kept.
    """

    def __init__(self, *, nbytes: int, count: int) -> None:
        self._nbytes, self._count = nbytes, count
        self._lent: set[_Return] = set()
        self._free: deque[_Return] = deque()
        loans = [self._lend() for _ in range(count)]
        for loan in loans:
            loan.memory[::_PAGE_BYTES] = 0  # why: fault the pages in now, not during a step

    def take(self, shape: tuple[int, ...], dtype: Any = np.float32) -> NDArray[Any]:
        """An uninitialised array of `shape`; its memory is reused once no array or tensor refers to it."""
        nbytes = np.dtype(dtype).itemsize * math.prod(shape)
        if nbytes > self._nbytes:
            self._nbytes = nbytes + nbytes // 8  # why more: sizes of encoded batches vary
        return np.asarray(self._lend())[:nbytes].view(dtype).reshape(shape)

    def _lend(self) -> _Loan:
        loan = _Loan(self._free_memory())
        returned = _Return(loan, self._free.append)
        returned.memory = loan.memory
        self._lent.add(returned)
        return loan

    def _free_memory(self) -> NDArray[np.uint8]:
        while len(self._free) > self._count:
            self._lent.discard(self._free.popleft())
        while self._free:
            returned = self._free.pop()  # why the last: most likely still in the CPU's cache
            self._lent.discard(returned)
            if len(returned.memory) == self._nbytes:
                return returned.memory
        memory = np.empty(self._nbytes + _ALIGNED, np.uint8)
        first = -memory.ctypes.data % _ALIGNED
        return memory[first : first + self._nbytes]


class _Loan:
    """Base object of all arrays on a buffer."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self.memory, self.__array_interface__ = memory, memory.__array_interface__


class _Return(weakref.ref[_Loan]):
    """Appended to the pool's free buffers when its loan is gone, that is, when the last array on it is.

    why not `__del__`: Python would handle Ctrl-C in it, and ignore what the handler raises. This runs no Python code.
    """

    memory: NDArray[np.uint8]
