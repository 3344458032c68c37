"""Chooses the CUDA stack for the NVIDIA driver of this machine: an extra of pyproject.toml, `cuda13` or `cuda12`.

`make env` runs this file with any Python 3.11 before anything is installed, so it imports the standard library only.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["choose_stack", "driver_version"]

# Oldest driver (major version) per stack. Source: CUDA Compatibility, table of minor-version compatibility,
# https://docs.nvidia.com/deploy/cuda-compatibility/
_OLDEST_DRIVER = {"cuda13": 580, "cuda12": 525}
_QUERY = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def driver_version(module: Path = Path("/sys/module/nvidia/version")) -> str | None:
    """The version of the NVIDIA driver such as "580.65.06", from nvidia-smi or the kernel module; None without one."""
    try:
        answer = subprocess.run(_QUERY, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        answer = module.read_text() if module.exists() else ""
    version = answer.partition("\n")[0].strip()
    return version if version.partition(".")[0].isdecimal() else None


def choose_stack(driver: str | None, *, cuda: str = "", installed: str = "") -> str:
    """`cuda13` or `cuda12`: what is `installed`, else the stack of `cuda` ("12", "13"), else the newest for `driver`.

    Without a driver it is `cuda13`. Raises `ValueError` with one line for a driver that is too old for every stack, for
    another `cuda`, and if that is not what is `installed`.
    """
    if cuda and f"cuda{cuda}" not in _OLDEST_DRIVER:
        raise ValueError(f"CUDA: got {cuda}, expected 12 or 13; correct it, or leave it out to follow the driver")
    if cuda and installed not in ("", f"cuda{cuda}"):
        raise ValueError(
            f"CUDA: got {cuda}, but the environment holds {installed}; choose another VENV, or delete this one first"
        )
    if installed or cuda:
        return installed or f"cuda{cuda}"
    major = None if driver is None else int(driver.partition(".")[0])
    for stack, oldest in _OLDEST_DRIVER.items():
        if major is None or major >= oldest:
            return stack
    raise ValueError(
        f"NVIDIA driver: too old, got {driver}, expected {min(_OLDEST_DRIVER.values())} or newer; update the driver, "
        "or run `make env CUDA=12` to work on the CPU only"
    )


def main(stamp: Path) -> int:
    """Print the stack for the environment whose `stamp` holds the name of its stack, if it was made; exit status."""
    try:
        installed = stamp.read_text().strip() if stamp.exists() else ""
        print(choose_stack(driver_version(), cuda=os.environ.get("CUDA", ""), installed=installed))
    except ValueError as error:
        print(f"make: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
