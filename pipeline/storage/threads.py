"""Daemon threads for reads: they never keep the process from exiting, not even when they hang on a dead mount."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

__all__ = ["DaemonPool", "end_threads"]

Answer = TypeVar("Answer")


_JOIN_S = 1.5  # why bounded: a system call on a dead mount never returns


class DaemonPool:
    """A pool of daemon threads that start submitted work in order and never keep the process from exiting.

    why not ThreadPoolExecutor: at interpreter exit it first finishes all submitted work. As a context manager, an
    exception in the block drops work that has not begun and interrupts running reads.
    """

    def __init__(self, threads: int, *, name: str, cancel: Callable[[], object]) -> None:
        """`cancel()` ends the running reads of the submitted work; `close` calls it."""
        self._max_threads, self._name, self._cancel_reads = threads, name, cancel
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, work: Callable[[], Answer]) -> Future[Answer]:
        """Run `work()` in the pool. Raises `RuntimeError` after `close`."""
        future: Future[Answer] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("closed")
            self._tasks.put((future, work))
            if len(self._threads) < self._max_threads:
                name = f"{self._name}-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
                self._threads[-1].start()
        return future

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, work = task
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:  # re-raised by `Future.result`
                    future.set_exception(error)
            del task, future, work  # why: do not keep their memory alive until the next task

    def cancel(self) -> None:
        """Cancel work that has not begun."""
        with suppress(queue.Empty):
            while (task := self._tasks.get_nowait()) is not None:
                task[0].cancel()
            self._tasks.put(None)  # ends a thread; `close` put it there, and nothing but others like it after it

    def close(self, *, interrupt: bool = True) -> None:
        """End the threads: after all submitted work, or, with `interrupt`, without it and within 2 s."""
        with self._lock:
            self._closed = True
        if interrupt:
            self.cancel()
        for _ in self._threads:
            self._tasks.put(None)
        if interrupt:
            end_threads(self._threads, self._cancel_reads)
        else:
            for thread in self._threads:
                with suppress(RuntimeError):  # as in `_has_ended`
                    thread.join()

    def __enter__(self) -> DaemonPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(interrupt=kind is not None)


def end_threads(threads: Sequence[threading.Thread], cancel: Callable[[], object]) -> None:
    """Join threads that have been asked to end, calling `cancel()` until they do.

    Daemon threads that are stuck in a system call for longer than 1.5 s are abandoned.
    """
    until = time.monotonic() + _JOIN_S
    for thread in threads:
        while not _has_ended(thread) and time.monotonic() < until:
            cancel()


def _has_ended(thread: threading.Thread) -> bool:
    """Whether a thread ends within 20 ms."""
    try:
        thread.join(0.02)
    except RuntimeError:  # a Ctrl-C came while it was being started, and it has not begun yet
        time.sleep(0.02)
        return False
    return not thread.is_alive()
