"""Diagnosis of a run from its log: what limited it and what to change, with numbers.

Waiting for data, changes of resolution that cost time, the share of validation, an idle GPU, and too many epochs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from resolute.train.logs.run_log import (
    SWITCH_STEPS,
    RunLogReader,
    change_text,
    format_duration,
    is_measurable,
    switch_costs,
)
from resolute.train.score import best_score, main_metric

__all__ = ["Finding", "diagnose", "stage_rows"]

# thresholds
_STALL_FRAC = 0.05  # stall time / stage time: below it, data is not the limit
_BURST_FRAC = 0.5  # waits in 1 % of the steps / all waits: above it, single cold files and not a slow loader
_SWITCH_FRAC = 0.5  # cost of a stage change / usual time of its first steps
_EVAL_FRAC = 0.15  # validation time / time of the run
_BUSY_FRAC, _MEMORY_FRAC = 0.85, 0.6  # of a GPU: below them, larger batches may help
_WORSE = 0.005  # best score - last score
_EARLY = 0.8  # epoch of the best score / last epoch
_SMALLER = "`resolute shards` with a lower `--quality`"


@dataclass(frozen=True)
class Finding:
    bad: bool  # a problem to fix; False: information
    text: str


def stage_rows(run: RunLogReader) -> list[dict[str, Any]]:
    """Statistics per stage: times in s, rates in images/s, fractions 0 to 1; None if not measured.

    `later_*` and `burst_frac` are without the first 5 steps of the run.
    """
    steps = run.steps
    rows: list[dict[str, Any]] = []
    ceilings = {record["stage"]: record for record in run.kind("calibration")}
    costs = {
        cost["stage"]: cost
        for cost in switch_costs(steps["stage"], steps["time_s"], steps["res"])
        if not cost["in_stage"]
    }
    for stage in np.unique(steps["stage"]):
        own, ceiling = steps["stage"] == stage, ceilings.get(int(stage), {})
        wait, times = steps["wait_s"][own], np.sort(steps["time_s"][own])
        # why: at the start of the run, the loader has nothing ready, whatever its speed
        later = slice(0 if rows else SWITCH_STEPS, None)
        later_wait = wait[later]
        epochs = [epoch for epoch in run.epochs if epoch["stage"] == stage]
        sizes = sorted({*map(int, steps["res"][own])})
        rows.append(
            {
                "stage": int(stage),
                "res": "-".join(map(str, dict.fromkeys((sizes[0], sizes[-1])))),
                "steps": int(own.sum()),
                "epochs": epochs,
                "batch_size": epochs[0]["batch_size"] if epochs else int(steps["samples"][own].max()),
                "train_s": float(times.sum()),
                "wait_s": float(wait.sum()),
                "stall_frac": float(wait.sum() / times.sum()),
                "later_wait_s": float(later_wait.sum()),
                "later_s": float(steps["time_s"][own][later].sum()),
                "burst_frac": float(
                    np.sort(later_wait)[-max(1, len(wait) // 100) :].sum() / max(later_wait.sum(), 1e-9)
                ),
                "first_wait_s": float(wait[:SWITCH_STEPS].sum() - SWITCH_STEPS * np.median(wait)),
                "images_per_s": float(steps["samples"][own].sum() / times.sum()),
                "unfed_images_per_s": float(steps["samples"][own].sum() / steps["compute_s"][own].sum()),
                "median_s": float(np.median(times)),
                "p99_s": float(times[int(0.99 * (len(times) - 1))]),
                "loader_images_per_s": ceiling.get("loader_images_per_s"),
                "model_images_per_s": ceiling.get("model_images_per_s"),
                "switch": costs.get(int(stage)),
            }
        )
    return rows


def diagnose(run: RunLogReader) -> list[Finding]:
    """All findings, problems first; each names a number of this run. Empty before the first step."""
    rows = stage_rows(run)
    if not rows:
        return []
    findings = [
        *_waiting(run, rows),
        *_changes(rows),
        *_ended_stages(run),
        *(_validation(run) if run.epochs else ()),
        *_gpu(run),
        *_best(run),
    ]
    return sorted(findings, key=lambda finding: not finding.bad)


def _waiting(run: RunLogReader, rows: list[dict[str, Any]]) -> Iterator[Finding]:
    in_blocks, advice = run.start.get("order") == "windowed", _loader_advice(run)
    for row in rows:
        if row["later_wait_s"] <= _STALL_FRAC * row["later_s"]:
            continue
        stall = (
            f"Stage {row['stage']} ({row['res']} px) waited {100 * row['later_wait_s'] / row['later_s']:.0f} % of its "
            f"time for data ({format_duration(row['later_wait_s'])}"
            f"{f', without its first {SWITCH_STEPS} steps' if row is rows[0] else ''})"
        )
        if row["burst_frac"] >= _BURST_FRAC and row["steps"] >= 100:
            cure = "Keep" if in_blocks else 'Read in blocks (`data.order = "windowed"`), or keep'
            yield Finding(
                True,
                (
                    f"{stall}, {100 * row['burst_frac']:.0f} % of it in 1 % of the steps: cold files, not a slow "
                    f"loader. {cure} the shards on a local disk."
                ),
            )
        else:
            yield Finding(True, f"{stall}: {_rates(row)} {advice}".rstrip())
            advice = ""  # once is enough
    train_s, wait_s = (sum(row[key] for row in rows) for key in ("train_s", "wait_s"))
    if wait_s < _STALL_FRAC * train_s:
        compute = 100 * (1 - wait_s / train_s)
        yield Finding(False, f"The model was the limit: {compute:.1f} % of the training time was compute.")


def _rates(row: dict[str, Any]) -> str:
    loader, model = row["loader_images_per_s"], row["model_images_per_s"]
    if loader is None or model is None:
        return f"it ran at {row['images_per_s']:,.0f} images/s, {row['unfed_images_per_s']:,.0f} without the waits."
    if loader > model:
        return (
            f"alone, the loader ({loader:,.0f} images/s) is faster than the model ({model:,.0f}); together they "
            "compete for the cores, or single batches were late."
        )
    return f"the loader delivers {loader:,.0f} images/s, the model can use {model:,.0f}."


def _loader_advice(run: RunLogReader) -> str:
    """Advice on a faster loader for the machine of the log."""
    machine = run.start.get("machine", {})
    threads, cores = machine.get("threads"), machine.get("cores")
    if threads and cores and threads < cores:
        return f"Use more threads: `--threads {cores}` (it ran with {threads})."
    if machine.get("gpu"):
        return f"All cores are in use: try decoding on the GPU (`--decode gpu`), or make smaller images ({_SMALLER})."
    return f"Loader and model use all cores: use more cores, or make smaller images ({_SMALLER})."


def _changes(rows: list[dict[str, Any]]) -> Iterator[Finding]:
    """Changes whose cost is measurable, and more than a part of the time of their first steps."""
    for row in rows:
        cost, waited_s = row["switch"], row["first_wait_s"]
        if cost is None or not is_measurable(cost) or cost["cost_s"] <= _SWITCH_FRAC * SWITCH_STEPS * cost["median_s"]:
            continue
        cause = (
            "Files of the new resolution were not cached: use more memory or a faster disk."
            if waited_s > cost["cost_s"] / 2
            else "Cause: shapes that the warm-up missed, or other work on the machine."
        )
        text = change_text(cost)
        yield Finding(
            True,
            f"{text[0].upper()}{text[1:]}; {format_duration(max(0.0, waited_s))} of it was waiting for data. {cause}",
        )


def _validation(run: RunLogReader) -> Iterator[Finding]:
    epochs = run.epochs
    eval_s, elapsed_s = sum(epoch["eval_s"] for epoch in epochs), epochs[-1]["elapsed_s"]
    validated = sum(epoch["eval_s"] > 0 for epoch in epochs)
    if eval_s > _EVAL_FRAC * elapsed_s and validated > 1:
        every = 2 * run.start.get("recipe_values", {}).get("eval", {}).get("every_epochs", 1)
        yield Finding(
            True,
            (
                f"Validation took {100 * eval_s / elapsed_s:.0f} % of the run ({format_duration(eval_s)}): "
                f"`eval.every_epochs = {every}` would save about {format_duration(eval_s / 2)}."
            ),
        )


def _gpu(run: RunLogReader) -> Iterator[Finding]:
    use = [epoch["gpu_frac"] for epoch in run.epochs if epoch.get("gpu_frac") is not None]
    memory = max((epoch.get("memory_bytes") or 0 for epoch in run.epochs), default=0)
    total = run.start.get("machine", {}).get("gpu_memory_bytes")
    waits, times = (run.steps[name].sum() for name in ("wait_s", "time_s"))
    if use and np.mean(use) < _BUSY_FRAC and waits < _STALL_FRAC * times:
        yield Finding(
            True,
            (
                f"Yet the GPU was busy only {100 * np.mean(use):.0f} % of the time, waiting for kernel launches: use "
                "larger batches or `precision.compile = true`."
            ),
        )
    if total and memory < _MEMORY_FRAC * total:
        yield Finding(
            False,
            (
                f"Tensors used at most {memory / 2**30:.1f} of {total / 2**30:.1f} GiB of GPU memory: larger batches "
                'fit (`batch_size = "auto"` finds the largest).'
            ),
        )


def _ended_stages(run: RunLogReader) -> Iterator[Finding]:
    for record in run.kind("stage_ended"):
        yield Finding(
            False,
            (
                f"Stage {record['stage']} ended early, after epoch {record['epoch']}: {record['reason']}. The run "
                f"continued with epoch {record['next_epoch']}."
            ),
        )


def _best(run: RunLogReader) -> Iterator[Finding]:
    epochs, best = run.epochs, run.best_epoch
    scores = [score for epoch in epochs if (score := best_score(epoch)) is not None]
    if run.kind("end") and len(scores) >= 5 and best is not None:
        metric, top = main_metric(best), best_score(best) or 0.0
        if top - scores[-1] > _WORSE and best["epoch"] < _EARLY * epochs[-1]["epoch"]:
            yield Finding(
                True,
                (
                    f"The best {metric.title}, {metric.text(top)}, was reached in epoch {best['epoch']} of "
                    f"{epochs[-1]['epoch']}; it ended at {metric.text(scores[-1])}: use fewer epochs, or "
                    "stronger augmentation in the late stages."
                ),
            )
