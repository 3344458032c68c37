"""Cross-validation: trains one run per fold in RUN/fold-K, one after another, and summarises them in RUN/folds.json.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

from pipeline.dataset.open_dataset import is_foreign
from pipeline.dataset.shard_set import command_with_folds, read_manifest
from pipeline.dataset.source_record import shards_command
from pipeline.errors import ResoluteError
from pipeline.storage.atomic_file import output_file
from pipeline.storage.base import open_files
from train.logs.metrics import read_log
from train.logs.run_log import best_epoch, best_top1

from .distributed import Ranks
from .trainer import Options, run

__all__ = ["chosen_folds", "cross_validate", "outcome"]


def chosen_folds(text: str, *, shards: str | Path) -> list[int]:
    """Fold numbers from "all" or "0,2". Raises `ResoluteError` for shards without folds and for unknown folds."""
    if is_foreign(str(shards)):
        raise ResoluteError(
            f"{shards}: got --folds {text} for plain tars, which have no folds, expected a set made with FOLDS=5; "
            f"run {shards_command('shards', (), {'SRC': str(shards), 'FOLDS': '5'})} and train on that set"
        )
    files = open_files(shards)
    manifest, _ = read_manifest(files)
    folds = manifest["settings"]["val"].get("folds")
    if folds is None:
        raise ResoluteError(
            f"{shards}: the set has no folds, got --folds {text}, expected one made with FOLDS=5; "
            f"run {command_with_folds(files, manifest)}"
        )
    words = [str(k) for k in range(folds)] if text == "all" else text.split(",")
    if not all(word.isdecimal() and int(word) < folds for word in words) or len({*words}) < len(words):
        raise ResoluteError(f"--folds: got {text}, expected all, or numbers from 0 to {folds - 1} separated by commas")
    return [int(word) for word in words]


def cross_validate(options: Options, folds: list[int], ranks: Ranks | None = None) -> int:
    """Train or resume each fold in its own folder. Returns 0, or the exit status of the fold that was stopped."""
    for k in folds:
        status = run(dataclasses.replace(options, folder=options.folder / f"fold-{k}", fold=k), ranks)
        if status:
            return status
    if ranks is None or ranks.is_main:
        outcomes = {str(k): outcome(options.folder / f"fold-{k}" / "run.jsonl") for k in folds}
        names = ("best_top1", "last_top1")
        summary = {name: _mean_and_deviation([fold[name] for fold in outcomes.values()]) for name in names}
        path = options.folder / "folds.json"
        with output_file(path) as file:
            file.write((json.dumps({"folds": outcomes, **summary}, indent=1) + "\n").encode())
        each = ", ".join(f"fold {k} {100 * fold['best_top1']:.2f}" for k, fold in outcomes.items())
        best, last = summary["best_top1"], summary["last_top1"]
        print(f"\nbest top-1 {100 * best['mean']:.2f} ± {100 * best['deviation']:.2f} % ({each}); at the end "
              f"{100 * last['mean']:.2f} ± {100 * last['deviation']:.2f} %\n{path}")  # fmt: skip
    return 0


def outcome(log: Path) -> dict[str, Any]:
    """From a fold's run.jsonl: top-1 (0 to 1) and epoch of the best and last validation, and the elapsed time in s."""
    epochs = [record for record in read_log(log) if record["kind"] == "epoch" and record["top1"] is not None]
    last = epochs[-1]
    best = best_epoch(epochs) or last
    return {"best_top1": best_top1(best), "best_epoch": best["epoch"], "last_top1": best_top1(last),
            "last_epoch": last["epoch"], "elapsed_s": last["elapsed_s"]}  # fmt: skip


def _mean_and_deviation(values: list[float]) -> dict[str, float]:
    """Mean and sample standard deviation (n - 1); 0 for a single value."""
    return {"mean": statistics.mean(values), "deviation": statistics.stdev(values) if len(values) > 1 else 0.0}
