"""Runs loaders one at a time; arguments and result file of `benchmarks.loader` and `benchmarks.change`, its users."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import resolute
from resolute.benchmarks.cli import check_numbers, chosen, parse_resolutions, show_progress
from resolute.benchmarks.record import check_writable, header, read_into_cache, write
from resolute.errors import ResoluteError
from resolute.machine import use_cpus

from .job import Job
from .registry import LOADERS, LoaderEntry

__all__ = ["Runner", "add_arguments", "compare"]

_ROOT = Path(resolute.__file__).parents[1]  # the checkout


@dataclass(frozen=True, kw_only=True)
class Runner:
    """Runs variants of `job`. isolated: each in a new process, with the interpreter that has the loader.

    cores: how many CPU cores such a process may use; 0: all.
    until: time of `time.perf_counter` at which no further round begins; the first is always measured.
    """

    job: Job
    loaders: tuple[str, ...]
    rounds: int
    known: Mapping[str, LoaderEntry] = field(default_factory=lambda: LOADERS)
    ffcv_python: str | None = None
    isolated: bool = True
    cores: int = 0
    until: float = math.inf
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


def add_arguments(parser: argparse.ArgumentParser, out: str) -> None:
    add = parser.add_argument
    add("--shards", type=Path, required=True, metavar="DIR", help="local folder written by `make shards`")
    add("--only", metavar="LOADER,…", help=f"some of {','.join(LOADERS)} (default: all available)")
    add("--res", metavar="PX,…", help="resolutions (default: all of the set)")
    add("--rounds", type=int, default=3, metavar="N", help="interleaved rounds (default: %(default)s)")
    add(
        "--workers",
        type=int,
        default=2,
        metavar="N",
        help="processes or threads per loader, and cores that they share (default: %(default)s)",
    )
    add("--batch-size", type=int, default=64, metavar="N", help="samples per batch (default: %(default)s)")
    add(
        "--ffcv-python",
        default=os.environ.get("FFCV_PYTHON"),
        metavar="PY",
        help="interpreter of an environment with FFCV (default: $FFCV_PYTHON)",
    )
    add("--out", type=Path, default=Path(f"benchmarks/results/{out}"), metavar="FILE", help="default: %(default)s")


def compare(
    args: argparse.Namespace,
    measure: Callable[[Runner], tuple[dict[str, Any], str]],
    *,
    rates: bool,
    resolutions: int = 1,
    **job: Any,
) -> None:
    """Open the shards of the arguments, have `measure` return results and their tables, and write the result file.

    rates: leave out the loaders that have no rate of their own. resolutions: how many are needed at least.
    job: more fields of the `Job`.
    """
    names, left_out = available(args, rates=rates)
    check_numbers(args, rounds=1, workers=1, batch_size=2)
    # why here: --help and command line errors should not wait for slow imports
    from resolute.pipeline.dataset.shard_set import ShardSet

    from .tars import Tars

    shards = ShardSet.open(args.shards)
    selected = parse_resolutions(args.res, shards.resolutions)
    if len(selected) < resolutions:
        raise ResoluteError(f"--res: got {len(selected)} resolution, expected {resolutions} or more; add one")
    tars = {res: Tars(args.shards, res) for res in selected}
    samples = min(map(len, tars.values()))
    if samples < args.batch_size:
        raise ResoluteError(
            f"{args.shards}: got {samples} training images in tars, expected a batch of {args.batch_size}; use a "
            "smaller --batch-size or a set on this machine"
        )
    check_writable(args.out)
    result = header(rounds=args.rounds, packages=["webdataset"])
    machine, cache = result["machine"], read_into_cache(shards)
    print(
        f"{machine['cpu']}, {machine['cores']} cores, {args.workers} workers, batch {args.batch_size}, {samples} "
        f"training images, load before: {machine['load_before']}"
    )
    for name, why in left_out.items():
        print(f"left out: {name}: {why}")
    scratch, began = tempfile.mkdtemp(prefix="resolute-loaders-"), time.perf_counter()
    try:
        runner = Runner(
            job=Job(
                shards=str(args.shards.resolve()),
                scratch=scratch,
                resolutions=selected,
                batch_size=args.batch_size,
                workers=args.workers,
                **job,
            ),
            loaders=tuple(names),
            rounds=args.rounds,
            ffcv_python=args.ffcv_python,
            cores=args.workers,
        )
        used = runner.job
        result |= {
            "settings": {
                "loaders": names,
                "left_out": left_out,
                "workers": args.workers,
                "batch_size": args.batch_size,
                "seconds": used.seconds,
                "scale": used.scale,
                "ratio": used.ratio,
                "flip_prob": used.flip_prob,
            },
            "shards": {
                "hash": shards.hash,
                "resolutions": selected,
                "train_samples": samples,
                "mean_bytes": {str(res): tars[res].mean_bytes for res in selected},
                "page_cache": cache,
            },
            "ffcv": None,
        }
        used_files = {"ffcv-raw" if name == "ffcv-raw" else "ffcv" for name in names if LOADERS[name].module == "ffcv"}
        if used_files:
            show_progress("writing FFCV's files")
            result["ffcv"] = {name: runner.run(name, task="prepare") for name in sorted(used_files)}
        results, text = measure(runner)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    show_progress("")
    print(f"\n{text}")
    write(args.out, result | results | {"took_s": round(time.perf_counter() - began, 1)})


def available(args: argparse.Namespace, *, rates: bool) -> tuple[list[str], dict[str, str]]:
    """The loaders to measure, and the reasons for leaving out others."""
    known = [name for name, loader in LOADERS.items() if loader.has_rate or not rates]
    names = known if args.only is None else chosen(args.only, known)
    left_out = {}
    if not args.ffcv_python:
        for name in names:
            if LOADERS[name].module == "ffcv":
                if args.only is not None:
                    raise ResoluteError(
                        f"--only {name}: got no interpreter, expected one of an environment with FFCV; set "
                        "--ffcv-python PY or FFCV_PYTHON (benchmarks/loaders/ffcv.py says how to make it)"
                    )
                left_out[name] = "needs --ffcv-python PY or FFCV_PYTHON (benchmarks/loaders/ffcv.py says how)"
    elif not (shutil.which(args.ffcv_python) or Path(args.ffcv_python).is_file()):
        raise ResoluteError(f"--ffcv-python: got {args.ffcv_python}, expected an interpreter; correct it")
    return [name for name in names if name not in left_out], left_out
