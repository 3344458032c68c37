"""Runs commands as forks of this preloaded interpreter, and detects processes that they leave behind.

A fork needs no imports, so a command starts in milliseconds; `load_compiled` prepares what every fork would otherwise
repeat. Each command is its own session with its output in files. This process is a subreaper: processes
that a command leaves behind become its children, and `end_leftovers` finds them. Linux only.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from resolute.benchmarks.proc import descendants, stat_fields
from resolute.console import guard_process, run_main
from resolute.errors import ResoluteError

__all__ = ["Command", "Process", "adopt_orphans", "check_single_threaded", "end_leftovers", "end_process", "in_child",
           "load_compiled", "redirect_streams", "start"]  # fmt: skip

_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.002
RANK_GRACE_S = 20.0  # for the remaining ranks to end after one is killed
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command line: what `python -m module arguments` does, on `ranks` processes.

    main: its `main(arguments)` with everything already imported. new_interpreter: start one instead of forking.
    """

    module: str
    main: Callable[[list[str]], int]
    arguments: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    ranks: int = 1
    new_interpreter: bool = False


class Process:
    """A running command. `status` as in `subprocess` (negative: a signal); `stderr` is complete after `wait`."""

    def __init__(self, pid: int, stdout: Path, stderr: Path) -> None:
        self.pid, self._stdout, self._stderr = pid, stdout, stderr
        self.status: int | None = None
        self.began = time.monotonic()
        self.elapsed_s = 0.0

    def poll(self) -> int | None:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status, self.elapsed_s = os.waitstatus_to_exitcode(status), time.monotonic() - self.began
        return self.status

    def wait(self, timeout_s: float) -> int | None:
        """The status; None if it is still running after `timeout_s`."""
        until = time.monotonic() + timeout_s
        while self.poll() is None and time.monotonic() < until:
            time.sleep(_POLL_S)
        return self.status

    def members(self) -> list[int]:
        """The command's process and all its living descendants."""
        return [] if self.poll() is not None else [self.pid, *descendants(self.pid)]

    def send(self, number: signal.Signals, pids: Sequence[int] | None = None) -> None:
        """Send a signal to these processes, or to all of the command."""
        for pid in self.members() if pids is None else pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def dump_stacks(self) -> None:
        """Have every process of the command write the stacks of its threads to stderr."""
        self.send(signal.SIGCONT)
        for pid in self.members():
            if _catches(pid, signal.SIGUSR1):
                self.send(signal.SIGUSR1, [pid])
        time.sleep(0.5)

    @property
    def stdout(self) -> str:
        return self._stdout.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return self._stderr.read_text(errors="replace")


def adopt_orphans() -> None:
    """Make this process the parent of all its descendants whose own parent dies."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise ResoluteError(f"prctl: got '{os.strerror(ctypes.get_errno())}', expected Linux; soak on Linux")


def check_single_threaded() -> None:
    """Raise `ResoluteError` if this process has threads, which a fork would lose in the middle of their work."""
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1:
        raise ResoluteError(f"soak: got {threads} threads before a fork, expected 1; a bug of the soak")


def end_leftovers(known: Sequence[int] = (), *, grace_s: float = 10.0) -> list[str]:
    """Wait for descendants other than `known` to end; kill those that do not, and return their command lines."""

    def remaining() -> list[int]:
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ChildProcessError):
                if pid not in known:
                    os.waitpid(pid, os.WNOHANG)
        return [pid for pid in descendants(os.getpid()) if pid not in known]

    until = time.monotonic() + grace_s
    while (pids := remaining()) and time.monotonic() <= until:
        time.sleep(_POLL_S)
    names = [_name(pid) for pid in pids]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    while remaining():
        time.sleep(_POLL_S)
    return names


def start(command: Command, folder: Path, *, prepare: Callable[[], None] = lambda: None) -> Process:
    """Start `command` with its output in `folder`; `prepare` is called first in each forked process that runs it."""
    folder.mkdir(parents=True, exist_ok=True)
    stdout, stderr = folder / "stdout", folder / "stderr"
    for path in (stdout, stderr):
        path.touch()  # why here: a forked process may be killed before it opens them
    if command.new_interpreter:
        torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(command.ranks), "-m", "--"]
        words = [sys.executable, "-m", *(torchrun if command.ranks > 1 else []), command.module, *command.arguments]
        with stdout.open("wb") as out, stderr.open("wb") as err:
            running = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
                env={**os.environ, **command.env},
            )  # fmt: skip
        running.returncode = 0  # why: `Process` reaps it
        return Process(running.pid, stdout, stderr)
    check_single_threaded()
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)  # in the fork until it handles them as a command does
    pid = os.fork()
    if pid == 0:
        _run(command, stdout, stderr, prepare)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    return Process(pid, stdout, stderr)


def in_child(work: Callable[[], object]) -> object:
    """The result of `work` (JSON), computed in a fork, so that this process starts no threads.

    Raises `ResoluteError` if it fails.
    """
    check_single_threaded()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            data = json.dumps(work()).encode()
            os.close(read)
            with os.fdopen(write, "wb") as pipe:
                pipe.write(data)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(pid, 0)
    if status:
        raise ResoluteError("soak: a check ended with an error; see above")
    return json.loads(data)


def _run(command: Command, stdout: Path, stderr: Path, prepare: Callable[[], None]) -> NoReturn:
    """In the fork: run the command; never returns."""
    status = 1
    try:
        os.setsid()
        redirect_streams(stdout, stderr)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        guard_process()  # why before `prepare`: it imports, which Ctrl-C may interrupt
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        os.environ.update(command.env)
        tempfile.tempdir = None
        sys.argv = [command.module, *command.arguments]
        if command.ranks > 1:
            status = _launch(command, prepare)
        else:
            prepare()
            status = _main(command)
    except BaseException:
        traceback.print_exc()
    finally:
        end_process(status)


def redirect_streams(stdout: Path, stderr: Path) -> None:
    """In a fork: append its output to these files, and let it read nothing."""
    for descriptor, path in ((0, Path(os.devnull)), (1, stdout), (2, stderr)):
        handle = os.open(path, os.O_RDONLY if descriptor == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(handle, descriptor)
        os.close(handle)
    # why closefd: `run_main` replaces these objects, and otherwise they would close the descriptors
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(i, mode, closefd=False) for i, mode in enumerate("rww"))


def _main(command: Command) -> int:
    try:
        run_main(lambda: command.main(list(command.arguments)))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    return 1


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


def _launch(command: Command, prepare: Callable[[], None]) -> int:
    """Fork the ranks and serve their store, as torchrun does without restarts; returns the first status other than 0.

    The other ranks are not ended at once if one dies: they have to notice it by themselves. After half of
    `RANK_GRACE_S` they get SIGTERM, as from torchrun.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)  # until there are ranks to forward them to
    listener = socket.create_server(("127.0.0.1", 0))
    shared = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1]), "WORLD_SIZE": str(command.ranks),
        "LOCAL_WORLD_SIZE": str(command.ranks), "TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_RANK": "0",
        "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_RUN_ID": "soak",
    }  # fmt: skip
    pids: list[int] = []
    for rank in range(command.ranks):
        if (pid := os.fork()) == 0:
            status = 1
            try:
                listener.close()
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
                os.environ.update({**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
                prepare()
                status = _main(command)
            finally:
                end_process(status)
        pids.append(pid)

    def forward(number: int, _frame: object) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    for number in _FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    from torch.distributed import TCPStore

    store = TCPStore(
        "127.0.0.1", int(shared["MASTER_PORT"]), is_master=True, wait_for_workers=False,
        master_listen_fd=listener.fileno(),
    )  # fmt: skip
    first_status, term_at, until = 0, float("inf"), float("inf")
    while pids:
        for pid in list(pids):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                pids.remove(pid)
                code = os.waitstatus_to_exitcode(status)
                if code and not first_status:
                    first_status, now = (code if code > 0 else 128 - code), time.monotonic()
                    term_at, until = now + RANK_GRACE_S / 2, now + RANK_GRACE_S
        if time.monotonic() > term_at:
            forward(signal.SIGTERM, None)
            term_at = float("inf")
        if time.monotonic() > until:
            print(f"soak: {len(pids)} ranks did not end after one did ({first_status})", file=sys.stderr, flush=True)
            forward(signal.SIGUSR1, None)
            time.sleep(0.5)
            forward(signal.SIGKILL, None)
            until = float("inf")
        time.sleep(_POLL_S)
    del store
    return first_status


def _catches(pid: int, number: signal.Signals) -> bool:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (number - 1) & 1)


def _name(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        return f"{pid}: {' '.join(words)[:120]} ({' '.join(stat_fields(pid)[:1])})"
    except OSError:
        return f"{pid}: has ended"


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
