"""Commands in new interpreters, and the processes that belong to them or are left behind by them. Linux only.

Every command has a variable of its own in its environment, which all of its processes inherit; /proc shows it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from resolute.benchmarks.proc import stat_fields
from tests import ROOT

__all__ = ["Process", "end_leftovers", "send"]

_VARIABLE = "RESOLUTE_SOAK_COMMAND"
_numbers = itertools.count()


class Process:
    """A running `python -m MODULE WORDS` in a session of its own, with its output in files in the folder `output`."""

    def __init__(self, module: str, words: Iterable[object], env: Mapping[str, str], output: Path) -> None:
        number = next(_numbers)
        self._mark, self._stderr = f"{os.getpid()}:{number}:", output / f"{number}.err"
        self._began, self.elapsed_s = time.monotonic(), 0.0
        output.mkdir(parents=True, exist_ok=True)
        with (output / f"{number}.out").open("wb") as out, self._stderr.open("wb") as err:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", module, *map(str, words)],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, **env, _VARIABLE: self._mark},
                start_new_session=True,
            )
        self.pid = self._popen.pid

    @property
    def status(self) -> int | None:
        """As in `subprocess`: None while it runs, negative if a signal ended it."""
        if self._popen.returncode is None and self._popen.poll() is not None:
            self.elapsed_s = time.monotonic() - self._began
        return self._popen.returncode

    @property
    def stderr(self) -> str:
        return self._stderr.read_text(errors="replace")

    def members(self) -> list[int]:
        """All living processes of the command."""
        return _living(self._mark)

    def workers(self) -> list[int]:
        """Its ranks, or the workers of prep (forks of a server); not the helpers of multiprocessing."""

        def is_worker(pid: int) -> bool:
            words, parent = _words(pid), "".join(stat_fields(pid)[1:2])
            return pid != self.pid and bool(words) and (b"resolute" in words or words == _words(parent))

        return [pid for pid in self.members() if is_worker(pid)]

    def abort(self) -> None:
        """End the main process if it still runs; it writes the stacks of its threads to stderr first."""
        if self.status is None:
            self._popen.send_signal(signal.SIGABRT)
            self._popen.wait(10.0)


def send(number: signal.Signals, pids: Iterable[int]) -> None:
    """Send a signal to those of these processes that still exist."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def end_leftovers(*, grace_s: float) -> list[str]:
    """Wait for all processes of all commands to end; kill those that do not, and return their command lines."""
    until = time.monotonic() + grace_s
    while (pids := _living(f"{os.getpid()}:")) and time.monotonic() < until:
        time.sleep(0.01)
    names = [f"{pid}: {b' '.join(_words(pid)).decode(errors='replace')[:120]}" for pid in pids]
    while pids:
        send(signal.SIGKILL, pids)
        pids = _living(f"{os.getpid()}:")
    return names


def _living(mark: str) -> list[int]:
    """Processes whose variable begins with `mark`. One that has ended has no environment."""
    entry, pids = f"{_VARIABLE}={mark}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if any(each.startswith(entry) for each in path.read_bytes().split(b"\0")):
                pids.append(int(path.parent.name))
    return sorted(pids)


def _words(pid: int | str) -> list[bytes]:
    """The command line of a process; [] once it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return []
