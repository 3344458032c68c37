"""Result files of the benchmarks: the fields that all of them have, writing them, and the page that lists them.

A result file holds the command, the date, the number of rounds, the commit, the machine and its load before and after,
the versions, the raw value of every round, and a digest over all of that, so that no hand edits it. It holds no host
name and no absolute path. Files in benchmarks/results are measured at a commit, without changes.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resolute.console import command_line
from resolute.errors import ResoluteError
from resolute.files import check_output, output_file
from resolute.machine import available_cpus

from .proc import read_files

if TYPE_CHECKING:
    import torch

    from resolute.pipeline.dataset.shard_set import ShardSet

__all__ = [
    "CODE",
    "RESULTS",
    "check_writable",
    "commit",
    "digest",
    "find_device",
    "header",
    "machine",
    "read_into_cache",
    "results_page",
    "versions",
    "write",
]

FORMAT = "resolute-benchmark-3"
_ROOT = Path(__file__).resolve().parents[1]
RESULTS = _ROOT / "benchmarks" / "results"
# what a measurement depends on, for git
CODE = (
    "benchmarks",
    "pipeline",
    "prep",
    "train",
    "resolute",
    "pyproject.toml",
    "locks",
    "tests/soak",
    ":(exclude)benchmarks/results",
    ":(exclude)benchmarks/publish.py",  # results hold their command
    ":(exclude)benchmarks/figures.py",
    ":(exclude)benchmarks/templates",
    ":(exclude)*.md",
)
_PACKAGES = ("torch", "torchvision", "timm", "nvidia-dali-cuda130", "nvidia-dali-cuda120", "numpy", "pillow")


def find_device(name: str) -> torch.device:
    """The device for `--device`; "auto" is a GPU if there is one. Raises `ResoluteError` if it does not exist."""
    if name not in ("auto", "cpu", "cuda"):
        raise ResoluteError(f"--device: got {name}, expected auto, cpu or cuda; choose one")
    import torch  # why here: command line errors should not wait for the import

    if name == "cuda" and not torch.cuda.is_available():
        raise ResoluteError("--device cuda: no CUDA device found, expected one; use --device cpu")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _cpuinfo(field: str) -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == field:
                return value.strip()
    return ""


def _ram_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def machine(device: torch.device | None) -> dict[str, Any]:
    """The processor, and the GPU if `device` is one."""
    record: dict[str, Any] = {
        "cpu": _cpuinfo("model name") or platform.processor() or platform.machine(),
        "cores": available_cpus(),
        "ram_gib": round(_ram_bytes() / 2**30, 1),
        "system": platform.system(),
        "load_before": round(os.getloadavg()[0], 2),  # load average of the last minute: above 0, other work ran
        "gpu": None,
    }
    if device and device.type == "cpu":
        from resolute.train.devices.hardware import bf16_is_emulated

        record["bf16"] = not bf16_is_emulated(device)  # which changes the speed of networks by different factors
    if device and device.type == "cuda":
        import torch

        gpu = torch.cuda.get_device_properties(device)
        record |= {"gpu": gpu.name, "gpu_memory_gib": round(gpu.total_memory / 2**30, 1)}
    return record


def versions(more: Sequence[str]) -> dict[str, str | None]:
    """Versions of Python and of those of the usual packages and `more` that are installed."""
    from PIL import features

    installed: dict[str, str | None] = {"python": platform.python_version()}
    for name in (*_PACKAGES, *more):
        with contextlib.suppress(PackageNotFoundError):
            installed["nvidia-dali" if name.startswith("nvidia-dali") else name] = version(name)
    return installed | {"libjpeg_turbo (Pillow)": features.version("libjpeg_turbo")}


def commit() -> str | None:
    """The commit of the running code, with "-dirty" if tracked code is modified.

    Outside git: RESOLUTE_COMMIT of the environment, which a copy of a checkout cannot know otherwise, or None.
    """

    def git(*words: str, statuses: tuple[int, ...] = (0,)) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(["git", *words], cwd=_ROOT, capture_output=True, text=True, timeout=30, check=False)
        if done.returncode not in statuses:
            raise subprocess.SubprocessError(done.stderr)
        return done

    try:
        at = git("rev-parse", "--short=12", "HEAD").stdout.strip()
        modified = git("diff", "--quiet", "HEAD", "--", *CODE, statuses=(0, 1)).returncode
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("RESOLUTE_COMMIT")
    return f"{at}{'-dirty' * modified}"


def header(*, rounds: int = 1, device: torch.device | None = None, packages: Sequence[str] = ()) -> dict[str, Any]:
    """The first fields of every result. Call it before measuring: it records the load of the machine.

    packages: whose versions to add to the usual ones.
    """
    return {
        "format": FORMAT,
        "command": command_line(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "rounds": rounds,
        "commit": commit(),
        "machine": machine(device),
        "versions": versions(packages),
    }


def check_writable(out: Path, *, named: bool = False) -> None:
    """Raise `ResoluteError` if `write` would fail, before minutes of measuring; `named`: as in `check_output`.

    It raises too if `out` is among the published results and the running code is not that of a commit.
    """
    check_output(out, setting="--out", suffixes=(".json",), named=named)
    measured = commit() or "no commit"
    if out.resolve().is_relative_to(RESULTS) and (measured.endswith("-dirty") or measured == "no commit"):
        raise ResoluteError(
            f"--out: got {out}, a published result, with the code at {measured}, expected a commit without changes; "
            "commit them first, or choose a file elsewhere"
        )


def digest(result: Mapping[str, Any]) -> str:
    """SHA-256 over all fields of a result but `digest`, in hex; equal values, however written, have the same."""
    values = json.loads(json.dumps({name: value for name, value in result.items() if name != "digest"}))
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def write(out: Path, result: Mapping[str, Any], *, indent: int | None = 1, quiet: bool = False) -> None:
    """Write `result` as JSON, atomically, with the load of the machine and a digest; print the file's name unless
    `quiet`.

    Raises `ResoluteError` if it cannot be written.
    """
    if "machine" in result:
        result = {**result, "machine": {**result["machine"], "load_after": round(os.getloadavg()[0], 2)}}
    text = json.dumps({**result, "digest": digest(result)}, indent=indent)
    # lists of numbers on one line
    text = re.sub(r"\[\s+([^][{}\"]*?)\s+\]", lambda match: f"[{' '.join(match[1].split())}]", text)
    with output_file(out) as file:
        file.write((text + "\n").encode())
    if not quiet:
        print(f"\nwritten: {out}")


def read_into_cache(shards: ShardSet) -> str:
    """Read all shards once, "warmed", if they take at most a quarter of the memory; else "as found".

    Otherwise the first measurement would pay for a cold page cache.
    """
    paths = {
        shards.path(res, shard)
        for res in shards.resolutions
        for split in shards.splits.values()
        for shard in split.shards
    }
    if sum(path.stat().st_size for path in paths) > _ram_bytes() // 4:
        return "as found"
    read_files(paths)
    return "warmed"


def results_page(folder: Path) -> str:
    """The Markdown page about the result files of a folder."""
    lines = [
        "# Results",
        "",
        "Written by `python -m resolute.benchmarks.figures`. Every file holds the raw values of all rounds;",
        "[LOG.md](LOG.md) has the conclusions. Commands name a shard set or a folder of photos by its last part.",
        "",
        "| file | command that measured it | date | commit | machine | rounds |",
        "|---|---|---|---|---|---|",
    ]
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        machine = result.get("machine", {})
        cells = (
            f"[{path.name}]({path.name})",
            f"`{result.get('command', '')}`",
            result.get("date", ""),
            result.get("commit", ""),
            machine.get("gpu") or f"{machine.get('cpu', '')}, {machine.get('cores', '')} cores",
            result.get("rounds", ""),
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"
