"""Runs the peers' measurements: each in its own process, one at a time, interleaved."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.switch import first_batches, summary
from benchmarks.table import each_repeated, repeated
from pipeline.errors import ResoluteError

from .job import Job
from .psnr import psnr_db, reference
from .registry import PEERS
from .tars import Tars

__all__ = ["Runner", "changes", "prepare", "quality", "rates"]

_FASTEST = 100_000  # images/s; upper bound, so that no peer runs out of batches
_SPARE_S = 600  # a peer that exceeds its expected time by this much has hung
_ROOT = Path(__file__).parents[2]
_FRACTIONS = (1.0, 0.5)  # centre squares in short sides: one that is shrunk, one that is enlarged
_IMAGES = 64


@dataclass(frozen=True, kw_only=True)
class Runner:
    """Runs variants of `job`, each peer's with its own interpreter."""

    job: Job
    peers: tuple[str, ...]
    ffcv_python: str | None
    show_progress: Callable[[str], None]

    def run(self, name: str, **settings: Any) -> Any:
        """The peer's result. Raises `ResoluteError` with its last line of output if it fails."""
        peer = PEERS[name]
        python = self.ffcv_python if peer.module == "with_ffcv" else sys.executable
        assert python is not None
        job = replace(self.job, module=peer.module, variant=peer.variant, **settings)
        try:
            done = subprocess.run(
                [python, "-m", f"{__package__}.child"], input=job.text(), capture_output=True, text=True, cwd=_ROOT,
                timeout=job.seconds + _SPARE_S, env={**os.environ, "PYTHONWARNINGS": "ignore"},
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ResoluteError(f"peer {name}: {error}, expected an answer; leave it out with --only") from None
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.strip()] or ["nothing"]
            raise ResoluteError(
                f"peer {name}: ended with {done.returncode}, got {said[-1].strip()}, expected an answer; "
                f"install what it needs (benchmarks/peers/{peer.module}.py) or leave it out with --only"
            )
        return json.loads(done.stdout)


def rates(runner: Runner, *, rounds: int) -> list[dict[str, Any]]:
    """[{"res", "peers": {name: {"images_per_s", "cpu_s_per_1000", ..., "ours_times"}}}], values `repeated`.

    `ours_times`: our rate / the peer's rate in the same round.
    """
    job, results = runner.job, []
    names = [name for name in runner.peers if PEERS[name].rates]
    # why: two rounds of every worker's batches ahead are in the queues when the clock starts, not more
    warm_up = max(8, 8 * job.workers)
    batches = warm_up + math.ceil(job.seconds * _FASTEST / job.batch_size)
    for res in job.resolutions:
        raw: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        for number in range(rounds):
            for name in names:
                runner.show_progress(f"{res} px, round {number + 1} of {rounds}: {name}")
                raw[name].append(runner.run(name, task="rate", resolutions=(res,), batches=batches, warm_up=warm_up))
        peers = {name: _summary(each, raw.get("ours")) for name, each in raw.items()}
        results.append({"res": res, "warm_up_batches": warm_up, "peers": peers})
    return results


def _summary(each: list[dict[str, Any]], ours: list[dict[str, Any]] | None) -> dict[str, Any]:
    values = each_repeated(each)
    if ours:
        pairs = zip(ours, each, strict=True)
        values["ours_times"] = repeated([mine["images_per_s"] / its["images_per_s"] for mine, its in pairs])
    return values


def quality(runner: Runner) -> list[dict[str, Any]]:
    """[{"res", "crop_frac", "images", "psnr_db": {name: mean}}] against Pillow's antialiased bilinear.

    Every peer resizes the same centre square (side: `crop_frac` x short side) of the first images of the validation
    split; each result is compared with Pillow's on exactly the window that the peer used.
    """
    job = runner.job
    every = {res: Tars(job.shards, res, "val") for res in job.resolutions}
    names = [name for name in runner.peers if PEERS[name].driven]
    if not names or not all(len(tars) for tars in every.values()):
        return []
    files = {}
    for name in names:
        runner.show_progress(f"quality: {name}")
        files[name] = runner.run(name, task="crops", crop_fracs=_FRACTIONS, images=_IMAGES)
    results = []
    for res, tars in every.items():
        jpegs = [tars.jpeg(i) for i in range(min(_IMAGES, len(tars)))]
        for frac in _FRACTIONS:
            values = {}
            for name, its in files.items():
                with np.load(Path(job.scratch, its[f"{res} {frac}"])) as got:
                    exact = reference(jpegs, got["windows"], res)
                    values[name] = statistics.fmean(map(psnr_db, got["images"], exact))
            results.append({"res": res, "crop_frac": frac, "images": len(jpegs), "psnr_db": values})
    return results


def changes(runner: Runner, *, rounds: int, batches: int) -> dict[str, Any]:
    """{"first", "changes": [{"from_res", "to_res", "peers": {name: {"cost_s", "around_s", "steady_s"}}}], "batch_s"}.

    The same definitions as in benchmarks.switch, for a consumer that takes batches as fast as they come.
    """
    res, workers = runner.job.resolutions, runner.job.workers
    raw: dict[str, list[list[list[float]]]] = {name: [] for name in runner.peers}
    for number in range(rounds):
        for name in runner.peers:
            runner.show_progress(f"stage changes, round {number + 1} of {rounds}: {name}")
            times = runner.run(name, task="clock", batches=batches)
            # why: a peer that did not change the resolution would have no cost
            assert all(len(stage) >= batches for stage in times), (name, [len(stage) for stage in times])
            raw[name].append(times)
    results = summary(raw, res, workers, of="peers", without="slowest_ratio")
    return {"batches": batches, "first": first_batches(workers), "changes": results, "batch_s": raw}


def prepare(runner: Runner, names: Sequence[str]) -> dict[str, Any] | None:
    """FFCV's files, if it takes part; see with_ffcv.prepare."""
    if not any(PEERS[name].module == "with_ffcv" for name in names):
        return None
    runner.show_progress("writing FFCV's files")
    answer: dict[str, Any] = runner.run("ffcv", task="prepare")
    return answer
