"""Functions that a child process runs in place of the trial of a GPU's decoder. Any arguments are ignored."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

__all__ = ["crash", "disagree", "fail", "hang", "in_simulation", "leave", "succeed"]


def crash(*_: Any, **__: Any) -> None:
    os.write(2, b"*** signal caught by the library ***\n")
    os.kill(os.getpid(), signal.SIGSEGV)


def hang(*_: Any, **__: Any) -> None:
    time.sleep(60)


def leave(*_: Any, **__: Any) -> None:
    os._exit(3)


def fail(*_: Any, **__: Any) -> None:
    raise RuntimeError("Critical error in pipeline:\n\nError in MIXED operator")


def disagree(*_: Any, **__: Any) -> str:
    return "images differ"


def succeed(*_: Any, **__: Any) -> None:
    return None


def in_simulation(shards: Any, **settings: Any) -> str | None:
    """The real trial, with the GPU's graph run by CPU kernels."""
    import pytest

    from resolute.train.planner import gpu_decode
    from tests.support.gpu_on_cpu import GpuLoader

    with pytest.MonkeyPatch.context() as patch:
        real = gpu_decode.Loader
        patch.setattr(
            gpu_decode,
            "Loader",
            lambda plan, **keys: GpuLoader(patch, plan, **keys) if "device" in keys else real(plan, **keys),
        )
        return gpu_decode.difference(shards, **settings)
