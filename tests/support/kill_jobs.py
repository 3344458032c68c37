"""Make a set by `resolute jobs plan`, `range` and `finish`, and kill each of them, again and again, at random moments.

`python -m tests.support.kill_jobs KILLS SEED OUT ARGUMENTS-OF-PREP…`. Two jobs with overlapping ranges run at a time.
Prints a line a kill, and the number of kills that met a running process.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from tests.support.kill_prep import attempt, finished_shards, wait_for_lock


def run(kills: int, seed: int, out: Path, argv: list[str]) -> int:
    rng = random.Random(seed)
    place = ["--out", str(out)]
    shards = ["range", *place, "--workers", "2", "--range"]
    met = 0
    for commands in ([["plan", *argv, *place]], [[*shards, ":40"], [*shards, "20:"]], [["finish", *place]]):
        for n in range(kills):
            children = [attempt(command) for command in commands]
            time.sleep(rng.uniform(0, 0.25))
            for child in children:
                if rng.random() < 0.5:  # the main process alone; its workers have to notice
                    os.kill(child, signal.SIGKILL)
                    time.sleep(0.03)
                with suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)
                met += os.WIFSIGNALED(os.waitpid(child, 0)[1])
            wait_for_lock(out)
            finished = finished_shards(out)
            print(f"{commands[0][0]} kill {n}: {finished} shards are finished, {met} met", flush=True)
        children = [attempt(command) for command in commands]
        for child in children:
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if status:
                return status
    print(f"{met} of {4 * kills} kills met a running process")
    return 0


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]))
