"""Cross-validation: trains one run per fold in RUN/fold-K, one after another, and summarises them in RUN/folds.json."""

from __future__ import annotations

import dataclasses
import gc
import json
import re
import statistics
from pathlib import Path
from typing import Any

from resolute import cuda
from resolute.errors import ResoluteError
from resolute.files import output_file
from resolute.train.devices.distributed import Ranks
from resolute.train.logs.run_log import RunLogReader
from resolute.train.score import METRICS, best_score, main_metric

from .checkpoint import LAST
from .setup import Run
from .trainer import train

__all__ = ["chosen_folds", "cross_validate", "outcome"]


def chosen_folds(text: str) -> tuple[list[int], int]:
    """From "5" (all folds of 5) or "0,2/5" (two of them): the folds, from 0, and their number.

    Raises `ResoluteError` for anything else.
    """
    match = re.fullmatch(r"(?:([0-9]+(?:,[0-9]+)*)/)?([0-9]{1,4})", text)
    folds = int(match[2]) if match else 0
    chosen = [int(word) for word in match[1].split(",")] if match and match[1] else list(range(folds))
    if folds < 2 or max(chosen) >= folds or len({*chosen}) < len(chosen):
        raise ResoluteError(
            f"--folds: got {text}, expected the number of folds, such as 5 to train all 5, or some of them, such as "
            "0,2/5; correct it"
        )
    return chosen, folds


def cross_validate(run: Run, chosen: list[int], folds: int, ranks: Ranks | None = None) -> int:
    """Train or resume each fold of `chosen` in its own folder; `folds` is the number of folds.

    Returns 0, or the exit status of the fold that was stopped. Raises `ResoluteError` for `--from` with several folds.
    """
    if run.options.from_ != LAST and len(chosen) > 1:
        raise ResoluteError(
            f"--from: got {run.options.from_} for {len(chosen)} folds, expected one fold, such as --folds 0/{folds}; "
            "choose one"
        )
    ranks = ranks or Ranks()
    for k in chosen:
        status = train(dataclasses.replace(run, folder=run.folder / f"fold-{k}", fold=(k, folds)), ranks)
        if status:
            return status
        ranks.unwrap()
        gc.collect()  # why: the next fold's network is built before the memory of this one is needed
        cuda.empty_cache()
    if ranks.is_main:
        outcomes = {str(k): outcome(run.folder / f"fold-{k}" / "run.jsonl") for k in chosen}
        first = outcomes[str(chosen[0])]
        metric = next(metrics[0] for metrics in METRICS.values() if f"best_{metrics[0].key}" in first)
        best_key, last_key = f"best_{metric.key}", f"last_{metric.key}"
        summary = {
            name: _mean_and_deviation([fold[name] for fold in outcomes.values()]) for name in (best_key, last_key)
        }
        path = run.folder / "folds.json"
        with output_file(path) as file:
            file.write((json.dumps({"folds": outcomes, **summary}, indent=1) + "\n").encode())
        number = "{:.2f}" if metric.percent else "{:.4g}"
        each = ", ".join(f"fold {k} {number.format(metric.scale * fold[best_key])}" for k, fold in outcomes.items())
        best, last = (
            " ± ".join(number.format(metric.scale * summary[name][part]) for part in ("mean", "deviation"))
            + (" %" if metric.percent else "")
            for name in (best_key, last_key)
        )
        print(f"\nbest {metric.title} {best} ({each}); at the end {last}\n{path}")
    return 0


def outcome(log: Path) -> dict[str, Any]:
    """From a fold's run.jsonl: score and epoch of the best and last validation, and the elapsed time in s.

    The score is the deciding metric of the set's kind: top-1 or mAP, 0 to 1, or R².
    """
    reader = RunLogReader(log)
    reader.read()
    last = next((epoch for epoch in reversed(reader.epochs) if best_score(epoch) is not None), None)
    if last is None:
        raise ResoluteError(f"{log}: got no validation with a finite score, expected one; see the losses in its report")
    best, key = reader.best_epoch or last, main_metric(last).key
    return {
        f"best_{key}": best_score(best),
        "best_epoch": best["epoch"],
        f"last_{key}": best_score(last),
        "last_epoch": last["epoch"],
        "elapsed_s": last["elapsed_s"],
    }


def _mean_and_deviation(values: list[float]) -> dict[str, float]:
    """Mean and sample standard deviation (n - 1); 0 for a single value."""
    return {"mean": statistics.mean(values), "deviation": statistics.stdev(values) if len(values) > 1 else 0.0}
