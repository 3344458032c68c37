"""Runs a function in a child process: work whose faults can end or block a process, such as decoding on a GPU."""

from __future__ import annotations

import os
import signal
import textwrap
from collections.abc import Callable
from multiprocessing.connection import Connection

from resolute.fork_server import fork_server

__all__ = ["trial_fault"]


def trial_fault(trial: Callable[[], str | None], *, limit_s: float = 120.0) -> str | None:
    """Run `trial`, a picklable function, in a child process: its answer, or how it failed; None: nothing is wrong.

    It fails if it raises, if its process ends with another status than 0, or does not end within `limit_s` s.
    """
    context = fork_server()
    answers, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(theirs, trial), daemon=True)
    child.start()
    theirs.close()
    try:
        child.join(limit_s)
        if child.exitcode is None:
            return f"no end within {limit_s:g} s"
        if child.exitcode < 0:
            return f"killed by {signal.Signals(-child.exitcode).name}"
        if child.exitcode:
            return f"ended with status {child.exitcode}"
        answer: str | None = answers.recv()
        return answer
    finally:
        child.kill()
        child.join(5)  # why bounded: a process that waits in the GPU's driver cannot be killed
        answers.close()


def _answer(connection: Connection, trial: Callable[[], str | None]) -> None:
    """The child: only the answer leaves it, not what libraries print."""
    silent = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):
        os.dup2(silent, output)
    try:
        answer = trial()
    except Exception as error:  # why so broad: DALI raises whatever its operators raise
        answer = textwrap.shorten(str(error) or type(error).__name__, 300)
    connection.send(answer)
