"""`python -m tests.soak`: soak test with hundreds of kills and storage faults, and checks of the results.

Every cycle runs one scenario (prep, verify, training, evaluation) from start to end while a few random events hit it;
after each event the same command is started again, as a supervisor would. The outcome is then compared with that of an
undisturbed run. All events are drawn from --seed; `--only NAME --index N` repeats those of a single cycle, whose
folder is kept if it has findings.
Exit status: 0 no findings, 1 findings (in the result file and on stdout), 2 for a usage error, 130 interrupted.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from resolute.console import guard_process

    guard_process()

import shutil
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path

from resolute.benchmarks.cli import default_file
from resolute.benchmarks.record import check_writable, header, write
from resolute.cli import program
from tests.soak.settings import SoakOptions

__all__ = ["main"]


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    about = "Soak test with hundreds of kills and storage faults, and checks of the results."
    return program("python -m tests.soak", SoakOptions, _run, words, help=about)


def _run(options: SoakOptions) -> int:
    out = options.out or default_file("soak")
    check_writable(out)
    from .processes import end_leftovers
    from .run import Soak  # why here: errors of the command line should not wait for its imports

    # why: the commands, each in its own session, and the folder must not outlive the soak; and the commands would
    # inherit that a background job ignores Ctrl-C, and one of nohup SIGHUP
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix="resolute-soak-")).resolve()
    is_kept = False
    try:
        soak = Soak(folder, options)
        first_fields = header()
        soak.run()
        result = soak.result()
        print(
            f"{result['kills']} kills and {result['faults']} storage faults in {result['starts']} starts: "
            f"{len(soak.findings)} findings"
        )
        write(out, {**first_fields, **result}, indent=None)
        is_kept = options.index is not None and bool(soak.findings)
    finally:
        end_leftovers(grace_s=0.0)
        if is_kept:
            print(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return 1 if soak.findings else 0


if __name__ == "__main__":
    from resolute.console import run_main

    run_main(main)
