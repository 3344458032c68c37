"""An ordered map over a thread pool that keeps a bounded number of calls and results in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

__all__ = ["thread_map"]

T = TypeVar("T")
R = TypeVar("R")


def thread_map(work: Callable[[T], R], items: Iterable[T], threads: int) -> Iterator[R]:
    """Yield `work(item)` in the order of `items`, which are consumed lazily; up to `threads` calls run at once."""
    if threads == 1:
        yield from map(work, items)
        return
    waiting: deque[Future[R]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) >= threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
