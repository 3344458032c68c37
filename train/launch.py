"""Starts the processes of a command with `--gpus`, one per GPU, with torchrun; ends in a line instead of a traceback.

On a signal it lets all processes save and stop. Exit status: 128 + the signal's number, or that of the process that
failed first, which has printed why.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from resolute import cuda
from resolute.console import say
from resolute.errors import ResoluteError
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.train.devices.distributed import shares_gpu
from resolute.train.options import PlanOptions, TrainOptions
from resolute.train.recipe.schema import Recipe
from resolute.train.setup import Run

__all__ = ["launch", "torchrun_arguments"]

_RESTARTS = 3


def launch(options: PlanOptions | TrainOptions, words: Sequence[str]) -> int:
    """Run `resolute WORDS` in `options.gpus` processes; returns the exit status. Raises `ResoluteError`.

    Each process gets the same words, and knows by torchrun's environment variables that it need not start others.
    """
    # why these checks here too: torchrun starts its processes again after an error
    count = cuda.device_count()
    if options.device != "cpu" and (options.gpus or 0) > count and not (count and shares_gpu()):
        raise ResoluteError(
            f"--gpus: got {options.gpus}, expected at most {count}, the GPUs of this machine; lower it"
            + ("" if count else ", or add --device cpu (make: DEVICE=cpu) for processes that share the CPU")
        )
    run = Run.of(options)
    with ShardSet.open(run.shards, resolutions=Recipe.from_text(run.recipe_text()).resolutions):
        pass
    if options.head:
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # why: a store that outlives a restart names the dead
    arguments = torchrun.parse_args([*torchrun_arguments(options), *words])
    for left in reversed(range(1 + (0 if options.head else _restarts(options)))):
        try:
            torchrun.run(arguments)
            return 0
        except SignalException as error:
            return _stopped(error.sigval, "all processes have ended")
        except ChildFailedError as error:
            if left and not _is_explained(error):
                say(f"a process has ended; starting all of them again, from the last checkpoint ({left} more times)")
                continue
            rank, failure = error.get_first_failure()
            if failure.exitcode < 0:
                return _stopped(-failure.exitcode, f"it ended process {rank}")
            return failure.exitcode
    return 0


def _is_explained(error: ChildFailedError) -> bool:
    """Whether a process has ended with a `ResoluteError`, which would occur again, and not by an accident."""
    return any(failure.exitcode == ResoluteError.exit_status for failure in error.failures.values())


def _restarts(options: PlanOptions | TrainOptions) -> int:
    """How often all processes are started again after an accident."""
    resumes_elsewhere = getattr(options, "from_", "last.pt") != "last.pt"
    return options.restarts if options.restarts is not None else 0 if resumes_elsewhere else _RESTARTS


def torchrun_arguments(options: PlanOptions | TrainOptions) -> list[str]:
    """The arguments of torchrun before those of `resolute`.

    On a single machine, `launch` starts the processes again, since torchrun would also do so after an error that is
    explained. On several, only torchrun knows when all machines have to.
    """
    restarts = _restarts(options) if options.head else 0
    place = (
        ["--standalone"]
        if options.head is None
        else [
            f"--nnodes={options.nodes}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={options.head}",
            f"--rdzv-id={options.run or 'resolute'}",
        ]
    )
    # why --: torchrun has a --run-path
    return [f"--nproc-per-node={options.gpus}", f"--max-restarts={restarts}", *place, "-m", "--", "resolute"]


def _stopped(number: int, how: str) -> int:
    name = signal.Signals(number).name
    say(f"{name}: {how}; run the same command to resume from the last checkpoint")
    return 128 + number
