"""Runs loaders one at a time, and opens the set that they read: what `bench`, `loader` and `change` share."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import resolute
from resolute.benchmarks.cli import chosen, show_progress
from resolute.benchmarks.options import PeerOptions, SetOptions
from resolute.benchmarks.record import check_writable, header, read_into_cache, write
from resolute.errors import ResoluteError
from resolute.machine import use_cpus

from .job import Job
from .registry import LOADERS, LoaderEntry

if TYPE_CHECKING:
    import torch

    from resolute.pipeline.dataset.shard_set import ShardSet

__all__ = ["Runner", "begin", "compare", "open_set"]

_ROOT = Path(resolute.__file__).parents[1]  # the checkout
_BATCH_SIZE = 64


@dataclass(frozen=True, kw_only=True)
class Runner:
    """Runs variants of `job`. isolated: each in a new process, with the interpreter that has the loader.

    cores: how many CPU cores such a process may use; 0: all.
    """

    job: Job
    loaders: tuple[str, ...]
    rounds: int
    known: Mapping[str, LoaderEntry] = field(default_factory=lambda: LOADERS)
    ffcv_python: str | None = None
    isolated: bool = True
    cores: int = 0
    spare_s: float = 600  # a loader that exceeds its expected time by this much has hung

    def run(self, name: str, **settings: Any) -> Any:
        """The result of a loader's job. Raises `ResoluteError` with its last line of output if it fails."""
        loader = self.known[name]
        job = replace(self.job, module=loader.module, variant=loader.variant, **settings)
        if not self.isolated:
            from . import child

            return child.run(job)
        python = self.ffcv_python if loader.module == "ffcv" else sys.executable
        assert python is not None
        environ = {**os.environ, "PYTHONWARNINGS": "ignore"}
        if loader.module == "ffcv":
            environ["NUMBA_NUM_THREADS"] = str(job.workers)  # why: by default no more than cores
        try:
            done = subprocess.run(
                [python, "-m", f"{__package__}.child"],
                input=job.to_json(),
                capture_output=True,
                text=True,
                cwd=_ROOT,
                timeout=job.seconds + self.spare_s,
                env=environ,
                preexec_fn=partial(use_cpus, self.cores),
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ResoluteError(f"loader {name}: {error}, expected a result; leave it out with --only") from None
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()] or ["nothing"]
            raise ResoluteError(
                f"loader {name}: ended with {done.returncode}, got {lines[-1].strip()}, expected a result; "
                f"install what it needs (benchmarks/loaders/{loader.module}.py) or leave it out with --only"
            )
        return json.loads(done.stdout)


def open_set(options: SetOptions, *, least: int = 1) -> tuple[ShardSet, int]:
    """The set at the resolutions of the options, `least` or more, and the batch size.

    Raises `ResoluteError` for options that cannot be measured.
    """
    # why here: --help and command line errors should not wait for slow imports
    from resolute.pipeline.dataset.shard_set import ShardSet

    from .ours import full_batches

    shards = ShardSet.open(options.shards)
    resolutions = tuple(sorted({*options.res})) or shards.resolutions
    if not {*resolutions} <= {*shards.resolutions}:
        got, stored = (",".join(map(str, sizes)) for sizes in (options.res, shards.resolutions))
        raise ResoluteError(f"--res: got {got}, expected some of {stored}; correct it")
    if len(resolutions) < least:
        raise ResoluteError(
            f"{shards.root}: got one resolution, expected two or more for the cost of a change; add one, or leave "
            "out that part of `resolute bench` with --parts loader,training"
        )
    shards = dataclasses.replace(shards, resolutions=resolutions)
    batch_size = options.batch_size or min(_BATCH_SIZE, len(shards.splits["train"]))
    full_batches(shards, resolutions[0], batches=1, batch_size=batch_size)  # raises if the set is too small
    return shards, batch_size


def begin(
    shards: ShardSet,
    settings: Mapping[str, Any],
    *,
    rounds: int,
    device: torch.device | None = None,
    packages: Sequence[str] = (),
) -> dict[str, Any]:
    """The fields of a result file before its measurements, of which the first line is printed."""
    train = shards.splits["train"]
    result = header(rounds=rounds, device=device, packages=packages) | {
        "settings": settings,
        "shards": {
            "name": Path(shards.root).resolve().name,
            "hash": shards.hash,
            "resolutions": shards.resolutions,
            "train_samples": len(train),
            "mean_bytes": {str(res): float(train.stored[res]["nbytes"].mean()) for res in shards.resolutions},
            "page_cache": read_into_cache(shards),
        },
    }
    machine = result["machine"]
    print(
        f"{machine['gpu'] or machine['cpu']}, {machine['cores']} cores, batch {settings['batch_size']}, "
        f"{len(train)} training images of {result['shards']['name']}, load before: {machine['load_before']}",
        flush=True,
    )
    return result


def compare(
    options: PeerOptions,
    measure: Callable[[Runner], tuple[dict[str, Any], str]],
    *,
    out: Path,
    rates: bool,
    least: int = 1,
    **job: Any,
) -> None:
    """Have `measure` return results and their tables for the loaders of the options, and write the result file `out`.

    rates: leave out the loaders that have no rate of their own. least: how many resolutions are needed.
    job: more fields of the `Job`. Raises `ResoluteError`.
    """
    names, left_out = available(options, rates=rates)
    shards, batch_size = open_set(options, least=least)
    if not Path(options.shards).is_dir():
        raise ResoluteError(f"--shards: got {options.shards}, expected a folder, which all loaders read; copy the set")
    check_writable(out)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="resolute-loaders-", ignore_cleanup_errors=True) as scratch:
        runner = Runner(
            job=Job(
                shards=str(Path(options.shards).resolve()),
                scratch=scratch,
                resolutions=shards.resolutions,
                batch_size=batch_size,
                workers=options.workers,
                **job,
            ),
            loaders=tuple(names),
            rounds=options.rounds,
            ffcv_python=options.ffcv_python or os.environ.get("FFCV_PYTHON"),
            cores=options.workers,
        )
        used = ("workers", "batch_size", "seconds", "scale", "ratio", "flip_prob")
        settings = {"loaders": names, "left_out": left_out, **{name: getattr(runner.job, name) for name in used}}
        result = begin(shards, settings, rounds=options.rounds, packages=["webdataset"]) | {"ffcv": None}
        for name, why in left_out.items():
            print(f"left out: {name}: {why}")
        used_files = {"ffcv-raw" if name == "ffcv-raw" else "ffcv" for name in names if LOADERS[name].module == "ffcv"}
        if used_files:
            show_progress("writing FFCV's files")
            result["ffcv"] = {name: runner.run(name, task="prepare") for name in sorted(used_files)}
        results, text = measure(runner)
    show_progress("")
    print(f"\n{text}")
    write(out, result | results | {"took_s": round(time.perf_counter() - began, 1)})


def available(options: PeerOptions, *, rates: bool) -> tuple[list[str], dict[str, str]]:
    """The loaders to measure, and the reasons for leaving out others."""
    known = [name for name, loader in LOADERS.items() if loader.has_rate or not rates]
    names = chosen(options.only, known) if options.only else known
    python, left_out = options.ffcv_python or os.environ.get("FFCV_PYTHON"), {}
    if not python:
        for name in names:
            if LOADERS[name].module == "ffcv":
                if options.only:
                    raise ResoluteError(
                        f"--only {name}: got no interpreter, expected one of an environment with FFCV; set "
                        "--ffcv-python PY or FFCV_PYTHON (benchmarks/loaders/ffcv.py says how to make it)"
                    )
                left_out[name] = "needs --ffcv-python PY or FFCV_PYTHON (benchmarks/loaders/ffcv.py says how)"
    elif not (shutil.which(python) or Path(python).is_file()):
        raise ResoluteError(f"--ffcv-python: got {python}, expected an interpreter; correct it")
    return [name for name in names if name not in left_out], left_out
