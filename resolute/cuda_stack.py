"""Chooses the CUDA stack for this machine's NVIDIA driver and GPUs: an extra of pyproject.toml, `cuda13` or `cuda12`.

`make env` runs this file with any Python 3.11 before anything is installed, so it imports the standard library only.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["choose_stack", "driver_and_gpus"]

# Per stack, newest first: oldest driver (major version) and lowest compute capability that its torch has kernels for.
# Sources: CUDA Compatibility, table of minor-version compatibility, https://docs.nvidia.com/deploy/cuda-compatibility/;
# "PyTorch CUDA Support Matrix" in PyTorch's RELEASE.md: CUDA 13.0 (torch 2.14) from 7.5, 12.8 (torch 2.10) from 7.0
_STACKS = {"cuda13": (580, (7, 5)), "cuda12": (525, (7, 0))}
_QUERY = ("nvidia-smi", "--query-gpu=driver_version,compute_cap", "--format=csv,noheader")
Capability = tuple[int, int]


def driver_and_gpus(module: Path = Path("/sys/module/nvidia/version")) -> tuple[str | None, list[Capability]]:
    """The version of the NVIDIA driver such as "580.65.06", None without one, and each GPU's compute capability.

    From nvidia-smi; if that fails, the version is that of the kernel module, and no GPU is known.
    """
    try:
        answer = subprocess.run(_QUERY, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        answer = module.read_text() if module.exists() else ""
    rows = [[word.strip() for word in line.split(",")] for line in answer.splitlines()]
    version = rows[0][0] if rows else ""
    pairs = [row[1].partition(".") for row in rows if len(row) > 1]
    gpus = [(int(major), int(minor)) for major, _, minor in pairs if major.isdecimal() and minor.isdecimal()]
    return version if version.partition(".")[0].isdecimal() else None, gpus


def choose_stack(driver: str | None, gpus: Sequence[Capability] = (), *, cuda: str = "", installed: str = "") -> str:
    """`cuda13` or `cuda12`: what is `installed`, else the stack of `cuda` ("12", "13"), else the newest that suits.

    It suits if `driver` can run it and it has kernels for each of `gpus` that any stack has kernels for; without a
    driver and GPUs, `cuda13`. Raises `ValueError` with one line for a driver or GPUs that are too old for every stack,
    for another `cuda`, and if that is not what is `installed`.
    """
    if cuda and f"cuda{cuda}" not in _STACKS:
        raise ValueError(f"CUDA: got {cuda}, expected 12 or 13; correct it, or leave it out to follow the driver")
    if cuda and installed not in ("", f"cuda{cuda}"):
        raise ValueError(
            f"CUDA: got {cuda}, but the environment holds {installed}; choose another VENV, or delete this one first"
        )
    if installed or cuda:
        return installed or f"cuda{cuda}"
    on_cpu = "or run `make env CUDA=12` to work on the CPU only"
    oldest, lowest = min(_STACKS.values())
    major = None if driver is None else int(driver.partition(".")[0])
    if major is not None and major < oldest:
        raise ValueError(
            f"NVIDIA driver: too old, got {driver}, expected {oldest} or newer; update the driver, {on_cpu}"
        )
    usable = [gpu for gpu in gpus if gpu >= lowest]
    if gpus and not usable:
        got = ", ".join(f"{major}.{minor}" for major, minor in sorted({*gpus}))
        raise ValueError(
            f"NVIDIA GPU: too old, got compute capability {got}, expected {lowest[0]}.{lowest[1]} or higher (V100, "
            f"T4 or newer); use another machine, {on_cpu}"
        )
    return next(
        stack
        for stack, (version, capability) in _STACKS.items()
        if (major is None or major >= version) and all(gpu >= capability for gpu in usable)
    )


def main(stamp: Path) -> int:
    """Print the stack for the environment whose `stamp` holds the name of its stack, if it was made; exit status."""
    try:
        installed = stamp.read_text().strip() if stamp.exists() else ""
        print(choose_stack(*driver_and_gpus(), cuda=os.environ.get("CUDA", ""), installed=installed))
    except ValueError as error:
        print(f"make: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
