"""`python -m tests.support.execute CODE ARGUMENTS…` runs `python -c CODE ARGUMENTS…` and can be forked."""

from __future__ import annotations

import signal
import sys

from resolute.console import guard_process

if __name__ == "__main__":
    guard_process()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a fresh interpreter
    code, sys.argv = sys.argv[1], ["-c", *sys.argv[2:]]
    exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
