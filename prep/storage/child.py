"""Set-up of child processes that read for a command."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from multiprocessing import parent_process

__all__ = ["init_child"]


def init_child(environ: Mapping[str, str]) -> None:
    """Set environment variables; ignore Ctrl-C, which the parent handles; end with the parent, however that ends."""
    os.environ.update(environ)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
