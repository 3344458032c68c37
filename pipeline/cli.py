"""What all command lines share: one line for each error, exit statuses, and output that nobody may be reading.

Exit status: 0 done, 2 for a `ResoluteError` (one line on stderr), 130 for Ctrl-C. A closed or broken stdout never
stops the work: `python -m train ... | head -3` trains to the end.

An entry point (`__main__.py`) starts with these lines, above its other imports:

    from pipeline.cli import guard_process
    guard_process()
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TextIO

from .errors import ResoluteError, strip_credentials

__all__ = ["Parser", "command", "guard_process", "number", "print_error", "run_main"]

_STORAGE = frozenset({
    errno.EACCES, errno.EDQUOT, errno.EIO, errno.EINTR, errno.ENODEV, errno.ENOENT, errno.ENOSPC, errno.ENOTCONN,
    errno.ENXIO, errno.EPERM, errno.EROFS, errno.ESTALE, errno.ETIMEDOUT,
})  # fmt: skip


class Parser(argparse.ArgumentParser):
    """Raises `ResoluteError` where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise ResoluteError(f"command line: {message}; see `{self.prog} --help`")


def number(low: float, high: float, kind: type[int] | type[float] = int) -> Callable[[str], Any]:
    """A `type=` for argparse: a number from `low` to `high`, both allowed; nan and inf never are."""

    def parse(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            value = kind(low) - 1
        if not low <= value <= high:
            what = "whole number" if kind is int else "number"
            raise argparse.ArgumentTypeError(f"got {text!r}, expected a {what} from {low:g} to {high:g}")
        return value

    return parse


def print_error(error: BaseException | str, prefix: str = "error") -> None:
    """Print one line on stderr, without credentials. Never raises."""
    line = strip_credentials(" ".join(f"{prefix}: {error}".split("\n")))
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(line.encode(errors="backslashreplace").decode(), file=sys.stderr, flush=True)


def command(
    parser: argparse.ArgumentParser, work: Callable[[argparse.Namespace], int | None], arguments: Sequence[str] | None
) -> int:
    """Parse, then `work`; the exit status, 0 for None. A `ResoluteError` is one line on stderr, and status 2."""
    try:
        return work(parser.parse_args(arguments)) or 0
    except ResoluteError as error:
        print_error(error)
        return 2
    except KeyboardInterrupt:
        print_error(f"{parser.prog}: interrupted", prefix="stopped")
        return 130


def guard_process() -> None:
    """Prepare the process for whatever the shell does to it; call it before any slow import.

    From here on until `run_main`, Ctrl-C ends the process quietly with status 130. Standard streams that are closed
    lead to /dev/null, so that no file ever gets descriptor 0, 1 or 2. In a locale that is not UTF-8 the program is
    started again in Python's UTF-8 mode: names of files are UTF-8 in tables, lists and manifests.
    """
    if sys.getfilesystemencoding().lower() != "utf-8" and not sys.flags.utf8_mode:
        os.environ["PYTHONUTF8"] = "1"  # for the processes that this one starts
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    # why the condition: nohup and shells' background jobs ignore Ctrl-C, and so shall we
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != descriptor:
                os.dup2(null, descriptor)
                os.close(null)


def run_main(main: Callable[[], int]) -> NoReturn:
    """Run a command line's `main` and exit with its status; if stdout cannot be written: one line, and status 2.

    So too for an error of storage that `main` let through: folders may vanish between any two lines of it.
    """
    if callable(handler := signal.getsignal(signal.SIGINT)) and handler is not signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    outputs = [_TolerantOutput(1), _TolerantOutput(2)]
    sys.stdout, sys.stderr = (_text(raw, old) for raw, old in zip(outputs, (sys.stdout, sys.stderr), strict=True))
    try:
        status = main()
    except KeyboardInterrupt:
        status = 130
    except SystemExit as end:  # argparse's --help
        status = end.code if isinstance(end.code, int) else 0
    except OSError as error:
        if error.errno not in _STORAGE or (error.errno == errno.ENOENT and error.filename is None):
            raise
        print_error(
            f"{error.filename or 'storage'}: got '{error.strerror}', expected storage that answers; check the disk, "
            "its mount and the permissions, then run the same command again"
        )
        status = 2
    with contextlib.suppress(KeyboardInterrupt):
        sys.stdout.flush()
    if outputs[0].failed is not None:
        reason = os.strerror(outputs[0].failed)
        print_error(f"stdout: got '{reason}', expected a place for the output; the work itself is done")
        status = status or 2
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # why: from here on Ctrl-C would print a traceback of whatever libraries do at exit
        signal.signal(signal.SIGINT, lambda *_: os._exit(status))
    sys.exit(status)


class _TolerantOutput(io.RawIOBase):
    """File descriptor 1 or 2; what cannot be written is dropped. `failed`: the errno, unless the reader went away."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.failed: int | None = None
        self._gone = False

    def write(self, data: Any) -> int:
        nbytes = memoryview(data).nbytes
        if self._gone:
            return nbytes
        try:
            return os.write(self._descriptor, data)
        except BlockingIOError:
            raise
        except OSError as error:
            self._gone = True
            if error.errno not in (errno.EPIPE, errno.EBADF):
                self.failed = error.errno
            return nbytes

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True


def _text(raw: _TolerantOutput, old: TextIO | None) -> TextIO:
    encoding = getattr(old, "encoding", None) or "utf-8"
    # why: file names may hold bytes that are no text; messages about them have to come through
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=encoding, errors="backslashreplace",
        line_buffering=raw.fileno() == 2 or raw.isatty(),
    )  # fmt: skip
