"""`python -m tests.support.torchrun MODULE WORDS…` runs `main(WORDS)` of a module as two ranks, as torchrun does.

They are forked when the module is loaded; torchrun would start an interpreter for each.
"""

from __future__ import annotations

import importlib
import os
import sys

import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from resolute.console import guard_process


def work(module: str, *words: str) -> None:
    torch.set_num_threads(1)
    importlib.import_module(module).main(words)


if __name__ == "__main__":
    guard_process()
    os.environ |= {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}  # the first as torchrun sets it
    importlib.import_module(sys.argv[1])
    elastic_launch(
        LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=2,
            max_restarts=0,
            monitor_interval=0.1,
            run_id="ranks",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            start_method="fork",
        ),
        work,
    )(*sys.argv[1:])
