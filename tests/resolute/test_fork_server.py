"""Ctrl-C does not reach worker processes, not even before they can ignore it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests import ROOT

PROGRAM = """
import signal, sys
from resolute.fork_server import fork_server

def blocked(pipe):
    pipe.send(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))

if __name__ == "__main__":
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    context = fork_server()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    ours, theirs = context.Pipe()
    process = context.Process(target=blocked, args=(theirs,))
    process.start()
    print(ours.recv())
    process.join()
"""


def test_workers_start_with_ctrl_c_blocked_and_their_parent_does_not(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    ran = subprocess.run(
        [sys.executable, tmp_path / "program.py"], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip
    assert (ran.stdout, ran.stderr) == ("True\n", "")
