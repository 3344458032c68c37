"""Shared behaviour of all command lines: one-line messages, exit statuses, and tolerance of closed output streams.

Errors and warnings go to stderr, and each of their lines begins with the command, `resolute train: `. Lines on stdout
never do. `say` prints them, also those that the library logs.

Exit status: 0 success, 2 for a `ResoluteError` (one line on stderr), 130 for Ctrl-C. A closed or broken stdout does not
stop the work: `resolute train ... | head -3` trains to the end.

Every entry point (`__main__.py`) begins with these lines, above its other imports:

    from resolute.console import guard_process
    guard_process()
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import io
import logging
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TextIO

from .errors import from_os_error, strip_credentials

__all__ = [
    "command_line",
    "counted",
    "guard_process",
    "is_of_storage",
    "run_main",
    "say",
    "set_program",
]

_STORAGE = frozenset(
    {
        errno.EACCES,
        errno.EDQUOT,
        errno.EIO,
        errno.EINTR,
        errno.ENODEV,
        errno.ENOENT,
        errno.ENOSPC,
        errno.ENOTCONN,
        errno.ENXIO,
        errno.EPERM,
        errno.EROFS,
        errno.ESTALE,
        errno.ETIMEDOUT,
    }
)


_program = "resolute"
_words: tuple[str, ...] = ()


def set_program(name: str, words: Sequence[str] = ()) -> None:
    """The name that begins every line of `say`, such as "resolute train"; `words`: the rest of the command line.

    From here on, what the library logs is printed by `say` too.
    """
    global _program, _words
    _program, _words = name, tuple(words)
    logger = logging.getLogger("resolute")
    if _HANDLER not in logger.handlers:
        logger.addHandler(_HANDLER)


def command_line() -> str:
    """The command that runs, as a shell would take it; absolute paths in it without their folders."""
    return f"{_program} {shlex.join(without_folders(_words))}".strip()


def without_folders(words: Iterable[str]) -> list[str]:
    """The words with absolute paths shortened to their last part."""
    return [re.sub(r"(?<![\w.:/])/(?:[^/,=]*/)*", "", word) for word in words]


def say(line: BaseException | str) -> None:
    """Print `line`, an error for example, as one line on stderr, without credentials. Never raises."""
    line = strip_credentials(" ".join(f"{_program}: {line}".split("\n")))
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(line.encode(errors="backslashreplace").decode(), file=sys.stderr, flush=True)


class _SayingHandler(logging.Handler):
    """Prints what the library logs, such as skipped samples, as the other lines on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))


_HANDLER = _SayingHandler(logging.WARNING)


def is_of_storage(error: OSError) -> bool:
    """Whether an error that no code has handled comes from a disk or mount, and not from a bug."""
    return error.errno in _STORAGE and not (error.errno == errno.ENOENT and error.filename is None)


def counted(number: int, noun: str, *, plural: str = "") -> str:
    """`number` with its noun: "1 image", "2 images"; plural: an irregular one, such as "classes"."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def guard_process() -> None:
    """Prepare the process for signals, closed streams and locales; call it before any slow import.

    Until `run_main`, Ctrl-C ends the process silently with status 130. Closed standard streams are redirected to
    /dev/null, so that no file gets descriptor 0, 1 or 2. In a non-UTF-8 locale the program restarts itself in Python's
    UTF-8 mode, because file names in tables, lists and manifests are UTF-8.
    """
    if sys.getfilesystemencoding().lower() != "utf-8" and not sys.flags.utf8_mode:
        os.environ["PYTHONUTF8"] = "1"  # inherited by child processes
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    # why the condition: under nohup or as a background job of a shell, Ctrl-C stays ignored
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


def run_main(main: Callable[[], int], *, teardown: bool = True) -> NoReturn:
    """Run `main` and exit with its status; without `teardown` of the interpreter after its exit handlers, which takes
    0.1 s after imports such as numba's, if there are no threads left.

    A storage error (OSError) that `main` did not handle, or a failure to write stdout, is printed as one line on
    stderr, with status 2.
    """
    sys.unraisablehook = _keep_interrupts(sys.unraisablehook)
    outputs = [_TolerantOutput(1), _TolerantOutput(2)]
    sys.stdout, sys.stderr = (_text(raw, old) for raw, old in zip(outputs, (sys.stdout, sys.stderr), strict=True))
    try:
        # why within: from here on, Ctrl-C raises an exception
        if callable(handler := signal.getsignal(signal.SIGINT)) and handler is not signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        status = main()
    except KeyboardInterrupt:
        status = 130
    except SystemExit as end:  # argparse's --help
        status = end.code if isinstance(end.code, int) else 0
    except OSError as error:
        if not is_of_storage(error):
            raise
        say(from_os_error(error))
        status = 2
    with contextlib.suppress(KeyboardInterrupt):
        sys.stdout.flush()
    if outputs[0].failed is not None:
        reason = os.strerror(outputs[0].failed)
        say(f"stdout: got '{reason}', expected a place for the output; the work itself is done")
        status = status or 2
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # why: else Ctrl-C would print a traceback from the exit handlers of libraries
        signal.signal(signal.SIGINT, lambda *_: os._exit(status))
    if not teardown:
        atexit._run_exitfuncs()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _keep_interrupts(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`hook` for exceptions that Python drops, such as those in `__del__`; but a Ctrl-C there is sent once more."""

    def keep(unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            hook(unraisable)
            return
        # why a thread: a signal that is sent here would be raised inside this hook
        again = threading.Timer(0.05, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT])
        again.daemon = True
        again.start()

    return keep


class _TolerantOutput(io.RawIOBase):
    """File descriptor 1 or 2; drops what cannot be written. `failed`: the errno, None if only the reader is gone."""

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
    # why backslashreplace: file names may contain undecodable bytes; messages about them must still be printed; why by
    # line, also into a file or pipe: others follow the log of a job
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding=encoding, errors="backslashreplace", line_buffering=True)
