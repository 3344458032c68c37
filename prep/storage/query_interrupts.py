"""Ctrl-C while DuckDB works: KeyboardInterrupt, in place of the errors that DuckDB raises for it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["deferred_interrupts", "query_interrupts"]


@contextmanager
def query_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt for a Ctrl-C in a query, or in a Python function that DuckDB calls."""
    try:
        yield
    except Exception as error:
        is_interrupted = type(error) is RuntimeError and "Query interrupted" in str(error)
        if is_interrupted or str(error).startswith("KeyboardInterrupt"):
            raise KeyboardInterrupt from None
        raise


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt for a Ctrl-C during the block only at its end.

    For short statements in which DuckDB calls Python: a Ctrl-C there is dropped, and its statement fails.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    interrupts: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if interrupts:
            raise KeyboardInterrupt
