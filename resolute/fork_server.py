"""The fork server that starts worker processes, which Ctrl-C does not reach: their parent ends them."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext

__all__ = ["fork_server"]


def fork_server(preload: Sequence[str] = ()) -> ForkServerContext:
    """The context of the running fork server, started if necessary, with the modules `preload` imported.

    It starts with SIGINT blocked, and workers inherit that: interrupted during its imports, a worker would otherwise
    print a traceback.
    """
    context = multiprocessing.get_context("forkserver")
    if preload:
        context.set_forkserver_preload([*preload])
    resource_tracker.ensure_running()  # why first: when it starts, it unblocks the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context
