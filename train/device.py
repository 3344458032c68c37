"""Which device does a run use, and what is it called?"""

from __future__ import annotations

import torch

from pipeline.errors import ResoluteError

from .ranks import Ranks

__all__ = ["device_name", "pick_device"]


def pick_device(wanted: str, ranks: Ranks | None = None) -> torch.device:
    """What `--device` names. Raises `ResoluteError` if it is not there: nothing falls back from a GPU by itself."""
    if ranks is not None and ranks.world > 1 and wanted != "cpu" and torch.cuda.is_available():
        return ranks.device(wanted)
    if wanted == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        print("no GPU found: training on the CPU")
        return torch.device("cpu")
    kind, _, number = wanted.partition(":")
    if kind not in ("cpu", "cuda") or not (number or "0").isdigit() or (kind == "cpu" and number):
        raise ResoluteError(f"--device: got {wanted}, expected auto, cpu, cuda or cuda:N; choose one")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise ResoluteError(
            f"--device {wanted}: got {torch.cuda.device_count()} CUDA devices, expected that one; use --device cpu"
        )
    return torch.device(wanted)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
