"""`python -m resolute.train.devices.launch OPTIONS -m -- train …`: torchrun that ends in a line instead of a traceback.

On a signal it lets all processes save and stop. Exit status: 128 + the signal's number, or that of the process that
failed first, which has printed why.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from resolute.console import guard_process

    guard_process()

import signal
from collections.abc import Sequence

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from resolute.console import print_error

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run torchrun with its own `arguments`; returns the exit status."""
    try:
        torchrun.run(torchrun.parse_args(arguments))
    except SignalException as error:
        return _stopped(error.sigval, "all processes have ended")
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            return _stopped(-failure.exitcode, f"it ended process {rank}")
        return failure.exitcode
    return 0


def _stopped(number: int, how: str) -> int:
    name = signal.Signals(number).name
    print_error(f"{name}: {how}; run the same command to resume from the last checkpoint", prefix="stopped")
    return 128 + number


if __name__ == "__main__":
    from resolute.console import run_main

    run_main(main)
