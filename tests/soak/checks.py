"""Checks after a disturbed command has ended: same bytes, same weights, every sample used once, no leftover files.

Every check returns its findings as sentences, [] if there are none. Checks that need torch run in a fork.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["check_training", "compare_trees", "planned_samples", "tree"]

_TOLERANCE = 1e-6  # relative tolerance of losses and weights if the number of ranks changed


def tree(folder: Path, *, without: Sequence[str] = ("report.html", "source.json")) -> dict[str, str]:
    """{relative path: SHA-256} of every file except those in `without`, which hold times and paths."""
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and (name := str(path.relative_to(folder))) not in without
    }


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


_LEFT_BY_LIBRARIES = re.compile(r"pymp-|.*wandb-(media|artifacts)$")


def leftover_files(what: str, folder: Path, allowed: Sequence[str] = ()) -> list[str]:
    """Findings for everything in a folder that should be empty except for `allowed`.

    Also allowed, as a killed process leaves them: multiprocessing's `pymp-*` with the fork server's socket, and the
    empty folders of wandb, which timm imports.
    """
    paths = sorted(folder.rglob("*")) if folder.exists() else []
    names = [str(path.relative_to(folder)) for path in paths
             if not path.is_socket() and not (path.is_dir() and _LEFT_BY_LIBRARIES.match(path.name))]  # fmt: skip
    names = [name for name in names if name not in allowed]
    return [f"{what}: left over: {', '.join(names[:4])}{' …' if len(names) > 4 else ''}"] if names else []


def planned_samples(shards: str, recipe: Path, fold: tuple[int, int] | None = None) -> list[tuple[int, int, list[int]]]:
    """(epoch, step, sample ids) of every training batch of a run, or of one with this (fold, number of folds)."""
    from resolute.pipeline.dataset.shard_set import ShardSet
    from resolute.pipeline.plan.plan import Plan
    from resolute.train.recipe.schema import Recipe

    parsed = Recipe.load(recipe)
    assert parsed.data.order != "auto"
    shard_set = ShardSet.open(shards, resolutions=parsed.resolutions)
    plan = Plan(
        shard_set.with_fold(*fold) if fold else shard_set, parsed.stages, seed=parsed.seed, order=parsed.data.order,
        fraction_mode=parsed.data.fraction_mode, eval_batch_size=parsed.eval.batch_size,
        eval_every_epochs=parsed.eval.every_epochs,
    )  # fmt: skip
    specs = [plan.batch(i) for i in range(plan.total_batches)]
    return [(spec.epoch, spec.step, spec.ids.tolist()) for spec in specs if spec.split == "train"]


def _log(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "run.jsonl").read_text(encoding="utf-8").splitlines()]


def _seen(folder: Path) -> dict[int, dict[int, Counter[int]]]:
    """{step: {attempt: how often each sample was trained on}}, over all ranks, without incomplete last lines."""
    seen: dict[int, dict[int, Counter[int]]] = {}
    for file in sorted(folder.glob("*")) if folder.exists() else []:
        attempt = int(file.name.partition(".")[0])
        for line in file.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                step, ids = json.loads(line)
                seen.setdefault(step, {}).setdefault(attempt, Counter()).update(ids)
    return seen


def check_training(
    run: Path, reference: Path, seen: Path, planned: Sequence[tuple[int, int, Sequence[int]]], *, exact: bool,
    complete: bool,
) -> list[str]:  # fmt: skip
    """Findings of a finished run against an undisturbed one.

    seen: folder with a file ATTEMPT.RANK of [step, ids] lines. exact: must be bit-identical, else within 1e-6.
    complete: every attempt recorded its samples.
    """
    import torch

    problems = []
    log, reference_log = _log(run), _log(reference)
    for kind, field in (("step", "step"), ("epoch", "epoch")):
        got, expected = (
            [record[field] for record in records if record["kind"] == kind] for records in (log, reference_log)
        )
        if got != expected:
            problems.append(f"run.jsonl: got {len(got)} {kind} records {got[:3]}…, expected {len(expected)}, each once")
    losses, expected_losses = (
        {r["step"]: r["loss"] for r in records if r["kind"] == "step"} for records in (log, reference_log)
    )
    differences = [abs(losses[step] - expected_losses[step]) / abs(expected_losses[step])
                   for step in losses.keys() & expected_losses.keys()]  # fmt: skip
    limit = 0.0 if exact else _TOLERANCE
    if differences and max(differences) > limit:
        problems.append(f"losses: differ by up to {max(differences):.1e}, expected at most {limit:.0e}")
    for name in ("last.pt", "best.pt"):
        state, expected_state = (torch.load(folder / name, weights_only=True) for folder in (run, reference))
        for part in ("model", "ema"):
            for key in expected_state.get(part) or {}:
                a, b = state[part][key].double(), expected_state[part][key].double()
                difference = float((a - b).abs().max()) if a.numel() else 0.0
                if difference > limit * max(1.0, float(b.abs().max()) if b.numel() else 1.0):
                    problems.append(f"{name}: {part}.{key} differs by {difference:.1e} from the undisturbed run's")
                    break
    names, expected_names = (_kept_names(folder) for folder in (run, reference))
    if names != expected_names:
        problems.append(f"run folder: got {names}, expected {expected_names}")
    return problems + _check_samples(_seen(seen), planned, complete=complete)


def _kept_names(run: Path) -> list[str]:
    """Names of a run's files; of the checkpoints before the last, whose steps depend on signals, only the number."""
    names = sorted(path.name for path in run.iterdir())
    earlier = [name for name in names if name.startswith("step-")][:-1]
    return [*(name for name in names if name not in earlier), f"{len(earlier)} earlier checkpoints"]


def _check_samples(
    seen: Mapping[int, Mapping[int, Counter[int]]], planned: Sequence[tuple[int, int, Sequence[int]]], *,
    complete: bool,
) -> list[str]:  # fmt: skip
    problems = []
    by_step: dict[int, Counter[int]] = {}
    epochs: dict[int, Counter[int]] = {}
    for epoch, step, ids in planned:
        by_step.setdefault(step, Counter()).update(ids)
        epochs.setdefault(epoch, Counter()).update(ids)
    for epoch, counts in epochs.items():
        if max(counts.values()) > 1:
            problems.append(f"plan: epoch {epoch} has a sample {max(counts.values())} times")
    for step, expected in by_step.items():
        attempts = seen.get(step, {})
        if complete and expected not in attempts.values():
            problems.append(f"step {step}: no attempt trained on exactly its planned samples")
        if any(got - expected for got in attempts.values()):
            problems.append(f"step {step}: trained on samples that are not planned, or on one twice")
    if extra := seen.keys() - by_step.keys():
        problems.append(f"steps {sorted(extra)[:3]}: not in the plan")
    return problems
