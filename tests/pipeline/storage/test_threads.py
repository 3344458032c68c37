"""`DaemonPool`: it ends at once, also while its threads are busy with work that cannot be interrupted."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import Any

from resolute.pipeline.storage.threads import DaemonPool
from tests import ROOT


class Cancelling:
    """Files whose `interrupt` drops the work that waits in `pool`, as that of a remote set does."""

    pool: DaemonPool

    def interrupt(self) -> None:
        self.pool.cancel()


def test_closing_while_all_threads_are_busy_ends_them_and_drops_what_waits() -> None:
    files: Any = Cancelling()
    files.pool = pool = DaemonPool(3, name="closing-test", files=files)
    begun = threading.Semaphore(0)

    def work() -> None:
        begun.release()
        time.sleep(0.2)

    futures = [pool.submit(work) for _ in range(6)]
    for _ in range(3):
        begun.acquire()
    pool.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("closing-test")]
    assert [future.cancelled() for future in futures] == [False] * 3 + [True] * 3


def test_submitted_tasks_never_keep_a_process_from_ending() -> None:
    code = """
import threading, time
from pathlib import Path
from resolute.pipeline.storage.base import open_files
from resolute.pipeline.storage.threads import DaemonPool
pool = DaemonPool(2, name="pool", files=open_files("."))
begun = threading.Event()
for _ in range(100):
    pool.submit(lambda: (begun.set(), time.sleep(600)))
begun.wait()
print("end", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                          timeout=60, check=True)  # fmt: skip
    assert done.stdout == "end\n"
