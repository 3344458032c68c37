"""Checks after a disturbed command has ended: the same files, the same losses and weights, nothing left over.

Every check returns its findings as sentences, [] if there are none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch

__all__ = ["check_training", "compare_trees", "leftover_files"]

# what killed processes leave of multiprocessing, of wandb (timm imports it) and of a C compiler; torchrun and torch's
# inductor never delete theirs
_OF_LIBRARIES = re.compile(r"pymp-|.*wandb-(media|artifacts)$|cc\w{6}\.|torchelastic_|torchinductor_")


def compare_trees(what: str, got: Mapping[str, str], expected: Mapping[str, str]) -> list[str]:
    """Findings for missing, additional and differing files."""
    problems = []
    for names, kind in (
        (expected.keys() - got.keys(), "missing"),
        (got.keys() - expected.keys(), "left over"),
        ({name for name in got.keys() & expected.keys() if got[name] != expected[name]}, "with different content"),
    ):
        if names:
            problems.append(f"{what}: {len(names)} files {kind}: {', '.join(sorted(names)[:4])}")
    return problems


def leftover_files(what: str, folder: Path) -> list[str]:
    """Findings for files and folders in a folder that should hold only sockets and what libraries leave there."""
    names = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if not path.is_socket()]
    names = [name for name in names if not _OF_LIBRARIES.match(name)]
    return [f"{what}: left over: {', '.join(names[:4])}{' …' if len(names) > 4 else ''}"] if names else []


def check_training(run: Path, reference: Path, *, exact: bool) -> list[str]:
    """Findings of a finished run against an undisturbed one. exact: must be bit-identical, else within 1e-6."""
    both, limit = (run, reference), 0.0 if exact else 1e-6
    logs = [[json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()] for folder in both]
    steps = [[[each["step"], each["loss"]] for each in log if each["kind"] == "step"] for log in logs]
    epochs = [[each["epoch"] for each in log if each["kind"] == "epoch"] for log in logs]
    problems = _differences("run.jsonl, steps", *steps, limit=limit)
    problems += _differences("run.jsonl, epochs", *epochs, limit=limit)
    for name in ("last.pt", "best.pt"):
        states = [torch.load(folder / name, weights_only=True) for folder in both]
        weights = [{part: state.get(part) for part in ("model", "ema")} for state in states]
        problems += _differences(name, *weights, limit=limit)
    results = [(folder / "eval.json").read_bytes() if (folder / "eval.json").exists() else b"" for folder in both]
    if results[0] != results[1]:
        problems.append("eval.json: differs from the undisturbed run's")
    names, expected_names = map(_kept_names, both)
    if names != expected_names:
        problems.append(f"run folder: got {names}, expected {expected_names}")
    return problems


def _differences(what: str, got: object, expected: object, *, limit: float) -> list[str]:
    try:
        torch.testing.assert_close(got, expected, rtol=limit, atol=limit)
    except AssertionError as error:
        return [f"{what}: {' '.join(str(error).split())[:300]}"]
    return []


def _kept_names(run: Path) -> list[str]:
    """Names of a run's files; of the checkpoints before the last, whose steps depend on signals, only the number."""
    names = sorted(path.name for path in run.iterdir())
    earlier = [name for name in names if name.startswith("step-")][:-1]
    return [*(name for name in names if name not in earlier), f"{len(earlier)} earlier checkpoints"]
