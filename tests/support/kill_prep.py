"""Run prep and kill it at random moments, again and again, and then let it finish. Prints one line per kill.

`python -m tests.support.kill_prep KILLS SEED SHARDS ARGUMENTS-OF-PREP…`. SHARDS: how many the set gets;
its larger size must be 48 px. Worker processes are forked, so that a run starts in a tenth of a second.
"""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import signal
import sys
import time
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path

from resolute.prep.run import pool as process_pool
from tests.support.cli import prep as main

_TOO_LATE = 70


def attempt(argv: list[str]) -> int:
    """Start prep in a process group of its own; the id of the group."""
    child = os.fork()
    if child == 0:
        os.setsid()
        process_pool.open_pool = partial(process_pool.open_pool, method="fork")
        process_pool.start_fork_server = lambda: None  # why: nothing would use it
        try:
            status = main(argv)
        except BaseException:
            traceback.print_exc()
            status = 99
        os._exit(status)
    return child


def finished_shards(out: Path) -> int:
    return len(list(out.glob("records/*-48.rec")))


def wait_for_lock(out: Path) -> None:
    """Wait until forked workers, which hold their parent's open files, have ended too."""
    while (out / ".prep" / "lock").exists():
        with (out / ".prep" / "lock").open("r+") as lock:
            try:
                return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.001)


def run(kills: int, seed: int, argv: list[str]) -> int:
    """Kill at random moments, on average later each time, and the last two times after the last shard."""
    rng = random.Random(seed)
    out = Path(argv[argv.index("--out") + 1])
    for n in range(kills):
        child = attempt(argv)
        late = n >= kills - 2
        goal = SHARDS if late else rng.randrange(1 + SHARDS * n // kills)
        until = time.monotonic() + 120
        while finished_shards(out) < goal:
            assert time.monotonic() < until, f"{finished_shards(out)} of {goal} shards after two minutes"
            time.sleep(0.0005)
        time.sleep(rng.uniform(0, 0.01 if late else 0.03))
        if rng.random() < 0.5:  # only the main process; its workers have to notice
            os.kill(child, signal.SIGKILL)
            time.sleep(0.03)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        wait_for_lock(out)
        print(f"kill {n}: {finished_shards(out)} of {SHARDS} shards, status {status}", flush=True)
        if not os.WIFSIGNALED(status):
            return _TOO_LATE
    _, status = os.waitpid(attempt(argv), 0)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    SHARDS = int(sys.argv[3])
    for attempt_seed in range(int(sys.argv[2]), int(sys.argv[2]) + 5):
        result = run(int(sys.argv[1]), attempt_seed, sys.argv[4:])
        if result != _TOO_LATE:
            break
        print("prep ended before a kill, as this process had no core: starting over", flush=True)
        shutil.rmtree(sys.argv[sys.argv.index("--out") + 1])
    sys.exit(result)
