"""`with_retries`: repeats a read after failures that may pass, with a wait before each further attempt."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from .cancel import CancelScope, interrupted

__all__ = ["backoff", "with_retries"]

Answer = TypeVar("Answer")

_MAX_WAIT_S = 20.0
# why not the global generator: a flaky disk must not change the random numbers of a seeded run
_jitter = random.SystemRandom()


def with_retries(
    work: Callable[[], Answer],
    *,
    waits_s: Iterable[float],
    may_pass: Callable[[Exception], bool],
    scope: CancelScope | None = None,
    where: object = "",
) -> Answer:
    """The result of `work`, repeated after each of `waits_s` while it raises an error that `may_pass`.

    Raises the error of the last attempt, any other error at once, and `Interrupted`, which names `where`, if `scope` is
    cancelled during a wait.
    """
    for wait_s in waits_s:
        try:
            return work()
        except Exception as error:
            if not may_pass(error):
                raise
        if scope is None:
            time.sleep(wait_s)
        elif scope.wait(wait_s):
            raise interrupted(where)
    return work()


def backoff(tries: int, first_wait_s: float) -> Iterator[float]:
    """The waits between `tries` attempts, in seconds: each about twice the one before, up to 20 s.

    Source: "Exponential Backoff And Jitter", AWS Architecture Blog, 2015 ("equal jitter").
    """
    for n in range(tries - 1):
        yield min(first_wait_s * 2**n, _MAX_WAIT_S) * _jitter.uniform(0.5, 1.0)
