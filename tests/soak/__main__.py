"""`python -m tests.soak`: soak test with hundreds of kills and storage faults, and checks of the results.

Every cycle runs one scenario (prep, verify, training, evaluation) from start to end while a few random events hit it;
after each event the same command is restarted, as a supervisor would. The outcome is then compared with that of an
undisturbed run. Everything is drawn from --seed; `--only NAME --index N` repeats a single cycle.
Exit status: 0 no findings, 1 findings (in the result file and on stdout), 2 for a usage error, 130 interrupted.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from resolute.console import guard_process

    guard_process()

import argparse
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from resolute.benchmarks.cli import Parser, command
from resolute.benchmarks.record import check_writable, header, write
from resolute.errors import ResoluteError

from .faults import compile_library, preload

__all__ = ["main"]

_INSIDE = "RESOLUTE_SOAK_FOLDER"  # set in the process that was started with the fault library


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m tests.soak", description=(__doc__ or "").partition("\n\n")[0],
                    epilog=(__doc__ or "").rpartition("\n\n")[2], allow_abbrev=False)  # fmt: skip
    add = parser.add_argument
    add("--seed", type=int, default=0, metavar="N", help="seed of all events (default: %(default)s)")
    add("--kills", type=int, default=300, metavar="N", help="minimum number of kills (default: %(default)s)")
    add("--faults", type=int, default=100, metavar="N", help="minimum number of storage faults (default: %(default)s)")
    add("--minutes", type=float, default=60.0, metavar="M", help="start no cycle after that (default: %(default)s)")
    add("--only", default="", metavar="NAME,…", help="scenarios, such as prep, prep-jobs, verify, train, train-1, eval")
    add("--index", type=int, metavar="N", help="only the cycle of this number of each scenario")
    add("--keep", action="store_true", help="stop at the first finding and keep its folder")
    add("--out", type=Path, default=Path("benchmarks/results/soak.json"), metavar="FILE", help="default: %(default)s")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    words = sys.argv[1:] if argv is None else list(argv)
    return command(_parser(), lambda args: _run(args, words), words)


def _run(args: argparse.Namespace, words: Sequence[str]) -> int:
    for name in ("kills", "faults"):
        if getattr(args, name) < 0:
            raise ResoluteError(f"--{name}: got {getattr(args, name)}, expected at least 0; correct it")
    if sys.platform != "linux":
        raise ResoluteError(f"soak: got {sys.platform}, expected Linux; run it there")
    check_writable(args.out)
    if _INSIDE in os.environ:
        return _soak(args)
    # why: faults reach only processes that were started with the fault library
    folder = Path(tempfile.mkdtemp(prefix="resolute-soak-")).resolve()
    library = compile_library(folder)
    environ = {**os.environ, _INSIDE: str(folder), "OPENBLAS_NUM_THREADS": "1"}
    if library is not None:
        environ |= preload(library, folder / "page")
    os.execve(sys.executable, [sys.executable, "-m", __package__ or "", *words], environ)


def _soak(args: argparse.Namespace) -> int:
    folder = Path(os.environ.pop(_INSIDE))
    from .processes import end_leftovers
    from .run import Soak  # why here: it imports everything

    # why: the commands, each in its own session, the object store and the folder must not outlive the soak
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with contextlib.ExitStack() as stack:
            soak = Soak(
                folder, stack, seed=args.seed, kills=args.kills, faults=args.faults, minutes=args.minutes,
                only=[word for word in args.only.split(",") if word], index=args.index, keep=args.keep,
            )  # fmt: skip
            first_fields = header()
            soak.run()
        print(soak.summary())
        write(args.out, {**first_fields, **soak.result()}, indent=None)
    finally:
        end_leftovers(grace_s=0.0)
        if not (args.keep and (folder / "cycle").exists()):
            shutil.rmtree(folder, ignore_errors=True)
    return 1 if soak.findings else 0


if __name__ == "__main__":
    from resolute.console import run_main

    run_main(main)
