"""Where does the memory of a batch come from on a CPU, and where does it go when the last tensor on it is gone?

Back to the next batch. New memory has to be faulted in page by page, which took a sixth of a batch's time; and memory
that is as large as the largest batch of the run serves every stage, so that nothing has to grow at a change.
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
    """Lends arrays of float32. At most `keep` of `nbytes` each wait for their next use; more are made when needed."""

    def __init__(self, *, nbytes: int, keep: int) -> None:
        self._nbytes = nbytes
        self._free: deque[NDArray[np.uint8]] = deque(maxlen=keep)
        for _ in range(keep):
            self._free.append(np.empty(nbytes, np.uint8))
            self._free[-1][::_PAGE_BYTES] = 0  # why: faulted in now, not in a step

    def take(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """(shape) float32, whatever was in it. It is lent again once no array or tensor looks at it any more."""
        nbytes = 4 * math.prod(shape)
        if nbytes > self._nbytes:
            return np.empty(shape, np.float32)
        try:
            memory = self._free.pop()  # why the last one: caches may still hold of it
        except IndexError:
            memory = np.empty(self._nbytes, np.uint8)
        return np.asarray(_Loan(memory, self._free))[:nbytes].view(np.float32).reshape(shape)


class _Loan:
    """The base of all arrays on one loan: lives as long as any of them."""

    def __init__(self, memory: NDArray[np.uint8], back: deque[NDArray[np.uint8]]) -> None:
        self._memory, self._back = memory, back

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._memory.__array_interface__

    def __del__(self) -> None:
        self._back.append(self._memory)
