"""Diagnosis of a run from its log: rules that state, with numbers, what limited it and what to change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from resolute.train.logs.run_log import SWITCH_STEPS, RunLogReader, format_duration, switch_costs
from resolute.train.logs.score import best_score, main_metric

from .classes import class_counts

__all__ = ["Finding", "diagnose", "stage_rows"]

# thresholds
_STALL_FRAC = 0.05  # stall time / stage time: below it, data is not the limit
_BURST_FRAC = 0.5  # waits in 1 % of the steps / all waits: above it, single cold files and not a slow loader
_DRIFT_FRAC = 0.05  # extra time of a stage's first epoch / usual time
_SWITCH_FRAC = 0.5  # cost of a stage change / usual time of its first steps
_UNEVEN = 2.0  # 99th percentile / median of a stage's compute time per step
_EVAL_FRAC = 0.15  # validation time / time of the run
_WORSE = 0.005  # best top-1 - last top-1


@dataclass(frozen=True)
class Finding:
    bad: bool  # a problem to fix; False: information
    text: str


def stage_rows(run: RunLogReader) -> list[dict[str, Any]]:
    """Statistics per stage: times in s, rates in images/s, fractions 0 to 1; None if not measured."""
    steps, rows = run.steps, []
    ceilings = {record["stage"]: record for record in run.kind("calibration")}
    costs = {cost["stage"]: cost for cost in switch_costs(steps["stage"], steps["time_s"], steps["res"])
             if not cost["in_stage"]}  # fmt: skip
    for stage in np.unique(steps["stage"]):
        own, ceiling = steps["stage"] == stage, ceilings.get(int(stage), {})
        wait, times = steps["wait_s"][own], np.sort(steps["time_s"][own])
        epochs = [epoch for epoch in run.epochs if epoch["stage"] == stage]
        compute, res = steps["compute_s"][own], steps["res"][own]
        for size in np.unique(res):  # why: steps of different sizes are not comparable
            compute[res == size] /= np.median(compute[res == size])
        sizes = sorted({*map(int, res)})
        rows.append({
            "stage": int(stage), "res": "-".join(map(str, dict.fromkeys((sizes[0], sizes[-1])))),
            "steps": int(own.sum()), "epochs": epochs,
            "batch_size": epochs[0]["batch_size"] if epochs else int(steps["samples"][own].max()),
            "train_s": float(times.sum()), "wait_s": float(wait.sum()), "stall_frac": float(wait.sum() / times.sum()),
            "burst_frac": float(np.sort(wait)[-max(1, len(wait) // 100) :].sum() / max(wait.sum(), 1e-9)),
            "longest_wait_s": float(wait.max()), "longest_wait_step": int(steps["step"][own][wait.argmax()]),
            "uneven": float(np.quantile(compute, 0.99)),
            "first_wait_s": float(wait[:SWITCH_STEPS].sum() - SWITCH_STEPS * np.median(wait)),
            "images_per_s": float(steps["samples"][own].sum() / times.sum()),
            "unfed_images_per_s": float(steps["samples"][own].sum() / steps["compute_s"][own].sum()),
            "median_s": float(np.median(times)), "p99_s": float(times[int(0.99 * (len(times) - 1))]),
            "loader_images_per_s": ceiling.get("loader_images_per_s"),
            "model_images_per_s": ceiling.get("model_images_per_s"), "switch": costs.get(int(stage)),
        })  # fmt: skip
    return rows


def diagnose(run: RunLogReader) -> list[Finding]:
    """All findings, problems first. Empty before the first step."""
    rows = stage_rows(run)
    findings = [finding for row in rows for finding in _stage(run, row)] + list(_run(run, rows))
    return sorted(findings, key=lambda finding: not finding.bad)


def _stage(run: RunLogReader, row: dict[str, Any]) -> Iterator[Finding]:
    name = f"Stage {row['stage']} ({row['res']} px)"
    if row["stall_frac"] >= _STALL_FRAC:
        stall = f"{name} waited {100 * row['stall_frac']:.0f} % of its time for data ({format_duration(row['wait_s'])})"
        if row["burst_frac"] >= _BURST_FRAC and row["steps"] >= 100:
            yield Finding(True, (
                f"{stall}, {100 * row['burst_frac']:.0f} % of it in 1 % of the steps (longest "
                f"{format_duration(row['longest_wait_s'])}, at step {row['longest_wait_step']}): cold files, not a "
                'slow loader. Read in blocks (`data.order = "block"`), or keep the shards on a local disk.'
            ))  # fmt: skip
        else:
            yield Finding(True, f"{stall}: {_rates(row)} {_loader_advice(run)}")
    cost = row["switch"]
    if cost is not None:
        usual = SWITCH_STEPS * cost["median_s"]
        bad, waited = cost["cost_s"] > _SWITCH_FRAC * usual, row["first_wait_s"]
        yield Finding(bad, (
            f"The first {SWITCH_STEPS} steps after the change to {row['res']} px took "
            f"{format_duration(abs(cost['cost_s']))} {'longer' if cost['cost_s'] >= 0 else 'less'} than "
            f"{SWITCH_STEPS} usual ones ({format_duration(usual)}); the slowest took {cost['slowest_ratio']:.1f}x the "
            "median"
            + (f"; {format_duration(max(0.0, waited))} of it was waiting for data. " + (
                "Files of the new resolution were not cached: use more memory or a faster disk."
                if waited > cost["cost_s"] / 2
                else "Cause: shapes that the warm-up missed, or other work on the machine."
            ) if bad else ".")
        ))  # fmt: skip
    if row["steps"] >= 100 and row["uneven"] > _UNEVEN:
        yield Finding(True, (
            f"{name}: 1 % of the steps took at least {row['uneven']:.1f}x the median compute time: other work on the "
            "machine."
        ))  # fmt: skip
    if len(row["epochs"]) >= 3:
        yield from _slow_start(row)


def _slow_start(row: dict[str, Any]) -> Iterator[Finding]:
    """A finding if the first epoch of a stage was slower than its others, and whether in waiting or computing."""
    names = ("train_s", "wait_s")
    first, *later = ([epoch[name] / epoch["samples"] for name in names] for epoch in row["epochs"])
    usual_s, usual_wait_s = np.median(later, axis=0).tolist()
    extra_s, waited_s = first[0] - usual_s, first[1] - usual_wait_s
    if extra_s <= _DRIFT_FRAC * usual_s:
        return
    slower = (
        f"Epoch {row['epochs'][0]['epoch']}, the first of stage {row['stage']}, was "
        f"{100 * extra_s / usual_s:.0f} % slower than the others at {row['res']} px, "
    )
    if waited_s > extra_s / 2:
        part = f"{100 * min(1.0, waited_s / extra_s):.0f} % of that"
        yield Finding(True, f"{slower}{part} waiting for data: cold files; use more memory or a faster disk.")
    else:
        yield Finding(True, f"{slower}in computing, not in waiting for data: other work on the machine.")


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
        return "All cores are in use: try decoding on the GPU (`--decode auto`), or make smaller shards (`QUALITY=…`)."
    return "Loader and model use all cores: use more cores, or make smaller shards (`QUALITY=…`)."


def _run(run: RunLogReader, rows: list[dict[str, Any]]) -> Iterator[Finding]:
    train_s = sum(row["train_s"] for row in rows)
    if not train_s:
        return
    wait_s, epochs = sum(row["wait_s"] for row in rows), run.epochs
    machine = run.start.get("machine", {})
    if wait_s < _STALL_FRAC * train_s:
        longest = max(rows, key=lambda row: float(row["train_s"]))
        yield Finding(False, (
            f"The model was the limit: {100 * (1 - wait_s / train_s):.1f} % of the training time was compute. Stage "
            f"{longest['stage']} ({longest['res']} px) took {100 * longest['train_s'] / train_s:.0f} % of it: fewer "
            "epochs or a smaller fraction there save the most time."
        ))  # fmt: skip
        use = [epoch["gpu_frac"] for epoch in epochs if epoch.get("gpu_frac") is not None]
        if use and np.mean(use) < 0.85:
            yield Finding(True, (
                f"Yet the GPU was busy only {100 * np.mean(use):.0f} % of the time, waiting for kernel launches: use "
                "larger batches or `precision.compile = true`."
            ))  # fmt: skip
    if not epochs:
        return
    counts = class_counts(run)
    if counts is not None and (text := counts.finding()):
        yield Finding(True, text)
    eval_s, elapsed_s = sum(epoch["eval_s"] for epoch in epochs), epochs[-1]["elapsed_s"]
    if eval_s > _EVAL_FRAC * elapsed_s:
        yield Finding(True, (
            f"Validation took {100 * eval_s / elapsed_s:.0f} % of the run ({format_duration(eval_s)}): "
            f"`eval.every_epochs = 2` would save about {format_duration(eval_s / 2)}."
        ))  # fmt: skip
    memory, total = max((e.get("memory_bytes") or 0) for e in epochs), machine.get("gpu_memory_bytes")
    if total and memory < 0.6 * total:
        yield Finding(False, (
            f"Tensors used at most {memory / 2**30:.1f} of {total / 2**30:.1f} GiB of GPU memory: larger batches fit "
            '(`batch_size = "auto"` finds the largest).'
        ))  # fmt: skip
    scores = [score for epoch in epochs if (score := best_score(epoch)) is not None]
    best = run.best_epoch
    if run.kind("end") and len(scores) >= 5 and best is not None:
        metric, top = main_metric(best), best_score(best) or 0.0
        if top - scores[-1] > _WORSE and best["epoch"] < 0.8 * epochs[-1]["epoch"]:
            yield Finding(True, (
                f"The best {metric.title}, {metric.text(top)}, was reached in epoch {best['epoch']} of "
                f"{epochs[-1]['epoch']}; it ended at {metric.text(scores[-1])}: use fewer epochs, or "
                "stronger augmentation in the late stages."
            ))  # fmt: skip
