"""`resolute` that sends itself signals at the nth call of a function, independent of the machine's speed.

`python -m tests.support.signal_at_call MODULE:OWNER:FUNCTION:CALL:SIGNAL[,SIGNAL…] WORDS-OF-RESOLUTE…`; with a leading
--nohup SIGHUP is ignored from the start.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from typing import Any

from resolute.cli import main
from resolute.console import guard_process, run_main


def install(cue: str) -> None:
    module, owner, name, call, numbers = cue.split(":")
    holder: Any = importlib.import_module(module)
    holder = getattr(holder, owner) if owner else holder
    original, calls = getattr(holder, name), 0

    def call_and_signal(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == int(call):
            for number in numbers.split(","):
                os.kill(os.getpid(), int(number))
        return original(*args, **kwargs)

    setattr(holder, name, call_and_signal)


if __name__ == "__main__":
    words = sys.argv[1:]
    if words[0] == "--nohup":
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        words = words[1:]
    guard_process()
    install(words[0])
    run_main(lambda: main(words[1:]))
