"""Run the command lines as real processes, forked from a server that has loaded torch, timm, DALI and prep already.

A fresh interpreter takes seconds to load them; a fork takes milliseconds. Each command still is a process of its own,
with its own working folder, standard streams and signals, and runs its module as `python -m MODULE` does.
"""

from __future__ import annotations

import ctypes
import io
import multiprocessing
import os
import re
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PRELOADED = ["tests.preloaded"]

@dataclass(frozen=True, kw_only=True)
class Ended:
    """What a command left: its exit status (128 + the signal that ended it), and its outputs."""

    status: int
    out: str
    err: str


class Command:
    """A command line that was started. `out` and `err` are the paths of its outputs."""

    def __init__(
        self, module: str, arguments: Sequence[object], *, folder: Path, scratch: Path, stdout: str = "",
        closed: Sequence[int] = (), unprivileged: bool = False,
    ) -> None:  # fmt: skip
        """`stdout`: a file in place of the one in `scratch`; `closed`: descriptors that are not open at its start."""
        number = f"{time.monotonic_ns()}"
        self.out, self.err = scratch / f"{number}.out", scratch / f"{number}.err"
        self.out.touch()
        self.err.touch()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        # why not a daemon: prep starts processes of its own
        self.process = context.Process(
            target=_run, daemon=False,
            args=(module, [str(word) for word in arguments], str(folder), stdout or str(self.out), str(self.err),
                  tuple(closed), unprivileged),
        )  # fmt: skip
        self.process.start()

    def wait_for(self, text: str, *, seconds: float = 60.0) -> None:
        """Wait until one of the outputs contains `text`."""
        until = time.monotonic() + seconds
        while text not in self.out.read_text(errors="replace") + self.err.read_text(errors="replace"):
            assert self.process.is_alive(), f"ended before {text!r}: {self.err.read_text()}"
            assert time.monotonic() < until, f"no {text!r} after {seconds} s"
            time.sleep(0.01)

    def send(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self, *, seconds: float = 120.0) -> Ended:
        self.process.join(seconds)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
            pytest.fail(f"still running after {seconds} s; stderr: {self.err.read_text(errors='replace')}")
        code = self.process.exitcode
        assert code is not None
        return Ended(
            status=code if code >= 0 else 128 - code,
            out=self.out.read_text(errors="replace"), err=self.err.read_text(errors="replace"),
        )  # fmt: skip


def run(module: str, arguments: Sequence[object], *, folder: Path, scratch: Path, **words: Any) -> Ended:
    """Run a command line to its end."""
    return Command(module, arguments, folder=folder, scratch=scratch, **words).end()


def _run(
    module: str, arguments: list[str], folder: str, out: str, err: str, closed: tuple[int, ...], unprivileged: bool,
) -> None:  # fmt: skip
    os.setpgid(0, 0)
    os.chdir(folder)
    for descriptor, path in ((1, out), (2, err)):
        opened = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    if unprivileged and os.geteuid() == 0:
        _obey_permissions()
    sys.stdin = open(os.devnull)  # noqa: PTH123, SIM115
    sys.stdout, sys.stderr = (io.TextIOWrapper(io.FileIO(d, "w", closefd=False), line_buffering=True) for d in (1, 2))
    for descriptor in closed:
        os.close(descriptor)
        setattr(sys, ("stdin", "stdout", "stderr")[descriptor], None)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = [module, *arguments]
    status: object = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code
    except BaseException:  # why: what Python itself would print of an error that nobody caught
        traceback.print_exc()
        status = 1
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(status if isinstance(status, int) else 0 if status is None else 1)


def _obey_permissions() -> None:
    """Give up root's right to read and write everything, for this process and all that it starts.

    Source: capabilities(7), capset(2): version 3 takes two words of each of effective, permitted, inheritable.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    header, words = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, words) == 0
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        assert libc.prctl(24, capability, 0, 0, 0) == 0  # PR_CAPBSET_DROP
        for word in range(3):
            words[word] &= ~(1 << capability)
    assert libc.capset(header, words) == 0


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file below `folder`: {name: (mode, content)}, folders with their mode alone."""
    return {
        str(path.relative_to(folder)): (path.lstat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in sorted(folder.rglob("*"))
    }


def assert_one_line(ended: Ended, *, prefix: str = "") -> None:
    """The form of every error: exactly one line *where: got X, expected Y; do Z*, status 2, no traceback."""
    assert ended.status == 2, (ended.status, ended.err)
    lines = ended.err.splitlines()
    assert len(lines) == 1, ended.err
    assert re.match(r"\w+: .+: .+", lines[0]), lines[0]
    assert ";" in lines[0], lines[0]
    assert "Traceback" not in ended.out
