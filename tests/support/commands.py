"""Run command lines as processes, forked from a server that has already loaded torch, timm, DALI and prep.

A new interpreter takes seconds to load them, a fork milliseconds. Each command is still a process with its own working
folder, standard streams and signals, and runs its module as `python -m MODULE` does.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests import ROOT

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The result of a command: its exit status (128 + the signal that ended it) and its outputs."""

    status: int
    out: str
    err: str


class Server:
    """The single-threaded process that forks the commands, one per test session."""

    _running: Server | None = None

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.commands"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # why: it starts threads when it is loaded
        )
        atexit.register(self.stop)

    @classmethod
    def get(cls) -> Server:
        if cls._running is None:
            cls._running = cls()
        return cls._running

    def ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._process.communicate()


class Command:
    """A running command line. `out` and `err` are the paths of its outputs."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[object],
        *,
        folder: Path,
        scratch: Path,
        stdout: str = "",
        unprivileged: bool = False,
    ) -> None:
        """name: a command of `resolute`, such as "jobs plan", or a module. `stdout`: a file instead of the one in
        `scratch`."""
        module, words = (name, []) if "." in name or name == "resolute" else ("resolute", name.split())
        number = f"{time.monotonic_ns()}"
        self.out, self.err = scratch / f"{number}.out", scratch / f"{number}.err"
        self.out.touch()
        self.err.touch()
        self._status: int | None = None
        self.pid: int = Server.get().ask(
            start=module,
            arguments=[*words, *map(str, arguments)],
            folder=str(folder),
            out=stdout or str(self.out),
            err=str(self.err),
            unprivileged=unprivileged,
        )

    @property
    def running(self) -> bool:
        if self._status is None:
            self._status = Server.get().ask(wait=self.pid)
        return self._status is None

    def wait_for(self, text: str, *, seconds: float = 60.0) -> None:
        """Wait until one of the outputs contains `text`."""
        until = time.monotonic() + seconds
        while text not in self.out.read_text(errors="replace") + self.err.read_text(errors="replace"):
            assert self.running, f"ended before {text!r}: {self.err.read_text()}"
            assert time.monotonic() < until, f"no {text!r} after {seconds} s"
            time.sleep(0.01)

    def send(self, number: int) -> None:
        """Send a signal, unless the command has ended."""
        if self.running:
            os.kill(self.pid, number)

    def end(self, *, seconds: float = 120.0) -> Ended:
        until = time.monotonic() + seconds
        while self.running and time.monotonic() < until:
            time.sleep(0.005)
        if self.running:
            os.killpg(self.pid, signal.SIGKILL)
            pytest.fail(f"still running after {seconds} s; stderr: {self.err.read_text(errors='replace')}")
        assert self._status is not None
        return Ended(
            status=self._status if self._status >= 0 else 128 - self._status,
            out=self.out.read_text(errors="replace"),
            err=self.err.read_text(errors="replace"),
        )


def run(name: str, arguments: Sequence[object], *, folder: Path, scratch: Path, **words: Any) -> Ended:
    """Run a command line to its end."""
    return Command(name, arguments, folder=folder, scratch=scratch, **words).end()


def timed_in_forks(start: Callable[..., float], scratch: Path) -> Callable[..., float]:
    """A stand-in for the benchmarks' `timed`, which forks the modules instead of starting them: no imports to wait for.

    start: the function that it replaces, which still starts programs that are not modules.
    """

    def timed(words: Sequence[str], log: Path, *, name: str, **how: Any) -> float:
        if words[1] != "-m":
            return start(words, log, name=name, **how)
        began = time.perf_counter()
        done = run(words[2], words[3:], folder=ROOT, scratch=scratch, stdout=str(log))
        assert done.status == 0, f"{name}: {done.err}"
        return time.perf_counter() - began

    return timed


def _serve() -> None:
    """Fork a command for each {"start": module, ...} on stdin; answer {"wait": pid} with its status, or null."""
    import tests.support.preloaded  # noqa: F401

    load_compiled()
    threads = os.listdir("/proc/self/task")  # noqa: PTH208
    assert len(threads) == 1, "a fork would lose the other threads"
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            pid, status = os.waitpid(request["wait"], os.WNOHANG)
            answer: Any = os.waitstatus_to_exitcode(status) if pid else None
        else:
            # why: fork hooks and `_run` are not part of the command, which unblocks signals once it is guarded
            signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
            answer = os.fork()
            if answer == 0:
                _run(request.pop("start"), **request)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _run(module: str, *, arguments: list[str], folder: str, out: str, err: str, unprivileged: bool) -> None:
    os.setpgid(0, 0)
    os.chdir(folder)
    redirect_streams(Path(out), Path(err))
    if unprivileged and os.geteuid() == 0:
        _obey_permissions()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    sys.argv = [module, *arguments]
    warnings.filterwarnings("ignore", "'.*' found in sys.modules", RuntimeWarning)  # why: it is preloaded
    status: object = 0
    _unblock_after_guard()
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code
    except BaseException:  # why: as Python prints an uncaught exception
        traceback.print_exc()
        status = 1
    end_process(status if isinstance(status, int) else 0 if status is None else 1)


def redirect_streams(stdout: Path, stderr: Path) -> None:
    """In a fork: append its output to these files, and let it read nothing."""
    for descriptor, path in ((0, Path(os.devnull)), (1, stdout), (2, stderr)):
        handle = os.open(path, os.O_RDONLY if descriptor == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(handle, descriptor)
        os.close(handle)
    # why closefd: `run_main` replaces these objects, and otherwise they would close the descriptors
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(i, mode, closefd=False) for i, mode in enumerate("rww"))


def end_process(status: int) -> NoReturn:
    """In a fork: end as the interpreter does: wait for threads, run the exit handlers, flush."""
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            file.flush()
    os._exit(status)


def load_compiled() -> None:
    """Load all of this project's compiled functions from numba's cache."""
    from numba.core.dispatcher import Dispatcher

    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "resolute":
            continue
        dispatchers: list[Any] = [value for value in vars(module).values() if isinstance(value, Dispatcher)]
        for dispatcher in dispatchers:
            if dispatcher._can_compile and hasattr(dispatcher._cache, "_cache_file"):
                for key in list(dispatcher._cache._cache_file._load_index()):
                    dispatcher.compile(key[0])


def _unblock_after_guard() -> None:
    """Unblock signals once the command has called `guard_process`; before that Python itself is still starting."""
    import resolute.console

    guard = resolute.console.guard_process

    def guard_and_unblock() -> None:
        guard()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    resolute.console.guard_process = guard_and_unblock


def _obey_permissions() -> None:
    """Drop root's right to read and write everything, for this process and its children.

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
    """{name: (mode, content)} of every path below `folder`; the content of folders is empty."""
    return {
        str(path.relative_to(folder)): (path.lstat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in sorted(folder.rglob("*"))
    }


def assert_one_line(ended: Ended) -> None:
    """The form of every error: exactly one line *where: got X, expected Y; do Z*, status 2, no traceback."""
    assert ended.status == 2, (ended.status, ended.err)
    # progress of indexing is printed before its errors are known
    lines = [line for line in ended.err.splitlines() if ": indexing " not in line]
    assert len(lines) == 1, ended.err
    assert re.match(r"(resolute[\w -]*|python -m [\w.]+): .+: .+", lines[0]), lines[0]
    assert ";" in lines[0], lines[0]
    assert "Traceback" not in ended.out


if __name__ == "__main__":
    _serve()
