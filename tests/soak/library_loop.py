"""A loop over the library's loader that is interrupted by Ctrl-C again and again, as in a notebook, and started again.

    python -m tests.soak.library_loop SHARDS OUT [--interrupts SEED]

OUT gets a line "index digest" for each batch, in the order in which the loop got them.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from resolute.console import guard_process

    guard_process()

import argparse
import hashlib
import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from resolute.benchmarks.cli import Parser, command
from resolute.errors import ResoluteError
from resolute.files import atomic_write

__all__ = ["main"]

_PAUSE_S = 0.2  # between two interrupts, at most
_INTERRUPTS = 40  # then no more: a loop that is always interrupted never sees that storage does not answer


def _run(args: argparse.Namespace) -> None:
    from resolute import (  # why here: their threads must not be forked
        Augment,
        Batch,
        Loader,
        Plan,
        ShardSet,
        Stage,
    )

    rich = Augment(policy="randaugment", mixup_alpha=0.4)
    stages = [Stage(res=32, epochs=20, batch_size=4), Stage(res=64, epochs=10, batch_size=16, augment=rich)]
    plan, batches = Plan(ShardSet.open(args.shards), stages, eval_batch_size=8), list[Batch]()

    def handle(*_: object) -> None:
        if len(batches) < plan.total_batches:
            raise KeyboardInterrupt

    def interrupt(rng: random.Random) -> None:
        for _ in range(_INTERRUPTS):
            time.sleep(rng.uniform(0, _PAUSE_S))
            os.kill(os.getpid(), signal.SIGINT)

    with Loader(plan) as loader:
        signal.signal(signal.SIGINT, handle)
        if args.interrupts is not None:
            threading.Thread(target=interrupt, args=[random.Random(args.interrupts)], daemon=True).start()
        while len(batches) < plan.total_batches:
            try:
                for batch in loader:
                    batches.append(batch)  # reached without a call after the batch was returned
                break
            except KeyboardInterrupt:
                continue
            except ResoluteError:
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with its line
                raise
    lines = [f"{b.spec.index} {hashlib.sha256(b.images.numpy().tobytes()).hexdigest()}\n" for b in batches]
    atomic_write(args.out, "".join(lines))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    about = (__doc__ or "").partition("\n")[0]
    parser = Parser(prog="python -m tests.soak.library_loop", description=about)
    parser.add_argument("shards", help="a shard set with 64 px")
    parser.add_argument("out", type=Path, help="the file to write")
    parser.add_argument("--interrupts", type=int, metavar="SEED", help="seed of the moments (default: none)")
    return command(parser, _run, argv)


if __name__ == "__main__":
    from resolute.console import run_main

    run_main(main)
