"""Selects the device of a run from `--device`; never falls back from a GPU to the CPU silently."""

from __future__ import annotations

import re

import torch

from resolute import cuda
from resolute.console import counted
from resolute.errors import ResoluteError

from .distributed import Ranks

__all__ = ["device_name", "pick_device"]


def pick_device(name: str, ranks: Ranks | None = None, *, threads: int | None = None) -> torch.device:
    """The device for `--device` = `name`; a GPU has its index and becomes the process's current device.

    `threads`: of torch's operations on a CPU. Raises `ResoluteError` if the device does not exist.
    """
    device = _pick(name, ranks)
    if threads is not None and device.type == "cpu":
        torch.set_num_threads(threads)
    return device


def _pick(name: str, ranks: Ranks | None) -> torch.device:
    if ranks is not None and ranks.world_size > 1 and name != "cpu" and cuda.available():
        return ranks.device(name)
    if ranks is not None and ranks.world_size > 1 and name == "auto":
        raise ResoluteError(
            f"got no GPU for {ranks.world_size} ranks (GPUS), expected one for each; to let ranks share the CPU, add "
            "--device cpu (make: DEVICE=cpu)"
        )
    if name == "auto":
        if cuda.available():
            return cuda.use_device("cuda")
        print("no GPU found: using the CPU")
        return torch.device("cpu")
    if re.fullmatch(r"cpu|cuda(:[0-9]{1,9})?", name) is None:
        raise ResoluteError(f"--device: got {name}, expected auto, cpu, cuda or cuda:N; choose one")
    kind, _, number = name.partition(":")
    if kind == "cuda" and int(number or 0) >= cuda.device_count():
        raise ResoluteError(
            f"--device: got {name} on a machine with {cuda.device_count()} CUDA devices, expected one of them; use "
            "--device cpu"
        )
    return cuda.use_device(name) if kind == "cuda" else torch.device(name)


def device_name(device: torch.device) -> str:
    return cuda.device_name(device) if device.type == "cuda" else f"CPU, {counted(torch.get_num_threads(), 'thread')}"
