"""`CancelScope`: the reads that one owner has begun, which the owner cancels together."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from resolute.errors import Interrupted

__all__ = ["CancelScope", "interrupted"]


class CancelScope:
    """The running reads of one owner. `cancel` ends them with `Interrupted`, and all later ones. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # why: the garbage collector may close a loader while it is held
        self._cancelled = threading.Event()
        self._ends: set[Callable[[], object]] = set()
        self._children = weakref.WeakSet[CancelScope]()

    def child(self) -> CancelScope:
        """A scope that is cancelled by itself, or together with this one."""
        child = CancelScope()
        with self._lock:
            self._children.add(child)
        if self.cancelled():
            child.cancel()
        return child

    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait until the scope is cancelled, or so long. Returns whether it is cancelled."""
        return self._cancelled.wait(seconds)

    @contextmanager
    def ending(self, end: Callable[[], object]) -> Iterator[None]:
        """Within the block, `cancel` calls `end()`, which ends a request. It is called at once in a cancelled scope."""
        with self._lock:
            self._ends.add(end)
        try:
            if self.cancelled():
                end()
            yield
        finally:
            with self._lock:
                self._ends.discard(end)

    def cancel(self) -> None:
        self._cancelled.set()  # why first: a request or a child that is not in the lists yet sees it
        with self._lock:
            ends, children = list(self._ends), list(self._children)
        for end in ends:
            end()
        for child in children:
            child.cancel()


def interrupted(where: object) -> Interrupted:
    """The error of a read whose scope is cancelled."""
    return Interrupted(f"{where}: the read was interrupted, expected files that stay open; open them again")
