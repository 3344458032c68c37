"""Run prep and kill it, again and again, at random moments, until it gets to its end. Prints a line a kill.

`python tests/prep/kills.py KILLS SEED ARGUMENTS-OF-PREP…`: worker processes are forked, so that a try costs a
tenth of a second instead of torch's import; everything else is prep as it is.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from functools import partial
from pathlib import Path

import prep.build
import prep.pool
import prep.report  # noqa: F401  # why: imported once, here
import prep.worker  # noqa: F401
from prep.__main__ import main


def attempt(argv: list[str]) -> int:
    """A child process that runs prep; its number."""
    child = os.fork()
    if child == 0:
        prep.pool.open_pool = partial(prep.pool.open_pool, method="fork")
        try:
            os._exit(main(argv))
        finally:
            os._exit(99)
    return child


def progress(out: Path) -> int:
    return len(list(out.glob(".prep/*.npz")))


def run(kills: int, seed: int, argv: list[str]) -> int:
    rng = random.Random(seed)
    out = Path(argv[argv.index("--out") + 1])
    for n in range(kills):
        child = attempt(argv)
        # why: a shard further each time, so that kills fall everywhere in the run; some come before any progress
        goal = progress(out) + rng.choice([0, 0, 1, 1, 1])
        while progress(out) < goal and os.waitpid(child, os.WNOHANG)[0] == 0:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.06))
        try:
            os.kill(child, signal.SIGKILL)
        except ProcessLookupError:
            print(f"kill {n}: came too late, the run had ended", flush=True)
            return 1
        _, status = os.waitpid(child, 0)
        print(f"kill {n}: {progress(out)} shards, status {status}", flush=True)
        if not os.WIFSIGNALED(status):
            return 1
    _, status = os.waitpid(attempt(argv), 0)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
